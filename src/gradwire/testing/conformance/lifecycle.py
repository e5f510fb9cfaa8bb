"""Checks of how things end: deadlines, missing ranks, abort, close, a peer that leaves. Each needs a separate world."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable

import torch

from gradwire.collectives import Collective, build
from gradwire.errors import (
    ClosedError,
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    GroupError,
    PeerLost,
    UsageError,
)
from gradwire.events import CollectiveFailed
from gradwire.groups.base import Group
from gradwire.groups.completion import WorkInfo
from gradwire.groups.work import Work
from gradwire.testing.conformance.compare import PATIENCE, SHORT, SOON, Problems, beside, holds, meet, raises, same


def _names_the_missing(group: Group, error: CollectiveTimeout, *, known: bool) -> Problems:
    """If the group knows which ranks have joined, the error contains it, and the last rank is among the missing."""
    joined, missing = error.joined, error.missing
    if joined is None or missing is None:
        yield from holds(not known, f"the group knows which ranks have joined, but the error has {joined=}, {missing=}")
    else:
        right = group.size - 1 in missing and group.rank in joined and not set(joined) & set(missing)
        yield from holds(right, f"rank {group.size - 1} never joined, and this one did: {joined=}, {missing=}")


@beside
def check_deadline(group: Group, side: Group) -> Problems:
    """An operation that a rank never joins fails at its deadline, and everything about it reports that, repeatedly."""
    if group.rank < group.size - 1:
        infos: list[WorkInfo] = []
        failed: list[CollectiveFailed] = []
        group.on_completion(infos.append)
        group.events.listen(lambda event: failed.append(event) if isinstance(event, CollectiveFailed) else None)
        work = group.submit(build.all_reduce(torch.ones(3), label="forever").within(SHORT))
        future = work.get_future()
        yield from raises(CollectiveTimeout, "a wait shorter than the deadline", lambda: work.wait(SHORT / 2))
        known = group.arrivals(work) is not None
        error = yield from raises(CollectiveTimeout, "wait past the deadline", work.wait)
        if error is not None:
            yield from same("op of the CollectiveTimeout", error.op, work.op.signature)
            yield from holds("forever" in str(error), f"the CollectiveTimeout does not name the label: {error}")
            yield from _names_the_missing(group, error, known=known)
        again = yield from raises(CollectiveTimeout, "a second wait past the deadline", work.wait)
        yield from same("what a second wait raised", str(again), str(error))
        yield from holds(again is not error, "two waits raised the same object, whose traceback grows with each")
        kept = work.exception()
        yield from same("exception()", (type(kept), str(kept)), (type(error), str(error)))
        yield from same("is_completed() and is_success()", (work.is_completed(), work.is_success()), (True, False))
        yield from holds("failed: CollectiveTimeout" in repr(work), f"repr of a failed operation is {work!r}")
        yield from raises(CollectiveTimeout, "result() past the deadline", work.result)
        yield from raises(CollectiveTimeout, "the future, taken before the deadline,", future.wait)
        yield from raises(CollectiveTimeout, "a future taken after the deadline", work.get_future().wait)
        group.flush_completions()
        yield from same("errors passed to hooks", [i.error for i in infos if i.label == "forever"], [kept])
        yield from same("errors passed to listeners", [e.error for e in failed if e.label == "forever"], [kept])


@beside
def check_deadline_unwatched(group: Group, side: Group) -> Problems:
    """The deadline is enforced even if no caller waits, and `limit` can shorten it after submission."""
    if group.rank < group.size - 1:
        told = threading.Event()
        work = group.submit(build.barrier(label="unwatched"))
        work.limit(SHORT)
        work.add_done_callback(lambda work: told.set())
        yield from holds(told.wait(SHORT + SOON), f"no caller waits, and it has not failed: {work}")
        yield from holds(isinstance(work.exception(), CollectiveTimeout), f"exception() is {work.exception()!r}")


@beside
def check_missing_rank(group: Group, side: Group) -> Problems:
    """A monitored barrier names the missing rank."""
    known = group.arrivals(group.barrier()) is not None
    if group.rank < group.size - 1:
        what = "monitored_barrier with a rank missing"
        error = yield from raises(CollectiveTimeout, what, lambda: group.monitored_barrier(SHORT))
        if error is not None:
            yield from _names_the_missing(group, error, known=known)
        yield from holds("monitored_barrier" in str(error), f"the CollectiveTimeout does not name the label: {error}")


@beside
def check_abort(group: Group, side: Group) -> Problems:
    """`abort` wakes a rank that waits and fails later operations, at once; peers get an error, at their deadline at the latest."""
    done = group.barrier()
    work = None
    if group.rank < group.size - 1:
        work = group.submit(build.all_reduce(torch.ones(3), label="doomed"))
    meet(side)
    if group.rank == 0 and work is not None:
        began = time.perf_counter()
        thread = threading.Thread(target=group.abort, args=("the check says so",), daemon=True)
        thread.start()
        error = yield from raises(GroupAborted, "a wait during which another thread aborts", lambda: work.wait(SOON))
        thread.join(PATIENCE)
        group.abort("once more")
        late = build.barrier(label="too late").within(SHORT)
        later = yield from raises(GroupAborted, "submit after abort", lambda: group.submit(late).wait())
        for told in (problem.reason for problem in (error, later) if problem is not None):
            yield from holds("the check says so" in told, f"reason of the GroupAborted is {told!r}")
        took = time.perf_counter() - began
        yield from holds(took < SOON, f"abort, a wait and a submit took {took:.1f} s")
        yield from holds("failed" in repr(group) or "abort" in repr(group), f"repr after abort is {group!r}")
        yield from same("wait() after abort for what had finished before", done.wait(), True)
    elif work is not None:
        work.limit(time.perf_counter() - work.started + SHORT)
        yield from raises(GroupError, "an operation in flight when a peer aborted", work.wait)
    with contextlib.suppress(GroupError):
        meet(side)
    group.close()


@beside
def check_recover_again(group: Group, side: Group) -> Problems:
    """A recovery with a missing rank times out, and the next one, with all ranks, succeeds."""
    last = group.size - 1

    def abort() -> None:
        for mine in (group.rank == 0, group.rank > 0):  # the others, if they have not failed yet
            if mine:
                group.abort("to recover from")
            meet(side)

    abort()
    try:
        group.recover(PATIENCE)
    except GroupError:  # a group need not support recovery
        return
    abort()
    if group.rank < last:
        began = time.perf_counter()
        yield from raises(CollectiveTimeout, "recover() with a rank missing", lambda: group.recover(SHORT))
        took = time.perf_counter() - began
        yield from holds(took >= SHORT, f"recover({SHORT}) with a rank missing gave up after {took:.3f} s")
    meet(side)
    # The ranks that timed out may count as present: then this rank passes at once, and their next call joins the same recovery.
    through = False
    if group.rank == last:
        with contextlib.suppress(CollectiveTimeout):
            group.recover(SHORT)
            through = True
    meet(side)
    for _ in range(2):
        if not through:
            group.recover(PATIENCE)
        through = False
        t = torch.ones(3)
        group.all_reduce(t)
        yield from same("all_reduce after a recovery", t.tolist(), [float(group.size)] * 3)


def check_close(group: Group) -> Problems:
    """`close` lets the operation in flight finish; closing twice is a no-op; later submits raise ClosedError."""
    t = torch.ones(2)
    work = group.all_reduce(t, async_op=True, label="the last")
    group.close()
    group.close()
    yield from same("wait() after close", work.wait(), True)
    yield from same("all_reduce in flight at close", t.tolist(), [float(group.size)] * 2)
    late = build.barrier(label="too late").within(SHORT)
    yield from raises(ClosedError, "submit after close", lambda: group.submit(late).wait())
    yield from same("closed", group.closed, True)
    yield from holds("closed" in repr(group), f"repr after close is {group!r}")


@beside
def check_close_in_flight(group: Group, side: Group) -> Problems:
    """An operation that no other rank joins fails with ClosedError when `close` times out."""
    if group.rank == 0:
        work = group.submit(build.barrier(label="left alone"))
        began = time.perf_counter()
        group.close(timeout=SHORT)
        took = time.perf_counter() - began
        yield from holds(took < SHORT + 2 * SOON, f"close(timeout={SHORT}) took {took:.1f} s")
        yield from raises(ClosedError, "an operation in flight when the group was closed", work.wait)


@beside
def check_peer_leaves(group: Group, side: Group) -> Problems:
    """When a peer has closed its group, the others' operations fail, at their deadline at the latest."""
    last = group.size - 1
    if group.rank == last:
        group.close()
    meet(side)
    if group.rank < last:
        op = build.all_reduce(torch.ones(3), label="without you").within(SHORT)
        error = yield from raises(GroupError, "all_reduce after a peer has left", lambda: group.submit(op).wait())
        if isinstance(error, PeerLost) and error.rank is not None:
            yield from same("rank of the PeerLost", error.rank, last)


