"""Sums on the shortest way: what they check before they signal, and what they do not say."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from gradwire.collectives import ReduceOp, Scope, all_reduce
from gradwire.errors import UsageError


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
