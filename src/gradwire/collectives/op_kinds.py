"""What a collective does, which ranks take part, how it reduces and which dtypes it takes; and the record of one, without rules."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class OpKind(Enum):
    """What a collective does. The value is the name people read."""

    ALL_REDUCE = "all_reduce"
    """Every input becomes its reduction over all ranks, in place; several tensors are reduced as one operation."""
    BROADCAST = "broadcast"
    """The root's tensors replace every rank's, in place."""
    REDUCE = "reduce"
    """As ALL_REDUCE, but only the root's tensor holds the result; the others' are left as they were."""
    ALL_GATHER = "all_gather"
    """One input; one output per rank, which may differ in size from rank to rank."""
    ALL_GATHER_INTO_TENSOR = "all_gather_into_tensor"
    """Each output is the concatenation of all ranks' inputs, rank 0 first; several pairs are one operation."""
    REDUCE_SCATTER = "reduce_scatter"
    """One input per rank; the output is the reduction of the inputs that all ranks meant for this one."""
    REDUCE_SCATTER_TENSOR = "reduce_scatter_tensor"
    """Each input is a concatenation of one part per rank; several pairs are one operation."""
    ALL_TO_ALL = "all_to_all"
    """Input j goes to rank j, output i comes from rank i."""
    ALL_TO_ALL_SINGLE = "all_to_all_single"
    """The same on one tensor, cut along dimension 0 into equal parts or by `splits`."""
    GATHER = "gather"
    """Every input goes to the root, which has one output per rank."""
    SCATTER = "scatter"
    """The root has one input per rank; every rank gets its own in the output."""
    SEND = "send"
    """One tensor to `peer`, matched by tag."""
    RECV = "recv"
    """One tensor from `peer`, or from any rank when `peer` is None, matched by tag."""
    BARRIER = "barrier"
    """No data: done when every rank has arrived."""

    is_p2p: bool
    """Between two ranks only, and so not numbered together with the rest."""
    reduces: bool
    """Whether a `reduce_op` takes part."""
    number: int
    """In records: its place in this list."""

    # A member is one object: its identity is its hash, and computing that runs no Python.
    __hash__ = object.__hash__


for _number, _kind in enumerate(OpKind):
    _kind.number = _number
    _kind.is_p2p = _kind in (OpKind.SEND, OpKind.RECV)
    _kind.reduces = _kind in (OpKind.ALL_REDUCE, OpKind.REDUCE, OpKind.REDUCE_SCATTER, OpKind.REDUCE_SCATTER_TENSOR)


class Scope(Enum):
    """Which ranks take part in a collective. Ranks in it, such as a root, are then numbered within those."""

    WORLD = "world"
    """All ranks of the group."""
    INSIDE = "inside"
    """The ranks of this host, in the order of the layout."""
    ACROSS = "across"
    """One rank per host: those that have this rank's place in their hosts, in the order of the hosts. Only for carriers."""

    __hash__ = object.__hash__


class ReduceOp(Enum):
    """How values of different ranks become one."""

    SUM = "sum"
    """The sum; on bool, the logical or."""
    AVG = "avg"
    """The sum divided by the number of ranks; floating point and complex only."""
    PRODUCT = "product"
    """The product; on bool, the logical and."""
    MIN = "min"
    """The least; not on complex."""
    MAX = "max"
    """The greatest; not on complex."""
    BAND = "band"
    """Bitwise and; integers and bool."""
    BOR = "bor"
    """Bitwise or; integers and bool."""
    BXOR = "bxor"
    """Bitwise exclusive or; integers and bool."""
    PREMUL_SUM = "premul_sum"
    """The sum of each rank's values times `factor`, which ranks may choose differently; floating point and complex."""

    __hash__ = object.__hash__


COALESCED = frozenset({
    OpKind.ALL_REDUCE, OpKind.BROADCAST, OpKind.ALL_GATHER_INTO_TENSOR, OpKind.REDUCE_SCATTER_TENSOR
})  # fmt: skip
"""Kinds in which several tensors, or pairs, can be one operation."""


@dataclass(frozen=True, slots=True)
class Signature:
    """A collective without its tensors: what ranks compare, and what errors, events and traces carry."""

    kind: OpKind
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    reduce_op: ReduceOp | None = None
    root: int | None = None
    peer: int | None = None
    tag: int = 0
    scope: Scope = Scope.WORLD
    label: str = ""

    def __str__(self) -> str:
        parts = []
        if len(set(zip(self.shapes, self.dtypes, strict=True))) == 1:
            times = f"{len(self.shapes)} x " if len(self.shapes) > 1 else ""
            parts.append(f"{times}{self.dtypes[0]}{list(self.shapes[0])}")
        else:
            parts += [f"{dtype}{list(shape)}" for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]
        if self.reduce_op is not None:
            parts.append(self.reduce_op.name)
        if self.root is not None:
            parts.append(f"root={self.root}")
        if self.kind.is_p2p:
            parts.append(f"peer={'any' if self.peer is None else self.peer}")
            parts.append(f"tag={self.tag}")
        if self.scope is not Scope.WORLD:
            parts.append(f"scope={self.scope.value}")
        if self.label:
            parts.append(f"label={self.label!r}")
        return f"{self.kind.value}({', '.join(parts)})"


@dataclass(frozen=True, slots=True, eq=False)
class OpFields:
    """The fields of a `Collective`, without the rules."""

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


# torch has dtypes that only hold bits (float4, float8_e8m0fnu, bits8): they are moved and not reduced. Others it cannot even copy
# (int4), or they mean nothing without metadata (quint8's scale): no collective takes those.

_ARITHMETIC = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT})
_ORDERED = frozenset({ReduceOp.MIN, ReduceOp.MAX})
_INEXACT = frozenset({ReduceOp.AVG, ReduceOp.PREMUL_SUM})
_BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)

REDUCES: dict[torch.dtype, frozenset[ReduceOp]] = {
    **dict.fromkeys(_FLOATS + FLOAT8, _ARITHMETIC | _ORDERED | _INEXACT),
    **dict.fromkeys(_COMPLEX, _ARITHMETIC | _INEXACT),
    **dict.fromkeys((*_INTEGERS, *WIDE_UNSIGNED, torch.bool), _ARITHMETIC | _ORDERED | _BITWISE),
}
"""What each dtype can be reduced by."""

_BITS = (torch.bits8, torch.bits16, torch.bits1x8, torch.bits2x4, torch.bits4x2)
ONLY_BITS = frozenset({torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, *_BITS})
"""Dtypes without arithmetic, which can be moved."""

ALWAYS_FINITE = frozenset({torch.float4_e2m1fn_x2})
"""Floating-point dtypes that have neither infinities nor NaN."""

MOVES = frozenset(REDUCES) | ONLY_BITS
"""Dtypes that can be broadcast, gathered, scattered, exchanged and sent."""

REDUCES_SPARSE = dict.fromkeys(_FLOATS + _COMPLEX + _INTEGERS, _INEXACT | {ReduceOp.SUM})
"""The same of sparse tensors, which can only be added up."""
