"""Sums of all ranks' pieces: compiled or not, the same bits as the reference."""

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from gradwire.collectives import ReduceOp
from gradwire.collectives.reference import reduce_tensors
from gradwire.groups import SharedMemoryGroup
from gradwire.groups.shared_memory import all_reduce
from gradwire.groups.shared_memory.all_reduce import COMPILED
from gradwire.groups.shared_memory.fold import SUMMED, CompiledFold, Fold
from gradwire.runtime import jit
from helpers.shared_memory_groups import World

CASES = {
    (ReduceOp.SUM, torch.float32): (2, 3, 4, 5),
    (ReduceOp.SUM, torch.float64): (2,),
    (ReduceOp.SUM, torch.int32): (4,),
    (ReduceOp.SUM, torch.int64): (2, 3, 4),
    (ReduceOp.SUM, torch.bfloat16): (3,),
    (ReduceOp.AVG, torch.float32): (2, 3, 4),
    (ReduceOp.AVG, torch.float64): (3, 4),
    (ReduceOp.AVG, torch.bfloat16): (2, 3),
}
"""With numbers of ranks: each is compiled by itself, which takes a second or two. Every dtype and every loop."""
SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), 1e-45, -1e-40, 3e38, -3e38, 1.0, 1.00390625, 1.01171875]
"""Zeros, infinities, numbers without a leading one, near overflow, and ties of bfloat16."""


def tensors(dtype: torch.dtype, ranks: int, length: int, seed: int) -> list[Tensor]:
    """One a rank: numbers of many sizes, and some special ones."""
    draw = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return [torch.randint(info.min, info.max, (length,), dtype=dtype, generator=draw) for _ in range(ranks)]
    made = []
    for _ in range(ranks):
        t = torch.randn(length, generator=draw, dtype=torch.float64) * 10 ** (
            8 * torch.rand(length, generator=draw) - 4
        )
        odd = torch.rand(length, generator=draw) < 0.1
        t[odd] = torch.tensor(SPECIAL, dtype=torch.float64)[
            torch.randint(len(SPECIAL), (int(odd.sum()),), generator=draw)
        ]
        made.append(t.to(dtype))
    return made


def bits(t: Tensor) -> Tensor:
    """To compare: -0.0 is not 0.0, and a NaN (of which there is one kind here) equals itself."""
    t = torch.where(t.isnan(), torch.full_like(t, float("nan")), t) if t.is_floating_point() else t
    return t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize])


def compiled(op: ReduceOp, dtype: torch.dtype, ranks: int) -> CompiledFold:
    pytest.importorskip("numba")
    fold = CompiledFold.find(op, dtype, ranks)
    assert fold is not None
    return fold


def piece(fold: Fold, t: Tensor) -> Any:
    """The tensor as what `fold` works on."""
    if fold.array is None:
        return t
    return t.numpy() if t.dtype in SUMMED else t.view(torch.int16).numpy().view(fold.array)


@pytest.mark.parametrize(("op", "dtype"), CASES)
@settings(max_examples=40)
@given(data=st.data(), length=st.integers(0, 1100), seed=st.integers(0, 2**32))
def test_compiled_or_not_a_fold_has_the_bits_of_the_reference(
    op: ReduceOp, dtype: torch.dtype, data: st.DataObject, length: int, seed: int
) -> None:
    ranks = data.draw(st.sampled_from(CASES[op, dtype]))
    brought = tensors(dtype, ranks, length, seed)
    expected = bits(reduce_tensors(op, brought))
    for fold in (compiled(op, dtype, ranks), Fold.of(op, dtype)):
        everywhere = [t.clone() for t in brought]
        fold.everywhere([piece(fold, t) for t in everywhere])
        assert all(torch.equal(bits(t), expected) for t in everywhere)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.complex64])
def test_there_is_no_loop_for_rare_dtypes(dtype: torch.dtype) -> None:
    assert CompiledFold.find(ReduceOp.SUM, dtype, 2) is None


