"""Operations: how they are built, what they carry, and how they are lowered to simpler ones."""

import dataclasses
import pickle

import pytest
import torch

from gradwire.collectives import Collective, OpKind, ReduceOp, Signature, build
from gradwire.collectives.aliasing import is_plain
from gradwire.collectives.lower import as_bytes
from gradwire.errors import UsageError, UsageTypeError

T = torch.zeros(3)


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (build.all_reduce(T), "all_reduce(float32[3], SUM)"),
        (build.all_reduce(T, label="loss"), "all_reduce(float32[3], SUM, label='loss')"),
        (build.all_reduce([T, T.clone()]), "all_reduce(2 x float32[3], SUM)"),
        (
            build.all_reduce([T, torch.zeros((), dtype=torch.int64)], op=ReduceOp.MAX),
            "all_reduce(float32[3], int64[], MAX)",
        ),
        (build.broadcast(torch.zeros(2, 5), src=1), "broadcast(float32[2, 5], root=1)"),
        (build.reduce(T, dst=2, op=ReduceOp.MIN), "reduce(float32[3], MIN, root=2)"),
        (build.send(T, dst=1, tag=4), "send(float32[3], peer=1, tag=4)"),
        (build.recv(T), "recv(float32[3], peer=any, tag=0)"),
        (build.barrier(), "barrier()"),
        (build.barrier(label="start"), "barrier(label='start')"),
        (build.scatter(T, [torch.zeros(3), torch.zeros(3)], src=0), "scatter(float32[3], root=0)"),
        (build.gather(T, dst=0), "gather(float32[3], root=0)"),
    ],
)
def test_how_a_collective_reads(op: Collective, text: str) -> None:
    assert str(op.signature) == repr(op) == text


def test_a_signature_is_a_value_and_pickles() -> None:
    op = build.reduce(T, dst=2, op=ReduceOp.PREMUL_SUM, factor=0.5, label="x")
    assert op.signature == build.reduce(torch.ones(3), dst=2, op=ReduceOp.PREMUL_SUM, factor=0.25, label="x").signature
    assert pickle.loads(pickle.dumps(op.signature)) == op.signature
    assert len({op.signature, op.signature}) == 1


def test_a_record_is_frozen_and_equal_only_to_itself() -> None:
    op = build.all_reduce(T)
    with pytest.raises(dataclasses.FrozenInstanceError):
        op.label = "other"  # type: ignore[misc]
    assert op != build.all_reduce(T)
    assert len({op, op}) == 1


@pytest.mark.parametrize(
    ("op", "nbytes"),
    [
        (build.all_reduce([T, T.clone()]), 24),
        (build.all_gather([T, T.clone()], T), 12),
        (build.recv(torch.zeros(5, dtype=torch.int64)), 40),
        (build.scatter(T, [T, T], src=0), 12),
        (build.barrier(), 0),
        (build.all_reduce(torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (9,), check_invariants=False)), 24),
    ],
)
def test_nbytes_is_this_ranks_share(op: Collective, nbytes: int) -> None:
    assert op.nbytes == nbytes


def test_tensors_are_what_a_rank_brings_or_gets() -> None:
    out = torch.zeros(3)
    assert build.recv(out).tensors == (out,)
    assert build.reduce_scatter(out, [T, T]).tensors == (T, T)
    assert build.scatter(out, [T, T], src=0).tensors == (out,)
    assert build.barrier().tensors == ()


def test_device_of_a_barrier_is_the_cpu() -> None:
    assert build.barrier().device == torch.device("cpu")
    assert build.all_reduce(torch.zeros(2)).device.type == "cpu"


def test_within_only_shortens() -> None:
    op = build.barrier(label="b")
    assert op.timeout is None
    assert op.within(5.0).timeout == 5.0
    assert op.within(5.0).within(7.0).timeout == 5.0
    assert op.within(5.0).within(2.0).timeout == 2.0
    assert op.within(5.0).label == "b"
    with pytest.raises(UsageError, match="timeout"):
        op.within(0.0)


def test_signature_defaults_show_nothing() -> None:
    assert str(Signature(OpKind.BARRIER)) == "barrier()"


def test_properties_of_kinds() -> None:
    assert {kind for kind in OpKind if kind.is_p2p} == {OpKind.SEND, OpKind.RECV}
    assert {kind for kind in OpKind if kind.reduces} == {
        OpKind.ALL_REDUCE,
        OpKind.REDUCE,
        OpKind.REDUCE_SCATTER,
        OpKind.REDUCE_SCATTER_TENSOR,
    }


a, b, c, d = (torch.full((2,), float(i)) for i in range(4))


four = torch.zeros(4)


