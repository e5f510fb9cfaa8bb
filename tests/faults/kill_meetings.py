"""Ranks that die, or stop, while a group is being made: `kill_meetings.py [--repeat N] [--ranks N] [--only KIND] …`.

Each meeting has some ranks on one or two pretended hosts. One of them, chosen at random, kills itself at some point, or stops. All
others must raise an error that names it: PeerLost within two seconds of its death, or CollectiveTimeout at the deadline. Then they
end as any program does: with exit status 0, and without delay.

A program of its own, because processes that have imported torch are started by forking one that has, and that has no thread.
Prints one line of JSON.
"""

import argparse
import atexit
import gc
import json
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import ProcessGroupGloo
from torch.distributed import FileStore

from gradwire.errors import CollectiveTimeout, PeerLost
from gradwire.groups import C10dGroup, Group, HierarchicalGroup, SharedMemoryGroup
from gradwire.groups.c10d import own_engines
from gradwire.groups.store.rendezvous import Rendezvous

SIZE = 8  # unless --ranks
NAMED_WITHIN = 2.0
"""Seconds after a death until every other rank has named it."""
EXIT_WITHIN = 2.0
"""Seconds that the finalizers of a rank may take, with a thread left in gloo's constructor."""
DEADLINE = 3.0
"""Seconds until ranks give up on one that is stopped."""

KINDS = {"gloo": C10dGroup.gloo, "split": None, "hierarchical": None, "shared_memory": SharedMemoryGroup}
POINTS = {
    "gloo": ["arrival", "exchange", "address", "connecting", "connected"],
    "split": ["exchange", "address", "connecting", "connected"],
    "hierarchical": ["arrival", "exchange", "address", "connecting", "connected", "stopped"],
    "shared_memory": ["arrival", "mapping", "stopped"],
}


