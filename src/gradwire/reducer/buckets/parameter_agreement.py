"""Whether all ranks have the same parameters: compared when a model is replicated, before anything depends on it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch

from gradwire.collectives import all_gather, all_gather_into_tensor
from gradwire.errors import LayoutError
from gradwire.groups.base import Group
from gradwire.reducer.buckets.layout import ParameterSpec


def compare_parameters(group: Group, specs: Sequence[ParameterSpec], *, device: torch.device | None = None) -> None:
    """Raise LayoutError on every rank unless all have the same parameters; names the first that differs, and the ranks.

    On the wire: 40 bytes a rank; the descriptions travel only when they differ.
    """
    device = device or torch.device("cpu")
    lines = [spec.describe() for spec in specs]
    text = json.dumps(lines).encode()
    mine = _tensor(hashlib.sha256(text).digest() + len(text).to_bytes(8, "little"), device)
    gathered = torch.empty(group.size * mine.numel(), dtype=torch.uint8, device=device)
    group.submit(all_gather_into_tensor(gathered, mine, label="compare parameters")).wait()
    pages = [bytes(p.tolist()) for p in gathered.view(group.size, -1).cpu()]
    if all(page == pages[0] for page in pages):
        return
    places = [torch.empty(int.from_bytes(p[32:], "little"), dtype=torch.uint8, device=device) for p in pages]
    group.submit(all_gather(places, _tensor(text, device), label="describe parameters")).wait()
    by_rank = [json.loads(bytes(p.tolist())) for p in places]
    reference = max(by_rank, key=by_rank.count)
    odd = [rank for rank, lines in enumerate(by_rank) if lines != reference]
    raise LayoutError(_difference(by_rank, reference, odd), ranks=odd)


def _tensor(data: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _difference(by_rank: list[list[str]], reference: list[str], odd: list[int]) -> str:
    base, other = by_rank.index(reference), by_rank[odd[0]]
    who = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {odd}"
    advice = "Build the same model on every rank before you replicate it."
    if len(reference) != len(other):
        return (
            f"replicating a model: ranks have different numbers of parameters: {who} {len(other)}, rank {base} "
            f"{len(reference)}. {_first(reference, other)} {advice}"
        )
    return f"replicating a model: {who} and rank {base} disagree. {_first(reference, other)} {advice}"


def _first(reference: list[str], other: list[str]) -> str:
    for i, (a, b) in enumerate(zip(reference, other, strict=False)):
        if a != b:
            return f"The first parameter that differs is number {i}: {b!r} against {a!r}."
    shorter = min(len(reference), len(other))
    longer = reference if len(reference) > len(other) else other
    return f"The first one that only some have is number {shorter}: {longer[shorter]!r}."
