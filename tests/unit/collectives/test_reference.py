"""The reference, against arithmetic done another way: numpy, Python lists, exact fractions."""

from collections.abc import Sequence
from functools import reduce as fold
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor

from gradwire.collectives import Collective, OpKind, ReduceOp, build
from gradwire.collectives.reference import cut, perform, reduce_tensors, store, working_dtype

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
EXACT = [*INTEGERS, torch.bool]
MOVED = [*FLOATS, *FLOAT8, torch.complex64, torch.complex128, torch.complex32, *EXACT]

bounded = settings(max_examples=50)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
worlds = st.integers(1, 6)
seeds = st.integers(0, 2**20)

_NUMPY = {torch.bool: np.bool_} | {d: np.dtype(str(d).removeprefix("torch.")).type for d in INTEGERS}
_INTEGER_FOLDS = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
_BOOL_FOLDS = _INTEGER_FOLDS | {ReduceOp.SUM: np.logical_or, ReduceOp.PRODUCT: np.logical_and}


def random_bits(shape: Sequence[int], dtype: torch.dtype, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Any value of an integer dtype, the extremes among them."""
    kind = _NUMPY[dtype]
    if kind is np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    info = np.iinfo(kind)
    values = rng.integers(info.min, info.max, shape, dtype=kind, endpoint=True)
    extremes = rng.choice(np.array([info.min, info.max, 0, 1], dtype=kind), shape)
    return np.where(rng.random(shape) < 0.2, extremes, values)


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("op", _INTEGER_FOLDS, ids=lambda op: op.name)
@settings(max_examples=8)
@given(shape=shapes, world=worlds, seed=seeds)
@example(shape=(9,), world=3, seed=1)
def test_integers_wrap_as_numpys(
    dtype: torch.dtype, op: ReduceOp, shape: tuple[int, ...], world: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = [random_bits(shape, dtype, rng) for _ in range(world)]
    with np.errstate(over="ignore"):
        want = fold((_BOOL_FOLDS if dtype is torch.bool else _INTEGER_FOLDS)[op], values)
    got = reduce_tensors(op, [torch.from_numpy(v.copy()) for v in values])
    assert got.dtype is dtype
    assert np.array_equal(got.numpy(), want)


@bounded
@given(dtype=st.sampled_from([torch.float32, torch.float64]), shape=shapes, world=worlds, seed=seeds)
def test_wide_floats_are_folded_in_rank_order_to_the_bit(
    dtype: torch.dtype, shape: tuple[int, ...], world: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = [np.asarray(rng.standard_normal(shape)).astype(str(dtype).removeprefix("torch.")) for _ in range(world)]
    tensors = [torch.from_numpy(v.copy()) for v in values]
    total, product = fold(np.add, values), fold(np.multiply, values)
    assert np.array_equal(reduce_tensors(ReduceOp.SUM, tensors).numpy(), total)
    assert np.array_equal(reduce_tensors(ReduceOp.PRODUCT, tensors).numpy(), product)
    assert np.array_equal(reduce_tensors(ReduceOp.AVG, tensors).numpy(), (total / world).astype(total.dtype))
    assert np.array_equal(reduce_tensors(ReduceOp.MIN, tensors).numpy(), fold(np.minimum, values))


@bounded
@given(dtype=st.sampled_from([torch.float16, torch.bfloat16, *FLOAT8]), world=worlds, seed=seeds)
def test_narrow_floats_are_rounded_once(dtype: torch.dtype, world: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(17, generator=generator).to(dtype) for _ in range(world)]
    wide = [t.to(torch.float32) for t in tensors]
    assert torch.equal(reduce_tensors(ReduceOp.SUM, tensors), fold(torch.add, wide).to(dtype))
    assert torch.equal(reduce_tensors(ReduceOp.AVG, tensors), (fold(torch.add, wide) / world).to(dtype))
    assert torch.equal(reduce_tensors(ReduceOp.MAX, tensors), torch.stack(wide).amax(0).to(dtype))
    factors = [0.5 * (rank + 1) for rank in range(world)]
    scaled = fold(torch.add, [t * f for t, f in zip(wide, factors, strict=True)]).to(dtype)
    assert torch.equal(reduce_tensors(ReduceOp.PREMUL_SUM, tensors, factors), scaled)


@bounded
@given(world=worlds, seed=seeds, form=st.sampled_from(["number", "0-dim", "1-element"]), shape=shapes)
def test_factors_of_any_form_keep_shape_and_dtype(world: int, seed: int, form: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.complex64) for _ in range(world)]
    numbers = [0.25 + rank for rank in range(world)]
    factors = [
        n if form == "number" else torch.tensor(n if form == "0-dim" else [n], dtype=torch.float64) for n in numbers
    ]
    got = reduce_tensors(ReduceOp.PREMUL_SUM, tensors, factors)
    assert (got.shape, got.dtype) == (torch.Size(shape), torch.complex64)
    torch.testing.assert_close(got, fold(torch.add, [t * n for t, n in zip(tensors, numbers, strict=True)]))


def test_one_rank_gets_a_copy() -> None:
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
        t = torch.ones(3)
        result = reduce_tensors(op, [t])
        result.zero_()
        assert t.tolist() == [1.0, 1.0, 1.0]


def test_working_dtypes() -> None:
    assert working_dtype(torch.bfloat16) is torch.float32
    assert working_dtype(torch.uint32) is torch.int64
    assert working_dtype(torch.complex32) is torch.complex64
    assert working_dtype(torch.float64) is torch.float64


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
def test_sparse_sums(op: ReduceOp) -> None:
    dense = [torch.tensor([[1.0, 0, 0], [0, 2.0, 0]]), torch.zeros(2, 3), torch.tensor([[0, 0, 5.0], [0, 1.0, 0]])]
    got = reduce_tensors(op, [t.to_sparse() for t in dense])
    want = fold(torch.add, dense) / (3 if op is ReduceOp.AVG else 1)
    assert got.is_sparse
    assert torch.equal(got.to_dense(), want)


def numbered(world: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    """One tensor per rank, all values different where the dtype has room."""
    return [torch.arange(rank * length, (rank + 1) * length).to(dtype) for rank in range(world)]


def blank(length: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(length).to(dtype)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@bounded
@given(world=worlds, length=st.integers(0, 7), dtype=st.sampled_from(MOVED), data=st.data())
def test_movement_of_every_kind(world: int, length: int, dtype: torch.dtype, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, world - 1))
    values = numbered(world, length, dtype)
    lists = [v.tolist() for v in values]
    flattened = [number for numbers in lists for number in numbers]

    ops = [build.broadcast(values[r].clone(), src=root) for r in range(world)]
    perform(ops)
    assert all(op.outputs[0].tolist() == lists[root] for op in ops)

    ops = [build.all_gather([blank(length, dtype) for _ in range(world)], values[r]) for r in range(world)]
    perform(ops)
    assert all([t.tolist() for t in op.outputs] == lists for op in ops)

    ops = [build.all_gather_into_tensor(blank(length * world, dtype), values[r]) for r in range(world)]
    perform(ops)
    assert all(op.outputs[0].tolist() == flattened for op in ops)

    outputs = [blank(length, dtype) for _ in range(world)]
    perform([build.gather(values[r], outputs if r == root else None, dst=root) for r in range(world)])
    assert [t.tolist() for t in outputs] == lists

    outputs = [blank(length, dtype) for _ in range(world)]
    perform([build.scatter(outputs[r], values if r == root else None, src=root) for r in range(world)])
    assert [t.tolist() for t in outputs] == lists
    assert [v.tolist() for v in values] == lists, "inputs were written"


@bounded
@given(data=st.data(), world=worlds)
def test_all_to_all_is_a_transposition(data: st.DataObject, world: int) -> None:
    lengths = [[data.draw(st.integers(0, 3)) for _ in range(world)] for _ in range(world)]
    inputs = [[torch.full((lengths[s][d],), 100.0 * s + d) for d in range(world)] for s in range(world)]
    outputs = [[torch.zeros(lengths[s][d]) for s in range(world)] for d in range(world)]
    perform([build.all_to_all(outputs[r], inputs[r]) for r in range(world)])
    for s in range(world):
        for d in range(world):
            assert outputs[d][s].tolist() == inputs[s][d].tolist()

    ops = [
        build.all_to_all_single(
            torch.zeros(sum(lengths[s][r] for s in range(world))),
            torch.cat(inputs[r]),
            output_split_sizes=[lengths[s][r] for s in range(world)],
            input_split_sizes=lengths[r],
        )
        for r in range(world)
    ]
    perform(ops)
    for r, op in enumerate(ops):
        assert op.outputs[0].tolist() == torch.cat([inputs[s][r] for s in range(world)]).tolist()


@bounded
@given(world=worlds, length=st.integers(0, 5), seed=seeds, op=st.sampled_from([ReduceOp.SUM, ReduceOp.MAX]))
def test_scattered_reductions_are_parts_of_the_whole(world: int, length: int, seed: int, op: ReduceOp) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(-9, 10, (world, world, length))
    whole = values.sum(0) if op is ReduceOp.SUM else values.max(0)
    tensors = [torch.from_numpy(v.copy()) for v in values]
    blanks = [torch.zeros(length, dtype=torch.int64) for _ in range(world)]

    ops = [build.reduce_scatter(blanks[r].clone(), list(tensors[r]), op=op) for r in range(world)]
    perform(ops)
    assert all(o.outputs[0].tolist() == whole[r].tolist() for r, o in enumerate(ops))

    ops = [build.reduce_scatter_tensor(blanks[r].clone(), tensors[r], op=op) for r in range(world)]
    perform(ops)
    assert all(o.outputs[0].tolist() == whole[r].tolist() for r, o in enumerate(ops))

    ops = [build.reduce(tensors[r].clone(), dst=world - 1, op=op) for r in range(world)]
    perform(ops)
    assert ops[-1].outputs[0].tolist() == whole.tolist()
    assert all(ops[r].outputs[0].tolist() == values[r].tolist() for r in range(world - 1))


def test_coalesced_pairs_are_one_operation() -> None:
    ops = [
        build.all_gather_into_tensor(
            [torch.zeros(4), torch.zeros(2, dtype=torch.int64)], [torch.full((2,), float(r)), torch.tensor([r])]
        )
        for r in range(2)
    ]
    perform(ops)
    for op in ops:
        assert [t.tolist() for t in op.outputs] == [[0.0, 0.0, 1.0, 1.0], [0, 1]]


def test_outputs_may_be_other_tensors_than_inputs() -> None:
    ins, outs = [torch.ones(2), torch.ones(2)], [torch.zeros(2), torch.zeros(2)]
    perform([Collective(OpKind.ALL_REDUCE, (i,), (o,), reduce_op=ReduceOp.SUM) for i, o in zip(ins, outs, strict=True)])
    assert [o.tolist() for o in outs] == [[2.0, 2.0]] * 2
    assert [i.tolist() for i in ins] == [[1.0, 1.0]] * 2
    sent = [torch.full((2,), 3.0), torch.full((2,), 4.0)]
    perform([Collective(OpKind.BROADCAST, (i,), (o,), root=1) for i, o in zip(sent, outs, strict=True)])
    assert [o.tolist() for o in outs] == [[4.0, 4.0]] * 2


def test_barrier_does_nothing() -> None:
    perform([build.barrier(), build.barrier()])


def test_leaves_and_strides_are_written() -> None:
    leaf = torch.zeros(2, 3).t().requires_grad_()
    store(leaf, torch.arange(6.0))
    assert leaf.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert leaf.is_leaf
    parameter = torch.nn.Parameter(torch.ones(2))
    perform([build.all_reduce(parameter), build.all_reduce(torch.ones(2))])
    assert parameter.tolist() == [2.0, 2.0]
    assert parameter.grad_fn is None


def test_cut() -> None:
    t = torch.arange(6)
    assert [p.tolist() for p in cut(t, (), 3)] == [[0, 1], [2, 3], [4, 5]]
    assert [p.tolist() for p in cut(t, (1, 0, 5), 3)] == [[0], [], [1, 2, 3, 4, 5]]
    assert [p.tolist() for p in cut(torch.tensor(7), (), 1)] == [[7]]


def test_every_input_is_read_before_any_output_is_written() -> None:
    """Tensors may be input and output at once, and at different places in the lists."""
    tensors = [[torch.tensor([10.0 * rank + i]) for i in range(2)] for rank in range(2)]
    perform([build.all_to_all(tensors[rank], tensors[rank]) for rank in range(2)])
    assert [[t.item() for t in row] for row in tensors] == [[0.0, 10.0], [1.0, 11.0]]

    places = [[torch.tensor([float(rank)]), torch.zeros(1)] for rank in range(2)]
    perform([build.all_gather(places[rank], places[rank][0]) for rank in range(2)])
    assert [[t.item() for t in row] for row in places] == [[0.0, 1.0]] * 2

    outs = [torch.tensor([5.0]), torch.zeros(1)]
    perform([build.gather(torch.tensor([4.0]), dst=1), build.gather(outs[0], outs, dst=1)])
    assert [t.item() for t in outs] == [4.0, 5.0]
