"""Whether the collectives that ranks submitted fit together, and signatures as bytes, which ranks exchange to compare them.

JSON, never pickle: the bytes come from another process, and reading them must not be able to run code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gradwire.collectives.op_kinds import OpKind, ReduceOp, Scope, Signature
from gradwire.errors import CollectiveMismatch, GroupError

# Kinds in which ranks may bring tensors of different shapes, or different numbers of them.
_FREE_SHAPES = frozenset({OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL, OpKind.ALL_TO_ALL_SINGLE})
_NAMES = ("kind", "dtype", "shape", "op", "root", "label")
Signatures = Sequence[Signature]
LIMIT = 1 << 24
"""Bytes that a description has at most; of an operation on very many tensors only their number is described."""


def comparable(signature: Signature) -> tuple[object, ...]:
    """What must be equal on all ranks: one value per entry of kind, dtype, shape, op, root, label."""
    free = signature.kind in _FREE_SHAPES
    dtypes = tuple(sorted(set(signature.dtypes))) if free else signature.dtypes
    shapes = () if free else signature.shapes
    return signature.kind, dtypes, shapes, signature.reduce_op, signature.root, signature.label


def disagreement(signatures: Signatures, ranks: Sequence[int] | None = None) -> str | None:
    """How the ranks' signatures differ, in one sentence that names the ranks that differ from the majority; None if they agree.

    >>> from gradwire.collectives import ReduceOp
    >>> a, b = (Signature(OpKind.ALL_REDUCE, (n,), ("float32",), ReduceOp.SUM) for n in ((3,), (4,)))
    >>> disagreement([a, a, b])
    'ranks differ in shape: rank 2 has [[4]], the others have [[3]]'
    """
    for name, values in zip(_NAMES, zip(*map(comparable, signatures), strict=True), strict=True):
        common = max(values, key=values.count)
        odd = [i for i, value in enumerate(values) if value != common]
        if odd:
            named = [ranks[i] for i in odd] if ranks else odd
            who = f"rank {named[0]} has" if len(named) == 1 else f"ranks {named} have"
            return f"ranks differ in {name}: {who} {_show(values[odd[0]])}, the others have {_show(common)}"
    return None


def mismatch(
    group: str, signatures: Signatures, *, compared: Signatures | None = None, ranks: Sequence[int] | None = None
) -> CollectiveMismatch | None:
    """The error for ranks that submitted different collectives to `group`, or None if they agree. `compared` is compared instead of
    them, where not everything about them matters; `ranks` are their ranks, where not all ranks take part."""
    problem = disagreement(compared or signatures, ranks)
    if problem is None:
        return None
    ops = dict(enumerate(signatures) if ranks is None else zip(ranks, signatures, strict=True))
    submitted = "; ".join(f"rank {r}: {s}" for r, s in ops.items())
    text = f"{group}: an operation is not the same on all ranks: {problem}. Submitted: {submitted}. "
    return CollectiveMismatch(text + "All ranks must submit the same collectives in the same order.", ops=ops)


def _show(value: object) -> str:
    if isinstance(value, tuple):
        return str([list(v) if isinstance(v, tuple) else v for v in value])
    return str(getattr(value, "value", repr(value)))


def encode(signature: Signature, *, limit: int = LIMIT) -> bytes:
    """At most `limit` bytes that describe `signature`.

    >>> encode(Signature(OpKind.BARRIER, label="end"))
    b'["barrier",[],[],null,null,null,0,"world","end"]'
    """
    reduce_op = None if signature.reduce_op is None else signature.reduce_op.value
    fields: list[Any] = [signature.kind.value, signature.shapes, signature.dtypes, reduce_op]
    fields += [signature.root, signature.peer, signature.tag, signature.scope.value, signature.label]
    data = json.dumps(fields, separators=(",", ":")).encode()
    if len(data) > limit:
        return encode(replace(signature, shapes=(), dtypes=(), label=f"{len(signature.shapes)} tensors"))
    return data


def decode(data: bytes, *, rank: int) -> Signature:
    """The signature that `rank` has encoded. Raises GroupError if it is not one.

    >>> signature = Signature(OpKind.ALL_REDUCE, ((3,),), ("float32",), ReduceOp.SUM)
    >>> decode(encode(signature), rank=1) == signature
    True
    """
    try:
        kind, shapes, dtypes, reduce_op, root, peer, tag, scope, label = json.loads(data)
        sizes = tuple(tuple(map(int, shape)) for shape in shapes)
        reduction = None if reduce_op is None else ReduceOp(reduce_op)
        root, peer = (None if rank is None else int(rank) for rank in (root, peer))
        fields = OpKind(kind), sizes, tuple(map(str, dtypes)), reduction, root, peer
        return Signature(*fields, int(tag), Scope(scope), str(label))
    except (ValueError, TypeError, RecursionError) as error:
        raise GroupError(
            f"reading which operation rank {rank} has submitted: its {len(data)} bytes describe none ({error}). Check that "
            "all ranks run the same version of gradwire."
        ) from error
