"""Groups whose ranks are processes: who is dead, and who disagrees."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from gradwire.collectives import OpKind, ReduceOp, build
from gradwire.errors import CollectiveMismatch
from gradwire.groups import Verified
from gradwire.runtime.host import is_dead, process_start
from gradwire.testing import run_ranks


def test_a_process_that_cannot_be_looked_at_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = process_start(child.pid)
    assert start
    assert not is_dead(child.pid, start)
    assert is_dead(child.pid, start + "1")
    with monkeypatch.context() as patched:

        def full(*args: Any, **kwargs: Any) -> Any:
            raise OSError(24, "Too many open files")

        patched.setattr("builtins.open", full)
        assert not is_dead(child.pid, start)
    child.communicate()
    assert is_dead(child.pid, start)


DIFFERENT = {
    "shape": lambda rank: build.all_reduce(torch.ones(3 + (rank == 1))),
    "dtype": lambda rank: build.all_reduce(torch.ones(3, dtype=torch.float64 if rank == 1 else torch.float32)),
    "op": lambda rank: build.all_reduce(torch.ones(3), op=ReduceOp.MAX if rank == 1 else ReduceOp.SUM),
    "kind": lambda rank: build.barrier() if rank == 1 else build.all_reduce(torch.ones(3)),
    "root": lambda rank: build.broadcast(torch.ones(3), src=int(rank == 1)),
    "label": lambda rank: build.all_reduce(torch.ones(3), label=f"layer {rank == 1}"),
}


@pytest.mark.parametrize("what", DIFFERENT)
@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_verified_says_who_disagrees_in_what(what, kind):
    def rank(group):
        with pytest.raises(CollectiveMismatch) as caught:
            group.submit(DIFFERENT[what](group.rank)).wait()
        group.barrier(label="still in step")
        return str(caught.value), {r: s.kind for r, s in caught.value.ops.items()}

    for text, ops in run_ranks(rank, 3, kind=kind, wrap=Verified):
        assert f"ranks differ in {what}: rank 1 has" in text
        assert ops[0] is (OpKind.BROADCAST if what == "root" else OpKind.ALL_REDUCE)
        assert sorted(ops) == [0, 1, 2]