def test_there_is_no_loop_for_other_reductions_nor_for_one_rank() -> None:
    assert CompiledFold.find(ReduceOp.MAX, torch.float32, 2) is None
    assert CompiledFold.find(ReduceOp.AVG, torch.int32, 2) is None
    assert CompiledFold.find(ReduceOp.SUM, torch.float32, 1) is None


def test_without_numba_there_is_no_compiled_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit.loop, "compiled", lambda loop: None)
    assert CompiledFold.find(ReduceOp.SUM, torch.float32, 2) is None


# -- in a group --------------------------------------------------------------------------------------------------------------


def reduced(
    everywhere: Callable[..., list[Any]], groups: list[SharedMemoryGroup], brought: list[Tensor], op: ReduceOp
) -> Tensor:
    """What all ranks get, of tensors in the heap and of ordinary ones; it must be the same."""

    def on_rank(group: SharedMemoryGroup) -> list[Tensor]:
        mine = brought[group.rank]
        heap = group.allocate(mine.numel(), dtype=mine.dtype).copy_(mine)
        ordinary = mine.clone()
        for t in (heap, ordinary):
            group.all_reduce(t, op=op)
        return [heap.clone(), ordinary]

    results = [bits(t) for pair in everywhere(groups, on_rank) for t in pair]
    assert all(torch.equal(t, results[0]) for t in results)
    return results[0]


LARGE = [(ReduceOp.SUM, torch.int64), (ReduceOp.AVG, torch.float32), (ReduceOp.AVG, torch.bfloat16)]


@pytest.mark.parametrize("without", ["nobody", "rank 1", "all"])
@pytest.mark.parametrize(("op", "dtype", "ranks"), [(*case, ranks) for case in LARGE for ranks in CASES[case]])
def test_large_sums_are_the_same_bits_with_and_without_compiled_loops(
    world: World,
    everywhere: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    op: ReduceOp,
    dtype: torch.dtype,
    ranks: int,
    without: str,
) -> None:
    groups = world(ranks)
    plain = {"nobody": [], "rank 1": groups[1:2], "all": groups}[without]
    for group in plain:
        monkeypatch.setattr(group._engine.programs, "prepare", lambda dtype, nbytes: None)
    brought = tensors(dtype, ranks, COMPILED // dtype.itemsize + 12345, seed=ranks)
    expected = bits(reduce_tensors(op, brought))
    assert torch.equal(reduced(everywhere, groups, brought, op), expected)
    for group in groups:
        expects_it = group not in plain and importlib.util.find_spec("numba") is not None
        found = group._engine.programs.compiled.get((op, dtype))
        assert isinstance(found, CompiledFold) is expects_it


def test_only_a_large_block_in_the_heap_loads_numba(
    world: World, everywhere: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(all_reduce.CompiledFold, "find", lambda *args: asked.append(args))
    groups = world(2)
    for nbytes in (4, 40_000, COMPILED - 4):
        reduced(everywhere, groups, [torch.ones(nbytes // 4)] * 2, ReduceOp.SUM)
    everywhere(groups, lambda group: group.all_reduce(torch.ones(COMPILED)))
    assert asked == []
    for _ in range(2):
        groups[0].allocate(COMPILED // 4)
    assert asked == [(op, torch.float32, 2) for op in (ReduceOp.SUM, ReduceOp.AVG)], "once"


def test_a_view_into_the_heap_that_begins_anywhere_is_summed(
    world: World, everywhere: Callable[..., list[Any]]
) -> None:
    def on_rank(group: SharedMemoryGroup) -> np.ndarray[Any, Any]:
        whole = group.allocate(COMPILED // 4 + 10).fill_(1.0)
        group.all_reduce(whole[3:-5])
        return whole[[0, 2, 3, -6, -5]].numpy()

    for result in everywhere(world(2), on_rank):
        assert result.tolist() == [1, 1, 2, 2, 1]
