"""The eager reference of `reducer/checks/nonfinite_scan.py`: what its kernels must compute, and their stand-in without a GPU."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gradwire.reducer.checks.nonfinite_scan import Places

TILE = 4


def detect(places: Places, addresses: Tensor, flag: Tensor, *, aligned: bool, limit: float) -> None:
    assert aligned == all(address % 16 == 0 for address in addresses.tolist())
    if any(not bool((values.abs() < limit).all()) for _, values in _tensors(places, addresses)):
        flag.fill_(1)


def find(places: Places, addresses: Tensor, flag: Tensor, found: Tensor, *, limit: float) -> None:
    if not flag:
        return
    rows = found.view(-1, 3)
    for (_, _, first, count), values in _tensors(places, addresses):
        for begin, end, row in places.members[first : first + count].tolist():
            part = values[begin:end]
            beyond = (part.abs() >= limit) & (part.abs() < math.inf)
            for kind, bad in enumerate((part.isnan(), part.isinf(), beyond)):
                if bad.any():
                    rows[row, kind] = min(int(rows[row, kind]), int(bad.nonzero()[0]))


def _tensors(places: Places, addresses: Tensor) -> Iterator[tuple[list[int], Tensor]]:
    assert len(places.tensor_of_tile) == places.tiles
    for row, address in zip(places.tensors.tolist(), addresses.tolist(), strict=True):
        if address and row[0]:
            memory = (ctypes.c_char * (row[0] * places.dtype.itemsize)).from_address(address)
            yield row, torch.frombuffer(memory, dtype=places.dtype).to(torch.float64)
