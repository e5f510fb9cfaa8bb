"""Collectives as values, their constructors and the reference that defines what each means."""

from gradwire.collectives.build import (
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    send,
)
from gradwire.collectives.layout import Layout
from gradwire.collectives.op import Collective
from gradwire.collectives.op_kinds import OpKind, ReduceOp, Scope, Signature

__all__ = [
    "Collective",
    "Layout",
    "OpKind",
    "ReduceOp",
    "Scope",
    "Signature",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]
