"""Check of `os.fork`: if a child of a rank exits, or uses the group, the other ranks do not lose the rank."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import weakref
from collections.abc import Callable

import torch

from gradwire.collectives import Collective, build
from gradwire.errors import CollectiveTimeout, UsageError
from gradwire.groups.base import Group
from gradwire.groups.work import Work
from gradwire.testing.conformance.compare import Problems, holds, raises, unlike
from gradwire.testing.conformance.second_group import PATIENCE, SHORT, meet, side_group


def _misuse(group: Group, op: Collective, pending: Work | None) -> str:
    """In the child: try every use of the group; returns what was not refused. `op` was made before: a child cannot use CUDA."""
    wrong = []
    uses: dict[str, Callable[[], object]] = {
        "submit": lambda: group.submit(build.barrier(label="of a child").within(1.0)),
        "run": lambda: group.run(op),
        "recover": lambda: group.recover(1.0),
        "check_peers": group.check_peers,
    }
    if pending is not None:
        uses |= {"wait": lambda: pending.wait(1.0), "get_future": pending.get_future}
    for name, use in uses.items():
        try:
            use()
        except UsageError as error:
            if "forked" not in str(error):
                wrong.append(f"{name} raised {error}")
        except BaseException as error:
            wrong.append(f"{name} raised {type(error).__name__}: {error}")
        else:
            wrong.append(f"{name} was accepted")
    group.abort("of a child")
    group.close()
    weakref.finalize._exitfunc()  # type: ignore[attr-defined]  # what Python does when a child ends with sys.exit()
    return "; ".join(wrong)


def _in_child(fn: Callable[[], str]) -> str:
    """What `fn` returns in a forked child, or how the child ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "it raised"
        with contextlib.suppress(BaseException):
            answer = fn()
        os.write(writer, answer.encode()[:4000])
        os._exit(0)
    os.close(writer)
    until = time.monotonic() + PATIENCE
    status = 1
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            status = 0
            break
        time.sleep(0.005)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    return said if status else f"the child did not end within {PATIENCE} s"


def check_forked_child(group: Group) -> Problems:
    """A forked child gets UsageError from the group, and its exit does not affect the rank."""
    if group.in_one_process:
        return
    side = side_group(group)
    last, pending, message = group.size - 1, None, torch.ones(1)
    # On CUDA a receive without a matching send would block its stream.
    has_pending = last > 0 and message.device.type == "cpu"
    if group.rank == last:
        if has_pending:
            pending = group.submit(build.recv(message, src=0, label="in flight during a fork"))
        op = build.all_reduce(torch.ones(3), label="of a child").within(1.0)
        said = _in_child(lambda: _misuse(group, op, pending))
        yield from holds(not said, f"in a forked child: {said}")
    t = torch.ones(3)
    op = build.all_reduce(t, label="after a child has ended")
    # The rank is late, so that the others check whether it is alive.
    if group.rank == last:
        meet(side)
    work = group.submit(op)
    if group.rank < last:
        yield from raises(CollectiveTimeout, "a wait for a rank whose child has ended", lambda: work.wait(3 * SHORT))
        meet(side)
    work.wait()
    side.close()
    yield from unlike("all_reduce after a child of a rank has ended", t, torch.full((3,), float(group.size)))
    if has_pending and group.rank == 0:
        group.send(message, dst=last)
    if pending is not None:
        pending.wait(PATIENCE)
    group.check_peers()
