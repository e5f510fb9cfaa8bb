"""Groups of two processes, of which one or both are killed at a random moment: `kill_cycles.py DIRECTORY CYCLES SEED`.

A program of its own, because processes that have imported torch are started by forking one that has, and that has no thread.
Prints one line of JSON: how many cycles there were, which errors survivors got, and what went wrong.
"""

import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter

import torch
from torch.distributed import FileStore

from gradwire.collectives import ReduceOp
from gradwire.errors import CollectiveMismatch, CollectiveTimeout, GroupError, PeerLost
from gradwire.groups import SharedMemoryGroup
from gradwire.groups.shared_memory.fold import CompiledFold

PATIENCE = 1.5
"""Seconds until a rank stops waiting for one that was killed before it joined."""

DEATH, DEADLINE, REFUSED, WRONG = 10, 11, 12, 13
ENDS = {DEATH: "death", DEADLINE: "deadline", REFUSED: "refused", -signal.SIGKILL: "killed"}
LIMIT = 20


def rank_main(path: str, directory: str, rank: int, seed: int) -> int:
    """Make a group and use it until it breaks."""
    signal.alarm(LIMIT)
    draw = random.Random(seed)
    try:
        group = SharedMemoryGroup(FileStore(path, 2), rank, 2, timeout=PATIENCE, directory=directory)
        heap = group.allocate(300_000)
        while True:
            n = draw.choice([1, 5000, 20_000, 300_000])
            for t in (heap[:n], torch.empty(n)):
                t.fill_(float(rank))
                group.all_reduce(t, async_op=draw.random() < 0.5).wait()
                if not t.eq(1).all():
                    return WRONG
    except CollectiveMismatch:
        return WRONG
    except PeerLost:
        return DEATH
    except CollectiveTimeout:
        return DEADLINE
    except GroupError:
        return REFUSED


def fork_rank(path: str, directory: str, rank: int, seed: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        code = rank_main(path, directory, rank, seed)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def used(directory: str) -> int:
    """Bytes of the file system that are not free."""
    facts = os.statvfs(directory)
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize


def cycle(directory: str, draw: random.Random, ends: Counter[str]) -> list[str]:
    """One: two ranks, a random moment, SIGKILL; what is wrong afterwards."""
    problems = []
    with tempfile.NamedTemporaryFile() as store:
        seed = draw.randrange(1 << 30)
        ranks = [fork_rank(store.name, directory, rank, seed) for rank in range(2)]
        time.sleep(draw.choice([draw.uniform(0, limit) for limit in (0.01, 0.03, 0.15, 0.15)]))
        victims = draw.choice([[0], [1], [0, 1], [1, 0]])
        for victim in victims:
            os.kill(ranks[victim], signal.SIGKILL)
        killed = time.perf_counter()
        for rank, child in enumerate(ranks):
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            expected = [-signal.SIGKILL] if rank in victims else [DEATH, DEADLINE, REFUSED]
            if rank in victims[1:]:  # it may detect the first one's death before its own signal is sent
                expected.append(DEATH)
            if code not in expected:
                problems.append(f"rank {rank} of victims {victims} ended with {code}")
            ends[ENDS.get(code, str(code))] += 1
            if code == DEATH and time.perf_counter() - killed > 1.0:
                ends["late"] += 1
    problems += [f"{name} was left in {directory}" for name in os.listdir(directory) if name.startswith("gradwire")]
    return problems


def main(directory: str, cycles: int, seed: int) -> None:
    """All of them."""
    for op in (ReduceOp.SUM, ReduceOp.AVG):  # what each rank would load and compile, and most would not live to use
        CompiledFold.find(op, torch.float32, 2)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread was started: forking is not safe"
    draw, ends = random.Random(seed), Counter[str]()
    before, problems = used(directory), []
    for _ in range(cycles):
        problems += cycle(directory, draw, ends)
    left = used(directory) - before
    print(json.dumps({"cycles": cycles, "ends": ends, "problems": problems, "left": left}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
