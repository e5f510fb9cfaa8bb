"""Which inputs are copied because an output overlaps them, and which outputs are refused."""

import itertools

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from gradwire.collectives import Collective, OpKind, build
from gradwire.collectives.aliasing import apart, overlapping, span

HOME = torch.zeros(64, dtype=torch.int16)


def copied(op: Collective, rank: int) -> list[int]:
    """The indices of the inputs that were copied, each to the same values."""
    result = apart(op, rank)
    assert all(torch.equal(a, b) for a, b in zip(result.inputs, op.inputs, strict=True))
    assert result.outputs is op.outputs
    return [i for i, (a, b) in enumerate(zip(result.inputs, op.inputs, strict=True)) if a is not b]


def parts(n: int = 4, count: int = 3) -> list[Tensor]:
    return list(torch.arange(n * count).split(n))


def test_nothing_overlaps_nothing_is_copied() -> None:
    for op in (
        build.all_reduce(torch.zeros(3)),
        build.all_gather(parts(), torch.arange(4)),
        build.all_to_all(parts(), parts()),
        build.barrier(),
        build.recv(torch.zeros(2), src=1),
        build.all_gather_into_tensor(torch.zeros(0), torch.zeros(0)),
    ):
        assert apart(op, 1) is op


def test_in_place_is_not_copied() -> None:
    p = parts()
    whole = torch.arange(12)
    assert copied(build.all_gather(p, p[1]), 1) == []
    assert copied(build.all_gather_into_tensor(whole, whole[4:8]), 1) == []
    assert copied(build.reduce_scatter(p[1], p), 1) == []
    assert copied(build.reduce_scatter_tensor(whole[4:8], whole), 1) == []
    assert copied(build.gather(p[1], p, dst=1), 1) == []
    assert copied(build.scatter(p[1], p, src=1), 1) == []
    assert copied(Collective(OpKind.BROADCAST, (p[0], p[1]), (p[0], p[1]), root=0), 1) == []


def test_only_what_is_overwritten_is_copied() -> None:
    p = parts()
    whole = torch.arange(12)
    assert copied(build.all_to_all(p, p), 1) == [0, 2]
    assert copied(build.all_to_all([p[1], *parts(count=2)], p), 0) == [1]
    assert copied(build.all_gather(p, p[0]), 1) == [0]
    assert copied(build.all_gather_into_tensor(whole, whole[:4]), 1) == [0]
    assert copied(build.reduce_scatter(p[0], p), 1) == [0]
    assert copied(build.all_to_all_single(whole, whole), 1) == [0]
    assert copied(Collective(OpKind.BROADCAST, (p[0], p[1]), (p[1], p[0]), root=0), 1) == [0, 1]


def test_one_memory_under_two_storages_is_seen() -> None:
    array = torch.arange(8).numpy()
    a, b = torch.from_numpy(array), torch.from_numpy(array[2:])
    assert copied(build.all_to_all_single(b, a[:6]), 0) == [0]


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """Any view of HOME, with up to three dimensions and any strides, also those that overlap."""
    shape = draw(st.lists(st.integers(0, 4), min_size=0, max_size=3))
    strides = draw(st.lists(st.integers(0, 5), min_size=len(shape), max_size=len(shape)))
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n > 0)
    t = HOME.as_strided(shape, strides, draw(st.integers(0, HOME.numel() - 1 - reach)))
    return t.view(torch.int8) if draw(st.booleans()) and strides and strides[-1] == 1 and shape[-1] else t


def cells(t: Tensor) -> list[int]:
    """The bytes of each element."""
    starts = [
        sum(i * s for i, s in zip(index, t.stride(), strict=True))
        for index in itertools.product(*(range(n) for n in t.shape))
    ]
    width = t.element_size()
    return [t.data_ptr() + at * width + byte for at in starts for byte in range(width)]


@given(st.lists(views(), min_size=1, max_size=3))
def test_outputs_overlap_exactly_when_two_elements_share_a_byte(tensors: list[Tensor]) -> None:
    found = overlapping(tensors)
    everything = [cell for t in tensors for cell in cells(t)]
    assert (found is not None) == (len(set(everything)) < len(everything))
    if found is not None:
        a, b = found
        assert set(cells(a)) & set(cells(b))


@given(views())
def test_a_span_holds_every_element(t: Tensor) -> None:
    start, end = span(t)
    assert (start, end) == ((min(cells(t)), max(cells(t)) + 1) if t.numel() else (0, 0))


def test_sparse_tensors_lie_nowhere() -> None:
    t = torch.eye(3).to_sparse()
    assert span(t) == (0, 0)
    assert overlapping([t, t]) is None
    with pytest.raises(ValueError, match="share memory"):
        build.all_reduce([torch.zeros(2)] * 2)
