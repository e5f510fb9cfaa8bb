"""How parameters are dealt to buckets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.errors import UsageError
from gradwire.reducer.buckets.layout import ParameterSpec


def by_size(
    parameters: Sequence[ParameterSpec], limits: Sequence[int], *, order: Sequence[int] | None = None
) -> list[list[int]]:
    """Fill buckets up to `limits` bytes each: the first limit for the first bucket, the last for all that follow.

    Parameters come in `order` (their own by default). Only equal dtypes and devices share a bucket; a sparse parameter has
    one of its own. A bucket is closed once it has reached its limit, so it may exceed it by one parameter, as in torch.
    With `order` given, buckets come in the order in which they fill; otherwise by their first parameter.

    >>> p = [ParameterSpec(n, (100,), (1,), torch.float32, torch.device("cpu")) for n in "abcd"]
    >>> by_size(p, [400, 800])
    [[0], [1, 2], [3]]
    """
    if not limits or any(limit <= 0 for limit in limits):
        raise UsageError(f"bucket limits {list(limits)}: every bucket must be allowed more than 0 bytes.")
    done: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    bytes_in: dict[tuple[torch.dtype, torch.device], int] = {}
    at: dict[tuple[torch.dtype, torch.device], int] = {}
    for i in range(len(parameters)) if order is None else order:
        spec = parameters[i]
        if spec.sparse:
            done.append([i])
            continue
        key = (spec.dtype, spec.device)
        filling.setdefault(key, []).append(i)
        bytes_in[key] = bytes_in.get(key, 0) + spec.nbytes
        limit_index = at.setdefault(key, 0)
        if bytes_in[key] >= limits[limit_index]:
            done.append(filling.pop(key))
            bytes_in[key] = 0
            at[key] = min(limit_index + 1, len(limits) - 1)
    done += list(filling.values())
    return done if order is not None else sorted(done, key=min)
