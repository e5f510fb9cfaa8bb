"""Collectives as values: what a record tells about itself, and how its signature reads."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch

from gradwire.collectives import Collective, OpKind, ReduceOp, Signature, build
from gradwire.errors import UsageError

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


def test_kinds_know_what_they_are() -> None:
    assert {kind for kind in OpKind if kind.is_p2p} == {OpKind.SEND, OpKind.RECV}
    assert {kind for kind in OpKind if kind.reduces} == {
        OpKind.ALL_REDUCE,
        OpKind.REDUCE,
        OpKind.REDUCE_SCATTER,
        OpKind.REDUCE_SCATTER_TENSOR,
    }
