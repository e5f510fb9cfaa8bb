"""The fields of a collective, without the rules: what `check.py` checks before there is a `Collective`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire.collectives.op_kinds import OpKind, ReduceOp, Scope


@dataclass(frozen=True, slots=True, eq=False)
class OpFields:
    """See `Collective`."""

    kind: OpKind
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    reduce_op: ReduceOp | None = None
    root: int | None = None
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    peer: int | None = None
    tag: int = 0
    factor: float | Tensor | None = None
    label: str = ""
    timeout: float | None = None
    scope: Scope = Scope.WORLD
