"""`sign`: one bit per element and one scale per parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from gradwire.collectives import all_gather_into_tensor, all_to_all_single
from gradwire.hooks.arguments import checks_arguments
from gradwire.hooks.base import CommHook, Reduced, Reduction, Trait, Turn
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.compressors.quantized import codec
from gradwire.hooks.compressors.quantized.layout import Part, joined, of_one_section, part_of
from gradwire.hooks.compressors.quantized.quantize import parity
from gradwire.hooks.numerics.elementwise import as_dtype, float32_error, real


@dataclass(frozen=True, slots=True, eq=False)
class _ScaleGroups:
    counts: tuple[int, ...]
    on_device: Tensor
    _rows: dict[tuple[int, int], tuple[Tensor, _ScaleGroups]] = field(default_factory=dict)

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> _ScaleGroups:
        return cls(tuple(counts), torch.tensor(counts, dtype=torch.int64, device=device))

    @property
    def numel(self) -> int:
        return sum(self.counts)

    def in_row(self, rank: int, size: int) -> tuple[Tensor, _ScaleGroups]:
        """The indices of the scales in each of `size` rows, and the groups of row `rank`. Kept: making them waits for a GPU."""
        if (rank, size) not in self._rows:
            device, rows = self.on_device.device, _in_rows(self.counts, size)
            there = torch.tensor([indices for indices, _ in rows], device=device)
            self._rows[rank, size] = there, _ScaleGroups.of(rows[rank][1], device)
        return self._rows[rank, size]

    def scales(self, flat: Tensor) -> Tensor:
        sums = [torch.linalg.vector_norm(piece, 1) for piece in flat.split(self.counts)]
        return torch.stack(sums).div_(self.on_device.clamp(min=1))

    def scale_(self, values: Tensor, scales: Tensor) -> Tensor:
        """Multiply each value by the scale of its parameter."""
        if self.numel:
            torch._foreach_mul_(values.split(self.counts), scales.unbind())
        return values

    def spread(self, scales: Tensor) -> Tensor:
        return self.scale_(scales.new_ones(self.numel), scales)


@dataclass(frozen=True, slots=True, repr=False)
class Sign(CommHook):
    scale: str
    per: str

    made_by = "sign"
    dense_only = uses_room = True
    error = float32_error

    @property
    def traits(self) -> Trait:
        return Trait.AVERAGES if self.scale == "mean" else Trait.AVERAGES | Trait.VOTES

    @property
    def collectives(self) -> int:
        return 1 if self.scale == "mean" else 2

    def init(self, spec: BucketSpec) -> _ScaleGroups:
        """Which elements share a scale: derived data, not state that is saved."""
        return _ScaleGroups.of(_counts(spec, self.per), spec.device)

    def reduce(self, grad: Tensor, state: _ScaleGroups, turn: Turn) -> Reduction:
        """Gather signs and scales; or exchange signs, count votes, gather the results."""
        flat = real(grad.view(-1))
        scales = state.scales(flat.to(torch.float32))
        reduction = self._mean if self.scale == "mean" else self._majority
        value, sent = yield from reduction(flat, scales, state, turn)
        return Reduced(as_dtype(value, grad.dtype), as_dtype(sent, grad.dtype))

    def _mean(self, flat: Tensor, scales: Tensor, groups: _ScaleGroups, turn: Turn) -> Reduction:
        part = part_of(groups.numel, 1)
        message = torch.cat([_signs(flat, part, 1, parity(turn)), scales.view(1, -1).view(torch.uint8)], 1)
        gathered = message.new_empty((turn.world_size, message.shape[1]))
        yield all_gather_into_tensor(gathered, message, label=f"bucket {turn.spec.index}")
        signs, theirs = _apart(gathered, part)
        total = sent = flat
        for rank in range(turn.world_size):
            contribution = groups.scale_(_meant(signs[rank], part), theirs[rank])
            if rank == turn.rank:
                sent = contribution
            total = total.add_(contribution) if rank else contribution.clone() if turn.world_size > 1 else contribution
        room = turn.room if turn.room is not None and turn.room.dtype == torch.float32 else None
        return Reduced(torch.mul(total, 1 / turn.counted, out=room), sent)

    def _majority(self, flat: Tensor, scales: Tensor, groups: _ScaleGroups, turn: Turn) -> Reduction:
        size, count, label = turn.world_size, turn.counted, f"bucket {turn.spec.index}"
        part = part_of(groups.numel, 1, rows=size)
        ours = scales.view(1, -1).view(torch.uint8)
        message = torch.cat([_signs(flat, part, size, parity(turn)), ours.expand(size, -1)], 1)
        received = torch.empty_like(message)
        yield all_to_all_single(received, message, label=label)

        signs, theirs = _apart(received, part)
        low = turn.rank * part.row
        own = part.owned_by(turn.rank)
        vote, mean = _tally(signs, (groups.spread(each)[low : low + own.numel] for each in theirs), own, turn)
        results = message.new_empty((size, part.blocks * part.block_bytes))
        yield all_gather_into_tensor(results, _signs(vote, own, 1, 0), label=label)

        mean_scale = theirs[0].clone()
        for rank in range(1, size):
            mean_scale += theirs[rank]
        mean_scale *= 1 / count
        value = groups.scale_(_meant(results, part), mean_scale)
        if turn.donated:
            return Reduced(value, value)
        sent = groups.scale_(_meant(message[:, : results.shape[1]], part), scales)
        # The difference between vote and mean is the error of the slice's owner.
        off = value.narrow(0, min(low, part.numel), own.numel) - mean
        sent.narrow(0, min(low, part.numel), own.numel).add_(off, alpha=count)
        return Reduced(value, sent)

    def reduce_scatter(self, grad: Tensor, state: _ScaleGroups, turn: Turn) -> Reduction:
        """Send each rank the signs in its row, and the scales of the parameters there."""
        flat, size, low = real(grad.view(-1)), turn.world_size, turn.rank * (state.numel // turn.world_size)
        scales = state.scales(flat.to(torch.float32))
        [rows], (there, mine) = of_one_section(state.numel, 1).rows(size), state.in_row(turn.rank, size)
        pieces, own = joined(rows), rows[turn.rank].part
        signs = torch.cat(
            [_signs(p.slices.take(flat), p.part, p.rows.stop - p.rows.start, parity(turn)) for p in pieces]
        )
        message = torch.cat([signs, scales[there].view(torch.uint8)], 1)
        received = torch.empty_like(message)
        yield all_to_all_single(received, message, label=f"bucket {turn.spec.index}")

        their_signs, their_scales = _apart(received, own)
        their_scales = their_scales[:, : len(mine.counts)]
        vote, mean = _tally(their_signs, map(mine.spread, their_scales), own, turn)
        value = mean
        if self.scale == "majority":
            value = mine.scale_(vote.sign(), their_scales.sum(0).mul_(1 / turn.counted))
        if turn.donated:
            return Reduced(as_dtype(value, grad.dtype), grad)
        sent = state.scale_(torch.cat([_meant(signs[p.rows], p.part) for p in pieces]), scales)
        if value is not mean:  # the error of the row's owner
            sent.narrow(0, low, own.numel).add_(value - mean, alpha=turn.counted)
        return Reduced(as_dtype(value, grad.dtype), as_dtype(sent, grad.dtype))

    def capture_key(self, turn: Turn) -> int:
        return parity(turn)

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        counts = _counts(spec, self.per)
        rows, times = (1, 1) if self.scale == "mean" else (world_size, 2)
        part = part_of(sum(counts), 1, rows=rows)
        return float((world_size - 1) * (times * part.blocks * part.block_bytes + 4 * len(counts)))

    def scatter_wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        counts = _counts(spec, self.per)
        part, (there, _) = part_of(sum(counts) // world_size, 1), _in_rows(counts, world_size)[0]
        return float((world_size - 1) * (part.blocks * part.block_bytes + 4 * len(there)))


@checks_arguments(scale=("mean", "majority"), per=("parameter", "bucket"))
def sign(scale: Literal["mean", "majority"] = "mean", *, per: Literal["parameter", "bucket"] = "parameter") -> CommHook:
    """One bit per element: its sign, with the mean absolute value of its parameter (or of the whole bucket) as scale.

    `scale="mean"` (arXiv 1901.09847, there with error feedback): the mean of all ranks' scaled signs.
    `scale="majority"`, signSGD with majority vote (arXiv 1802.04434, 1810.05291): each rank counts the votes on its slice, and the
    value is the majority's sign times the mean of the ranks' scales. The slice's owner breaks ties; a rank whose parameter is all
    zeros does not vote. Error feedback around it is refused: the residual would grow from step to step.

    On the wire, with n ranks, S scales (parameters, or 1) and blocks of 256 elements:
    mean (n - 1) (32 k + 4 S) bytes, k = ceil(numel / 256): all signs go to all ranks, which pays off for few ranks only;
    majority (n - 1) (64 k + 4 S) bytes, k = ceil(ceil(numel / 256) / n).
    A zero is sent as +1 or -1, alternating with element, step and rank. NaN or inf in a parameter makes all of it NaN or inf.

    >>> sign()
    sign(scale='mean', per='parameter')
    """
    return Sign(scale, per)


def _counts(spec: BucketSpec, per: str) -> tuple[int, ...]:
    reals = 2 if spec.dtype.is_complex else 1
    return tuple(reals * numel for numel in spec.numels) if per == "parameter" else (reals * spec.numel,)


def _in_rows(counts: Sequence[int], rows: int) -> list[tuple[list[int], list[int]]]:
    """For each of `rows` equal rows, the indices of the parameters in it, repeated up to the same number, and their counts there.

    >>> _in_rows([4, 1, 1], 2)
    [([0, 0, 0], [3]), ([0, 1, 2], [1, 1, 1])]
    """
    row, begin = max(1, sum(counts) // rows), 0
    inside: list[tuple[list[int], list[int]]] = [([], []) for _ in range(rows)]
    for index, number in enumerate(counts):
        end = begin + number
        for r in range(begin // row, max(begin, end - 1) // row + 1):
            indices, lengths = inside[min(r, rows - 1)]
            indices.append(index)
            lengths.append(min(end, (r + 1) * row) - max(begin, r * row))
        begin = end
    width = max(len(indices) for indices, _ in inside)
    return [(indices + (indices or [0])[-1:] * (width - len(indices)), lengths) for indices, lengths in inside]


def _signs(flat: Tensor, part: Part, rows: int, key: int) -> Tensor:
    """The packed signs: the codes of the codec's message, without its scales per block."""
    message = torch.empty((rows, part.stride), dtype=torch.uint8, device=flat.device)
    codec.quantize(flat, message, part, key)
    return message[:, : part.blocks * part.block_bytes].contiguous()