@beside
def check_recv_any_alone(group: Group, side: Group) -> Problems:
    """A receive from any rank fails when all the others have closed their groups, at its deadline at the latest.

    A group that fails receives from one such rank with PeerLost detects that ranks leave, so it must do the same here.
    """
    if group.rank == 0:
        waiting = group.submit(build.recv(torch.zeros(1), label="from anyone").within(SOON))
        meet(side)
        meet(side)
        later = build.recv(torch.zeros(1), tag=3, label="from no one").within(SHORT)
        error = yield from raises(GroupError, "a receive from any rank, when all others have closed", waiting.wait)
        if isinstance(error, CollectiveTimeout):
            named = build.recv(torch.zeros(1), src=1, tag=4, label="from rank 1").within(SOON)
            told = yield from raises(GroupError, "a receive from a rank that has closed", lambda: group.run(named))
            late = "a receive from any rank ended at its deadline, though all others had closed; one from rank 1 sooner"
            yield from holds(not isinstance(told, PeerLost), f"{late}: {told}")
        yield from raises(GroupError, "a receive from any rank after all others have closed", lambda: group.run(later))
    else:
        meet(side)
        group.close()
        meet(side)


@beside
def check_mismatch(group: Group, side: Group) -> Problems:
    """Different collectives on different ranks, on a group that checks: no rank hangs, and all see what each submitted."""
    if not group.tells_mismatch:
        return
    last = group.size - 1
    op = build.all_reduce(torch.ones(4 if group.rank < last else 5), label="which?").within(SHORT)
    try:
        group.submit(op).wait()
    except CollectiveMismatch as error:
        if error.ops:
            yield from same("own entry in CollectiveMismatch.ops", error.ops.get(group.rank), op.signature)
            yield from holds(len(set(error.ops.values())) > 1, f"CollectiveMismatch.ops agree: {error.ops}")
        differs = "[4]" in str(error) and "[5]" in str(error)
        yield from holds(differs, f"the mismatch does not contain what differs: {error}")
    except GroupError:
        pass
    except Exception as error:
        yield f"all_reduce of different sizes raised {type(error).__name__} ({error}), expected a GroupError"


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
            wrong.append(f"{name} was accepted")
        except BaseException as error:
            if not isinstance(error, UsageError) or "forked" not in str(error):
                wrong.append(f"{name} raised {type(error).__name__}: {error}")
    group.abort("of a child")
    group.close()
    weakref.finalize._exitfunc()  # type: ignore[attr-defined]  # what Python does when a child ends with sys.exit()
    return "; ".join(wrong) or "ok"


