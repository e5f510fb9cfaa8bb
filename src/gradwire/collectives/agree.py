"""Whether the collectives that ranks submitted fit together."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.collectives.kinds import Kind
from gradwire.collectives.op import Signature

# Kinds in which ranks may bring tensors of different shapes, or different numbers of them.
_FREE_SHAPES = frozenset({Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL, Kind.ALL_TO_ALL_SINGLE})


def disagreement(signatures: Sequence[Signature]) -> str | None:
    """Say in one sentence how the ranks' signatures differ, naming the ranks that differ from the majority, or None.

    >>> from gradwire.collectives import ReduceOp
    >>> a, b = (Signature(Kind.ALL_REDUCE, (n,), ("float32",), ReduceOp.SUM) for n in ((3,), (4,)))
    >>> disagreement([a, a, b])
    'ranks differ in shape: rank 2 has [[4]], the others have [[3]]'
    """
    first = signatures[0]
    if all(s == first for s in signatures):
        return None
    for field in ("kind", "dtypes", "shapes", "reduce_op", "root", "label"):
        if field == "shapes" and first.kind in _FREE_SHAPES:
            continue
        values = [
            set(s.dtypes) if field == "dtypes" and s.kind in _FREE_SHAPES else getattr(s, field) for s in signatures
        ]
        common = max(values, key=values.count)
        odd = [rank for rank, value in enumerate(values) if value != common]
        if odd:
            name = {"dtypes": "dtype", "shapes": "shape", "reduce_op": "op"}.get(field, field)
            return f"ranks differ in {name}: {_who(odd)} {_show(values[odd[0]])}, the others have {_show(common)}"
    return None


def _who(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {list(ranks)} have"


def _show(value: object) -> str:
    if isinstance(value, (tuple, set)):
        return str([list(v) if isinstance(v, tuple) else v for v in value])
    return str(getattr(value, "value", repr(value)))