def _meant(signs: Tensor, part: Part) -> Tensor:
    rows = signs if signs.dim() == 2 else signs.unsqueeze(0)
    out = torch.empty(part.numel, dtype=torch.float32, device=signs.device)
    if part.numel:
        ones = torch.ones((rows.shape[0], part.stride // 4), dtype=torch.float32, device=signs.device)
        message = ones.view(torch.uint8)
        message[:, : part.scales_at] = rows  # the scales stay 1
        codec.decode(message, out, part)
    return out


def _tally(signs: Tensor, scales: Iterable[Tensor], own: Part, turn: Turn) -> tuple[Tensor, Tensor]:
    """The votes of all ranks on this rank's elements, which breaks ties, and the mean of their scaled signs."""
    votes = torch.zeros(own.numel, dtype=torch.float32, device=signs.device)
    mean = torch.zeros_like(votes)
    for rank, scale in enumerate(scales):
        sign = _meant(signs[rank], own)
        votes += sign * (scale > 0)  # a rank with zeros only does not vote
        mean += sign * scale
    return torch.where(votes == 0, _meant(signs[turn.rank], own), votes), mean.mul_(1 / turn.counted)


def _apart(received: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    signs, scales = received.tensor_split([part.blocks * part.block_bytes], 1)
    return signs.contiguous(), scales.contiguous().view(torch.float32)