def _in_child(fn: Callable[[], str]) -> str:
    """What `fn` returns in a forked child; "" if the child died."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "it raised"
        with contextlib.suppress(BaseException):
            answer = fn()
        os.write(writer, answer.encode()[:4000])
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        ready = select.select([pipe], [], [], PATIENCE)[0]
        if not ready:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return pipe.read().decode() if ready else f"the child did not end within {PATIENCE} s"


@beside
def check_forked_child(group: Group, side: Group) -> Problems:
    """A forked child gets UsageError from the group, and its exit does not affect the rank."""
    if group.in_one_process:
        return
    last, pending, message = group.size - 1, None, torch.ones(1)
    # On CUDA a receive without a matching send would block its stream.
    has_pending = last > 0 and message.device.type == "cpu"
    if group.rank == last:
        if has_pending:
            pending = group.submit(build.recv(message, src=0, label="in flight during a fork"))
        op = build.all_reduce(torch.ones(3), label="of a child").within(1.0)
        said = _in_child(lambda: _misuse(group, op, pending))
        yield from holds(said == "ok", f"in a forked child: {said or 'it died'}")
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
    yield from same("all_reduce after a child of a rank has ended", t.tolist(), [float(group.size)] * 3)
    if has_pending and group.rank == 0:
        group.send(message, dst=last)
    if pending is not None:
        pending.wait(PATIENCE)
    group.check_peers()
