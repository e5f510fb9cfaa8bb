"""Which dtypes can be moved, and which can be reduced by what: one table for every group.

torch has dtypes that only hold bits (float4, float8_e8m0fnu, bits8): they are moved and not reduced. Others it cannot even copy
(int4), or they mean nothing without metadata (quint8's scale): no collective takes those.
"""

from __future__ import annotations

import torch

from gradwire.collectives.op_kinds import ReduceOp

_ARITHMETIC = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT})
_ORDERED = frozenset({ReduceOp.MIN, ReduceOp.MAX})
_INEXACT = frozenset({ReduceOp.AVG, ReduceOp.PREMUL_SUM})
_BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})


def _named(*names: str) -> tuple[torch.dtype, ...]:
    """Those that this torch has."""
    return tuple(getattr(torch, name) for name in names if hasattr(torch, name))


_FLOATS = _named("float16", "bfloat16", "float32", "float64")
_FLOAT8 = _named("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
_COMPLEX = _named("complex32", "complex64", "complex128")
_INTEGERS = _named("int8", "int16", "int32", "int64", "uint8")
_WIDE_UNSIGNED = _named("uint16", "uint32", "uint64")

REDUCES: dict[torch.dtype, frozenset[ReduceOp]] = {
    **dict.fromkeys(_FLOATS + _FLOAT8, _ARITHMETIC | _ORDERED | _INEXACT),
    **dict.fromkeys(_COMPLEX, _ARITHMETIC | _INEXACT),
    **dict.fromkeys((*_INTEGERS, *_WIDE_UNSIGNED, torch.bool), _ARITHMETIC | _ORDERED | _BITWISE),
}
"""What each dtype can be reduced by."""

ONLY_BITS = frozenset(_named("float8_e8m0fnu", "float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"))
"""Dtypes without arithmetic, which can be moved."""

ALWAYS_FINITE = frozenset(_named("float4_e2m1fn_x2"))
"""Floating-point dtypes that have neither infinities nor NaN."""

MOVES = frozenset(REDUCES) | ONLY_BITS
"""Dtypes that can be broadcast, gathered, scattered, exchanged and sent."""

SPARSE = frozenset(_FLOATS + _COMPLEX + _INTEGERS)
"""Dtypes of which sparse tensors can be added up."""

SPARSE_OPS = frozenset({ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM})