def make(kind: str, store: Any, rank: int, timeout: float, arm: Callable[[], None]) -> Group:
    """The group of one rank; `arm` is called when the part begins in which a rank dies."""
    if kind == "hierarchical":
        arm()
        return HierarchicalGroup.discover(store, rank, SIZE, timeout=timeout, host=str(2 * rank // SIZE))
    if kind == "split":
        whole = C10dGroup.gloo(store, rank, SIZE, timeout=timeout)
        whole.barrier()
        arm()
        part = whole.split(0)
        assert part is not None
        return part
    arm()
    group: Group = KINDS[kind](store, rank, SIZE, timeout=timeout)  # type: ignore[misc]
    return group


def end_at(point: str, end: Callable[[], None], draw: random.Random, *, makes_segment: bool) -> None:
    """Call `end` at a point of the rendezvous of this rank, which may be the one that the others wait for."""
    times = draw.randrange(3)  # in groups of groups, the first, second or third time

    def before(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal times
            times -= 1
            if times < 0:
                end()
            return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    if point == "arrival":
        times = 0
        before(Rendezvous, "exchange" if draw.random() < 0.5 else "all_processes")
        before(Rendezvous, "wait_until")
    elif point == "exchange":
        before(Rendezvous, "wait_until")
    elif point in ("mapping", "stopped"):
        times = 0 if makes_segment else 1  # the others receive its ticket first
        before(Rendezvous, "wait_until")
    elif point == "address":  # gloo listens and has published its address
        times = 0
        before(own_engines._CancelableStore, "get")
    else:
        engine = ProcessGroupGloo

        def connect(*args: Any) -> Any:
            if point == "connecting":
                delay = draw.uniform(0.0, 0.02)
                threading.Thread(target=lambda: (time.sleep(delay), end())).start()
            made = engine(*args)
            end()
            return made

        class Engine:
            _Options = engine._Options  # type: ignore[attr-defined]
            create_device = staticmethod(engine.create_device)
            create_default_device = staticmethod(engine.create_default_device)
            __new__ = staticmethod(lambda _, *args: connect(*args))

        own_engines.ProcessGroupGloo = Engine  # type: ignore[assignment, misc]


def rank_main(kind: str, point: str, path: str, rank: int, victim: int, died: mmap.mmap, seed: int) -> dict[str, Any]:
    """Make the group; what this rank has learned."""
    signal.alarm(60)
    how = signal.SIGSTOP if point == "stopped" else signal.SIGKILL

    def end() -> None:
        struct.pack_into("d", died, 0, time.monotonic())
        os.kill(os.getpid(), how)

    began = [0.0]

    def arm() -> None:
        began[0] = time.monotonic()
        if rank == victim:
            end_at(point, end, random.Random(seed), makes_segment=kind == "shared_memory" and rank == 0)

    try:
        group = make(kind, FileStore(path, -1), rank, DEADLINE if point == "stopped" else 60.0, arm)
        group.barrier()  # the rank may have died after all others were connected
        return {"error": "none"}
    except (PeerLost, CollectiveTimeout) as error:
        now, (then,) = time.monotonic(), struct.unpack_from("d", died, 0)
        named = error.rank if isinstance(error, PeerLost) else list(error.missing or [])
        return {"error": type(error).__name__, "named": named, "after": now - max(then, *began), "text": str(error)}
    except Exception as error:
        return {"error": type(error).__name__, "named": None, "text": str(error)}


def fork_rank(answers: str, rank: int, main: Callable[[], dict[str, Any]], *, whole: bool) -> int:
    """Start a rank, which ends as a program does.

    The interpreter's own shutdown follows in every rank in which a thread is left, and, if `whole`, in the first two, of which one
    survives. The others would only repeat it, and it takes more CPU time than all that a rank does before.
    """
    child = os.fork()
    if child == 0:
        answer = main()
        with open(f"{answers}/{rank}", "w") as file:
            json.dump(answer, file)
        began = time.monotonic()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        with open(f"{answers}/exit-{rank}", "w") as file:
            file.write(str(time.monotonic() - began))
        if not (whole and rank < 2) and len(os.listdir("/proc/self/task")) == 1:
            while sum(map(str.isdigit, os.listdir(answers))) < SIZE - 1:  # to others it would be lost, too
                time.sleep(0.01)
            os._exit(0)
        sys.exit(0)
    return child


def meeting(kind: str, point: str, draw: random.Random, seen: Counter[str], slack: float) -> list[str]:
    """One meeting; what is wrong with it. A loaded machine gets `slack` seconds in addition."""
    victim, seed, died = draw.randrange(SIZE), draw.randrange(1 << 30), mmap.mmap(-1, 8)
    where, problems = f"{kind}, {point}, rank {victim}", []
    answers = tempfile.mkdtemp()  # not a context manager, which ranks would leave too
    path = f"{answers}/store"
    ranks = []
    for rank in range(SIZE):

        def main(rank: int = rank) -> dict[str, Any]:
            return rank_main(kind, point, path, rank, victim, died, seed)

        ranks.append(fork_rank(answers, rank, main, whole=point == POINTS[kind][0]))
    for rank, child in enumerate(ranks):
        if rank == victim and point == "stopped":
            continue
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if rank == victim:
            if code != -signal.SIGKILL:
                problems.append(f"{where}: it ended with {code}; the fault did not happen")
            continue
        if code != 0:
            problems.append(f"{where}: rank {rank} ended with {code}")
            continue
        with open(f"{answers}/{rank}") as file:
            answer = json.load(file)
        seen[answer["error"]] += 1
        expected = [victim] if answer["error"] == "CollectiveTimeout" else victim
        right = ["CollectiveTimeout"] if point == "stopped" else ["PeerLost"]
        if answer["error"] not in right or answer["named"] != expected:
            problems.append(f"{where}: rank {rank} raised {answer}")
        elif answer["error"] == "PeerLost" and answer["after"] > NAMED_WITHIN + slack:
            problems.append(f"{where}: rank {rank} named it after {answer['after']:.2f} s: {answer['text']}")
        with open(f"{answers}/exit-{rank}") as file:
            if (exit_took := float(file.read())) > EXIT_WITHIN + slack:
                problems.append(f"{where}: the finalizers of rank {rank} took {exit_took:.2f} s")
    if point == "stopped":
        os.kill(ranks[victim], signal.SIGKILL)
        os.waitpid(ranks[victim], 0)
    shutil.rmtree(answers)
    return problems


def main() -> None:
    """All meetings."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--repeat", type=int, default=1)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--only", choices=[*KINDS], default=None)
    arguments.add_argument("--slack", type=float, default=0.0)
    arguments.add_argument("--ranks", type=int, default=SIZE)
    given = arguments.parse_args()
    globals()["SIZE"] = given.ranks
    assert len(os.listdir("/proc/self/task")) == 1, "a thread was started: forking is not safe"
    gc.collect()
    gc.freeze()  # children that end would copy every page
    draw, seen, problems, count = random.Random(given.seed), Counter[str](), [], 0
    for _ in range(given.repeat):
        for kind, points in POINTS.items():
            for point in points:
                if given.only in (None, kind):
                    problems += meeting(kind, point, draw, seen, given.slack)
                    count += 1
                    print(count, kind, point, problems[-1:], file=sys.stderr)
    print(json.dumps({"meetings": count, "errors": seen, "problems": problems}))


if __name__ == "__main__":
    main()
