"""What a rank concludes from the board and from which processes are alive; which sums are made directly."""

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gradwire.collectives import ReduceOp, Scope, all_reduce, build
from gradwire.errors import CollectiveTimeout, GroupAborted, PeerLost, UsageError
from gradwire.groups.ledger import Ledger
from gradwire.groups.shared_memory.board import HERE, LEFT, Cache
from gradwire.groups.shared_memory.diagnosis import Diagnosis, report
from gradwire.groups.work import Work


class Board:
    """Rank 0's board of three ranks: their states, and the reasons they gave."""

    rank, size = 0, 3

    def __init__(self, states: dict[int, tuple[int, str]]) -> None:
        self.states = memoryview(bytearray(24)).cast("Q")
        for rank in range(3):
            self.states[rank] = states.get(rank, (HERE, ""))[0]
        self.words = {rank: words for rank, (_, words) in states.items()}.__getitem__


class Pulse:
    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def dead(self) -> list[int]:
        return list(self.ranks)


LEDGER = Ledger(name="group", rank=0, size=3)


def found(states: dict[int, tuple[int, str]], *dead: int, waiting: Sequence[Work] = ()) -> Any:
    diagnosis = Diagnosis(LEDGER, Board(states), Pulse(*dead))  # type: ignore[arg-type]
    return diagnosis.death(waiting) or diagnosis.failure(waiting)


def work(op: Any) -> Work:
    return Work(op, LEDGER, seq=7, timeout=10.0)


ABORTED = report(GroupAborted("...", reason="the loss is wrong"))
PASSED_ON = report(GroupAborted("...", reason="rank 2 failed: the loss is wrong"))
TIMED_OUT = report(CollectiveTimeout("barrier: not finished"))
LOST_2 = report(PeerLost("...", rank=2))


@pytest.mark.parametrize(
    ("states", "dead", "error", "text"),
    [
        ({}, [], None, ""),
        ({1: (LEFT, "")}, [], None, ""),
        ({1: (LEFT, "")}, [1], None, ""),
        ({0: ABORTED}, [], None, ""),
        (
            {1: ABORTED},
            [],
            GroupAborted,
            "group on rank 0 of 3: the group was aborted: rank 1 failed: the loss is wrong",
        ),
        ({1: PASSED_ON}, [], GroupAborted, "aborted: rank 2 failed: the loss is wrong"),
        ({1: TIMED_OUT}, [], GroupAborted, "rank 1 failed: barrier: not finished"),
        ({1: LOST_2}, [], PeerLost, "rank 2 is lost: rank 1 has lost it"),
        ({1: LOST_2, 2: (LEFT, "")}, [2], PeerLost, "rank 2 is lost: it has closed its group"),
        ({}, [2], PeerLost, "group on rank 0 of 3: rank 2 is lost: its process has died"),
        ({1: ABORTED}, [2], PeerLost, "rank 2 is lost: its process has died"),
    ],
)
def test_what_a_rank_concludes(states: Any, dead: list[int], error: type[Exception] | None, text: str) -> None:
    result = found(states, *dead)
    assert type(result) is (error or type(None))
    assert text in str(result)


def test_an_error_names_what_waits_for_the_rank() -> None:
    messages = [work(build.recv(torch.ones(1), src=peer)) for peer in (1, 2)]
    assert str(found({}, 2, waiting=messages)).startswith(f"{messages[1].op} (operation #7 of group)")
    barrier = work(build.barrier())
    assert found({}, 2, waiting=[barrier, *messages]).op == barrier.op.signature


def test_a_timeout_of_another_rank_is_a_timeout_of_what_waits_here() -> None:
    error = found({1: TIMED_OUT}, waiting=[work(build.barrier())])
    assert isinstance(error, CollectiveTimeout)
    assert error.__notes__ == ["rank 1 gave up first: barrier: not finished"]


def test_a_full_cache_is_emptied() -> None:
    cache: Cache[int, str] = Cache(2)
    assert [cache.keep(key, str(key)) for key in range(3)] == ["0", "1", "2"]
    assert cache == {2: "2"}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG], ids=lambda op: op.name)
def test_infinities_are_no_news(world: Any, everywhere: Any, op: ReduceOp, size: int) -> None:
    groups = world(size)
    infinite = [float("inf"), float("-inf"), float("nan")]

    def sums(group: Any) -> list[float]:
        found = []
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            largest = torch.finfo(dtype).max
            for numel in (4, 100_000):
                for t in (torch.empty(numel, dtype=dtype), group.allocate(numel, dtype=dtype)):
                    t.fill_(largest)
                    t[:3] = torch.tensor(infinite if group.rank else infinite[::-1])
                    group.run(all_reduce(t, op=op))
                    found.append(t[-1].item())
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = everywhere(groups, sums)
    for result in results:
        assert not isinstance(result, BaseException), repr(result)
        assert result[:8] == [float("inf")] * 8


def test_a_scope_is_refused_before_anything_is_posted(world: Any, everywhere: Any) -> None:
    """Also where the other ranks have come already."""
    groups = world(2)
    late = groups[1].submit(all_reduce(torch.ones(3)))
    t = torch.ones(3)
    for call in (groups[0].run, groups[0].submit):
        with pytest.raises(UsageError, match="share a host"):
            call(all_reduce(t).among(Scope.INSIDE))
    assert t.tolist() == [1, 1, 1]
    groups[0].run(all_reduce(t))
    late.wait()
    assert t.tolist() == [2, 2, 2]
    results = everywhere(groups, lambda group: group.run(all_reduce(torch.ones(3)).among(Scope.INSIDE)))
    assert [type(result) for result in results] == [UsageError, UsageError]
    everywhere(groups, lambda group: group.run(all_reduce(t.clone())))
    assert groups[0].failure is None
