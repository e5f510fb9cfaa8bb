"""Parses the arguments of c10d's collectives other than tensors: option objects, and the plain values of the shorter overloads.

Most collectives of c10d have two overloads, `allreduce([t], AllreduceOptions)` and `allreduce(t, ReduceOp.SUM, timeout)`,
which the types of the values distinguish.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from gradwire.collectives import ReduceOp
from gradwire.errors import UsageError, UsageTypeError

# The name that `dist.record_comm(name)` gives to the communication in its block; torch 2.11 does not have it.
_comm_name: Callable[[], str] = getattr(c10d, "_get_comm_profiling_name", lambda: "")


@dataclass(frozen=True, slots=True)
class Settings:
    """c10d's options, translated to gradwire."""

    reduce_op: ReduceOp = ReduceOp.SUM
    factor: float | Tensor | None = None
    root: int = 0
    timeout: float | None = None
    """The timeout of this operation in seconds; None if the caller gave none."""
    label: str = ""
    """The name given by `dist.record_comm`."""
    async_op: bool = True
    """Whether the caller continues before the operation has finished."""


def read_settings(method: str, args: Sequence[Any] = (), named: Mapping[str, Any] | None = None) -> Settings:
    """Parse the arguments after the tensors of one call of c10d's `method`.

    >>> from datetime import timedelta
    >>> read_settings("broadcast", (1, timedelta(seconds=5)))
    Settings(reduce_op=<ReduceOp.SUM: 'sum'>, factor=None, root=1, timeout=5.0, label='', async_op=True)
    """
    reduce_op, factor, root, timeout, async_op = ReduceOp.SUM, None, 0, None, True
    for value in (*args, *(named or {}).values()):
        if value is None:
            continue
        if isinstance(value, timedelta):
            timeout = _seconds(value)
        elif isinstance(value, int):
            root = value
        elif isinstance(value, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
            reduce_op, factor = translate_reduce_op(value)
        elif hasattr(value, "timeout"):
            if getattr(value, "sparseIndices", None) is not None:
                raise UsageError(f"{method}: sparseIndices is set. Pass a sparse COO tensor instead.")
            if hasattr(value, "reduceOp"):
                reduce_op, factor = translate_reduce_op(value.reduceOp)
            root = getattr(value, "rootRank", 0)
            timeout = _seconds(value.timeout)
            async_op = getattr(value, "asyncOp", True)
        else:
            raise UsageTypeError(
                f"{method}: {value!r} is neither one of c10d's option objects nor a ReduceOp, root rank or timedelta."
            )
    return Settings(reduce_op, factor, root, timeout, _comm_name(), async_op)


def _seconds(timeout: timedelta) -> float | None:
    # c10d encodes "not given" as zero or, in option objects, as minus one millisecond.
    value = timeout.total_seconds()
    return value if value > 0 else None


def translate_reduce_op(op: Any) -> tuple[ReduceOp, float | Tensor | None]:
    """c10d's ReduceOp as ours, with the factor of PREMUL_SUM.

    >>> translate_reduce_op(dist.ReduceOp.MAX)
    (<ReduceOp.MAX: 'max'>, None)
    """
    # The pickled state is the only way to read the factor in all supported versions of torch.
    kind, factor = (op, None) if isinstance(op, dist.ReduceOp.RedOpType) else op.__getstate__()
    try:
        return ReduceOp[kind.name], factor
    except KeyError:
        raise UsageError(
            f"c10d's ReduceOp {kind.name} is not supported. Pass one of {', '.join(o.name for o in ReduceOp)}."
        ) from None
