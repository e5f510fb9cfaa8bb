"""Constructors: which fields each fills."""

from __future__ import annotations

import pytest
import torch

from gradwire.collectives import Collective, OpKind, ReduceOp, build
from gradwire.errors import UsageTypeError

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