CASES: list[tuple[Collective, dict[str, object]]] = [
    (build.all_reduce(a), {"kind": OpKind.ALL_REDUCE, "inputs": (a,), "outputs": (a,), "reduce_op": ReduceOp.SUM}),
    (build.all_reduce([a, b], op=ReduceOp.MAX), {"inputs": (a, b), "outputs": (a, b), "reduce_op": ReduceOp.MAX}),
    (build.all_reduce(a, op=ReduceOp.PREMUL_SUM, factor=2.0), {"factor": 2.0}),
    (build.broadcast(a, src=1), {"kind": OpKind.BROADCAST, "inputs": (a,), "outputs": (a,), "root": 1}),
    (build.broadcast((a, b), src=0), {"inputs": (a, b), "outputs": (a, b), "root": 0}),
    (build.reduce(a, dst=1), {"kind": OpKind.REDUCE, "inputs": (a,), "outputs": (a,), "root": 1}),
    (build.all_gather([b, c], a), {"kind": OpKind.ALL_GATHER, "inputs": (a,), "outputs": (b, c)}),
    (
        build.all_gather_into_tensor(four, a),
        {"kind": OpKind.ALL_GATHER_INTO_TENSOR, "inputs": (a,), "outputs": (four,)},
    ),
    (build.reduce_scatter(a, [b, c]), {"kind": OpKind.REDUCE_SCATTER, "inputs": (b, c), "outputs": (a,)}),
    (build.reduce_scatter_tensor(a, four), {"kind": OpKind.REDUCE_SCATTER_TENSOR, "inputs": (four,), "outputs": (a,)}),
    (build.all_to_all([a, b], [c, d]), {"kind": OpKind.ALL_TO_ALL, "inputs": (c, d), "outputs": (a, b)}),
    (
        build.all_to_all_single(a, b),
        {"kind": OpKind.ALL_TO_ALL_SINGLE, "inputs": (b,), "outputs": (a,), "splits": None},
    ),
    (build.all_to_all_single(a, b, output_split_sizes=[0, 2]), {"splits": ((0, 2), ())}),
    (build.all_to_all_single(a, b, input_split_sizes=[2, 0]), {"splits": ((), (2, 0))}),
    (build.all_to_all_single(a, b, output_split_sizes=[], input_split_sizes=[]), {"splits": None}),
    (build.gather(a, [b, c], dst=1), {"kind": OpKind.GATHER, "inputs": (a,), "outputs": (b, c), "root": 1}),
    (build.gather(a, dst=1), {"inputs": (a,), "outputs": ()}),
    (build.scatter(a, [b, c], src=0), {"kind": OpKind.SCATTER, "inputs": (b, c), "outputs": (a,), "root": 0}),
    (build.scatter(a, src=0), {"inputs": (), "outputs": (a,)}),
    (build.send(a, dst=2, tag=3), {"kind": OpKind.SEND, "inputs": (a,), "outputs": (), "peer": 2, "tag": 3}),
    (build.recv(a, src=2, tag=3), {"kind": OpKind.RECV, "inputs": (), "outputs": (a,), "peer": 2, "tag": 3}),
    (build.recv(a), {"peer": None, "tag": 0}),
    (build.barrier(label="x"), {"kind": OpKind.BARRIER, "inputs": (), "outputs": (), "label": "x"}),
]


@pytest.mark.parametrize(("op", "fields"), CASES, ids=lambda value: repr(value)[:40])
def test_fields(op: Collective, fields: dict[str, object]) -> None:
    for name, want in fields.items():
        got = getattr(op, name)
        if name in ("inputs", "outputs"):
            assert [id(t) for t in got] == [id(t) for t in want]  # type: ignore[attr-defined]
        else:
            assert got == want, name


def test_every_constructor_takes_a_label() -> None:
    made = [
        build.all_reduce(a, label="x"),
        build.broadcast(a, src=0, label="x"),
        build.reduce(a, dst=0, label="x"),
        build.all_gather([a, b], c, label="x"),
        build.all_gather_into_tensor(four, a, label="x"),
        build.reduce_scatter(a, [b, c], label="x"),
        build.reduce_scatter_tensor(a, four, label="x"),
        build.all_to_all([a, b], [c, d], label="x"),
        build.all_to_all_single(a, b, label="x"),
        build.gather(a, dst=0, label="x"),
        build.scatter(a, src=0, label="x"),
        build.send(a, dst=0, label="x"),
        build.recv(a, label="x"),
        build.barrier(label="x"),
    ]
    assert {op.kind for op in made} == set(OpKind)
    assert all(op.label == "x" and "label='x'" in repr(op) for op in made)


def test_constructors_move_nothing() -> None:
    t = torch.ones(2)
    build.all_reduce(t)
    assert t.tolist() == [1.0, 1.0]
    assert t._version == 0


def test_a_number_in_place_of_a_tensor_is_a_type_error() -> None:
    with pytest.raises(UsageTypeError, match=r"float.*torch\.tensor"):
        build.all_reduce([3.0])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        build.all_gather([a, b], "no")  # type: ignore[arg-type]


@pytest.mark.parametrize("numel", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.complex64])
def test_bytes_of_a_row(numel: int, dtype: torch.dtype) -> None:
    t = torch.arange(numel + 2).to(dtype)[2:]
    found = as_bytes(t)
    assert found.numel() == t.nbytes
    assert torch.equal(found.clone().view(dtype), t)
    if numel:
        assert found.data_ptr() == t.data_ptr()


@pytest.mark.parametrize("numel", [0, 1])
def test_none_or_one_element_with_a_stride_is_plain_and_has_bytes(numel: int) -> None:
    t = torch.ones(numel, 2, dtype=torch.complex64)[:, 0]
    assert t.stride() == (2,)
    assert is_plain(t)
    assert torch.equal(as_bytes(t).clone().view(torch.complex64), t)
