"""Signatures as bytes, for ranks that describe their operations to each other.

JSON, never pickle: the bytes come from another process, and reading them must not be able to run code.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from gradwire.collectives.op_kinds import OpKind, ReduceOp, Scope
from gradwire.collectives.signature import Signature
from gradwire.errors import GroupError

LIMIT = 1 << 24
"""Bytes that a description has at most; of an operation on very many tensors only their number is described."""


def encode(signature: Signature, *, limit: int = LIMIT) -> bytes:
    """At most `limit` bytes that describe `signature`.

    >>> encode(Signature(OpKind.BARRIER, label="end"))
    b'["barrier",[],[],null,null,null,0,"world","end"]'
    """
    data = _dump(signature)
    if len(data) > limit:
        data = _dump(replace(signature, shapes=(), dtypes=(), label=f"{len(signature.shapes)} tensors"))
    return data


def decode(data: bytes, *, rank: int) -> Signature:
    """The signature that `rank` has encoded. Raises GroupError if it is not one.

    >>> signature = Signature(OpKind.ALL_REDUCE, ((3,),), ("float32",), ReduceOp.SUM)
    >>> decode(encode(signature), rank=1) == signature
    True
    """
    try:
        kind, shapes, dtypes, reduce_op, root, peer, tag, scope, label = json.loads(data)
        return Signature(
            OpKind(kind),
            tuple(tuple(map(_integer, shape)) for shape in shapes),
            tuple(map(_text, dtypes)),
            None if reduce_op is None else ReduceOp(reduce_op),
            None if root is None else _integer(root),
            None if peer is None else _integer(peer),
            _integer(tag),
            Scope(scope),
            _text(label),
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise GroupError(
            f"reading which operation rank {rank} has submitted: its {len(data)} bytes describe none ({error}). Check that "
            "all ranks run the same version of gradwire."
        ) from error


def _dump(signature: Signature) -> bytes:
    reduce_op = None if signature.reduce_op is None else signature.reduce_op.value
    fields: list[Any] = [signature.kind.value, signature.shapes, signature.dtypes, reduce_op]
    fields += [signature.root, signature.peer, signature.tag, signature.scope.value, signature.label]
    return json.dumps(fields, separators=(",", ":")).encode()


def _integer(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not an integer")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value
