"""by_size assigns parameters to buckets exactly as torch's C++ does."""

import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st

from gradwire.reducer import ParameterSpec
from gradwire.reducer.buckets.layout import by_size

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
limits = st.lists(st.integers(1, 400), min_size=1, max_size=4)


@st.composite
def tensors(draw: st.DrawFn, dtypes: list[torch.dtype]) -> list[tuple[int, torch.dtype, bool]]:
    """(size, dtype, sparse) of some parameters."""
    one = st.tuples(
        st.integers(0, 60), st.sampled_from(dtypes), st.booleans() if draw(st.booleans()) else st.just(False)
    )
    return draw(st.lists(one, min_size=1, max_size=12))


def ours(parameters: list[tuple[int, torch.dtype, bool]], caps: list[int], order: list[int] | None) -> list[list[int]]:
    specs = [
        ParameterSpec(f"p{i}", (n,), (1,), dtype, torch.device("cpu"), sparse)
        for i, (n, dtype, sparse) in enumerate(parameters)
    ]
    return by_size(specs, caps, order=order)


def torchs(
    parameters: list[tuple[int, torch.dtype, bool]], caps: list[int], order: list[int] | None
) -> list[list[int]]:
    """In torch the tensors themselves are in order, and `order` has their indices."""
    dealt = [parameters[i] for i in order] if order else parameters
    shown = [torch.empty(n, dtype=dtype) for n, dtype, _ in dealt]
    sparse = [s for _, _, s in parameters]  # not in order: torch looks them up by index
    buckets, _ = dist._compute_bucket_assignment_by_size(shown, caps, sparse, order or [])
    return [list(bucket) for bucket in buckets]


@given(tensors([torch.float32]), limits)
@settings(max_examples=100)
def test_as_torch_by_size(parameters: list[tuple[int, torch.dtype, bool]], caps: list[int]) -> None:
    assert ours(parameters, caps, None) == torchs(parameters, caps, None)


@given(tensors([torch.float32]), limits, st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_as_torch_by_arrival(parameters: list[tuple[int, torch.dtype, bool]], caps: list[int], rng: object) -> None:
    order = list(range(len(parameters)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    assert ours(parameters, caps, order) == torchs(parameters, caps, order)


@given(tensors(DTYPES), limits, st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_several_dtypes_make_the_same_buckets(
    parameters: list[tuple[int, torch.dtype, bool]], caps: list[int], by_arrival: bool, rng: object
) -> None:
    """Without an order both sort by first parameter; with one, torch leaves the order of unfilled buckets open."""
    order = list(range(len(parameters))) if by_arrival else None
    if order is not None:
        rng.shuffle(order)  # type: ignore[attr-defined]
        assert set(map(tuple, ours(parameters, caps, order))) == set(map(tuple, torchs(parameters, caps, order)))
    else:
        assert ours(parameters, caps, order) == torchs(parameters, caps, order)


@given(tensors(DTYPES), limits)
@settings(max_examples=100)
def test_every_parameter_is_in_one_bucket_of_its_kind(
    parameters: list[tuple[int, torch.dtype, bool]], caps: list[int]
) -> None:
    buckets = ours(parameters, caps, None)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(parameters)))
    for bucket in buckets:
        assert len({parameters[i][1:] for i in bucket}) == 1
        assert len(bucket) == 1 or not parameters[bucket[0]][2]


def test_devices_do_not_share_a_bucket() -> None:
    specs = [
        ParameterSpec(n, (1,), (1,), torch.float32, torch.device(d))
        for n, d in (("a", "cpu"), ("b", "meta"), ("c", "cpu"))
    ]
    assert by_size(specs, [1000]) == [[0, 2], [1]]
