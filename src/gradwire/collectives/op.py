"""Collectives as values: `Collective`.

A `Collective` is a frozen record with uniform `inputs` and `outputs`; the constructors in `build.py` are how one is made,
and `check.py` holds the rules. This package knows tensors, not groups: what depends on the caller's rank or the world's size is
checked by `Collective.check(rank, size)`, which every group calls before it communicates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradwire.collectives.check import check_alone, check_in_world
from gradwire.collectives.op_kinds import OpFields, OpKind, Scope, Signature
from gradwire.collectives.timeouts import timeout_seconds


@dataclass(frozen=True, slots=True, eq=False)
class Collective(OpFields):
    """One operation of a group, as a value: hand it to `Group.submit`.

    `splits` is `(output_splits, input_splits)` of ALL_TO_ALL_SINGLE, or None for equal parts. `peer` and `tag` belong to SEND and
    RECV, `factor` to PREMUL_SUM. `label` is the caller's name for it, used in every error, event and trace. `timeout` is how many
    seconds it may take, if less than the group allows. `scope` selects the ranks that take part, on groups that know their hosts.

    >>> from gradwire.collectives import all_reduce
    >>> all_reduce(torch.zeros(3), label="loss")
    all_reduce(float32[3], SUM, label='loss')
    """

    def __post_init__(self) -> None:
        check_alone(self)

    def check(self, rank: int, size: int) -> None:
        """Raise UsageError unless `rank` of `size` ranks can submit this."""
        check_in_world(self, rank, size)

    def within(self, seconds: float) -> Collective:
        """The same collective with a timeout of at most `seconds`."""
        if self.timeout is not None:
            seconds = min(timeout_seconds(self.kind.value, seconds), self.timeout)
        return replace(self, timeout=seconds)

    def among(self, scope: Scope) -> Collective:
        return replace(self, scope=scope)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What this rank contributes, or, where it contributes nothing, what it receives."""
        return self.outputs if self.kind is OpKind.SCATTER else self.inputs or self.outputs

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's contribution (of what it receives, where it contributes nothing)."""
        return sum(map(_nbytes, self.tensors))

    @property
    def device(self) -> torch.device:
        """Where the tensors live; the CPU for a barrier."""
        return self.tensors[0].device if self.tensors else torch.device("cpu")

    @property
    def is_on_host(self) -> bool:
        """Whether the tensors are in the host's memory; True for a barrier."""
        tensors = self.inputs or self.outputs
        return not tensors or tensors[0].is_cpu

    @property
    def signature(self) -> Signature:
        shapes = tuple(tuple(t.shape) for t in self.tensors)
        dtypes = tuple(str(t.dtype).removeprefix("torch.") for t in self.tensors)
        whom = self.root, self.peer, self.tag, self.scope
        return Signature(self.kind, shapes, dtypes, self.reduce_op, *whom, self.label)

    def __repr__(self) -> str:
        return str(self.signature)


def sent_bytes(op: Collective, rank: int, size: int) -> float:
    """The bytes that `rank` of `size` sends in `op` by the bandwidth-optimal algorithm (a ring, or a direct exchange), averaged
    over the ranks where it may choose the sender. An engine may send more.

    >>> from gradwire.collectives import all_reduce
    >>> sent_bytes(all_reduce(torch.zeros(100)), rank=0, size=4)
    600.0
    """
    others = (size - 1) / size
    given = float(sum(map(_nbytes, op.inputs)))
    match op.kind:
        case OpKind.ALL_REDUCE:
            return 2 * others * given
        case OpKind.ALL_GATHER | OpKind.ALL_GATHER_INTO_TENSOR:
            return (size - 1) * given
        case OpKind.BROADCAST | OpKind.REDUCE | OpKind.REDUCE_SCATTER | OpKind.REDUCE_SCATTER_TENSOR:
            return others * given
        case OpKind.ALL_TO_ALL | OpKind.SCATTER:
            return given - _nbytes(op.inputs[rank]) if op.inputs else 0.0
        case OpKind.ALL_TO_ALL_SINGLE:
            rows = op.splits[1] if op.splits is not None else ()
            return given * (sum(rows) - rows[rank]) / max(1, sum(rows)) if rows else others * given
        case OpKind.GATHER:
            return 0.0 if rank == op.root else given
        case OpKind.SEND | OpKind.RECV | OpKind.BARRIER:
            return given


def _nbytes(t: Tensor) -> int:
    return t._values().nbytes + t._indices().nbytes if t.is_sparse else t.nbytes
