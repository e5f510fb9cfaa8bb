"""`quantize`: the mean of gradients that are sent in a few bits per element."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Literal

import torch
from torch import Tensor

from gradwire.collectives import all_gather_into_tensor, all_to_all_single
from gradwire.errors import UsageError
from gradwire.hooks.arguments import checks_arguments
from gradwire.hooks.base import CommHook, Reduced, Reduction, Trait, Turn
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.compressors.quantized import codec
from gradwire.hooks.compressors.quantized.layout import WIDTHS, MessageLayout, Rules, joined, lay_out
from gradwire.hooks.numerics.elementwise import as_dtype, float32_error, real
from gradwire.hooks.numerics.rng import device_key

_LEAST_BLOCK, _LARGEST_BLOCK = 32, 8192


@dataclass(frozen=True, slots=True)
class Quantize(CommHook):
    collectives = 2
    dense_only = True
    traits = Trait.AVERAGES
    error = float32_error

    rules: Rules
    block: int
    rounding: str
    seed: int

    def check(self, spec: BucketSpec) -> None:
        CommHook.check(self, spec)
        lay_out(spec, self.rules, self.block)

    def init(self, spec: BucketSpec) -> MessageLayout:
        """The layout of messages: derived data, not state that is saved."""
        return lay_out(spec, self.rules, self.block)

    def adds_residual(self, grad: Tensor, residual: Tensor, state: MessageLayout, turn: Turn) -> bool:
        """If the whole bucket has one bit width: see `codec.has_feedback`."""
        whole = len(state.sections) == 1 and state.sections[0].slices.numel == grad.numel()
        return turn.donated and whole and codec.has_feedback(grad, residual)

    def reduce(self, grad: Tensor, state: MessageLayout, turn: Turn) -> Reduction:
        """Send quantized slices to their owners, which average them; gather the means, quantized again."""
        label, residual = f"bucket {turn.spec.index}", turn.residual
        flat = real(grad.view(-1))
        pairs = list(zip(state.sections, state.parts(turn.world_size), strict=True))
        message = flat.new_empty((turn.world_size, state.stride(turn.world_size)), dtype=torch.uint8)
        answer = flat.new_empty((1, message.shape[1]), dtype=torch.uint8)
        keys = self._keys(turn)

        for section, part in pairs:
            key = parity(turn) if part.bits == 1 else next(keys)
            if residual is None:
                codec.quantize(section.slices.take(flat), message, part, key)
            else:
                codec.quantize_sum(flat, residual, message, part, key, turn.rank)
        received = torch.empty_like(message)
        yield all_to_all_single(received, message, label=label)

        sent = None if turn.donated else torch.empty_like(flat)
        for section, part in pairs:
            own, key = part.owned_by(turn.rank), parity(turn) if part.bits == 1 else next(keys)
            if residual is not None:
                start = min(turn.rank * part.row, part.numel)
                mine = residual.narrow(0, start, own.numel), flat.narrow(0, start, own.numel)
                codec.quantize_mean(received, mine, answer, own, key, turn.counted)
                continue
            mean = torch.empty(own.numel, dtype=torch.float32, device=flat.device)
            codec.decode(received, mean, own, 1 / turn.counted)
            codec.quantize(mean, answer, own, key)
            if sent is not None:
                room = section.slices.room(sent) if sent.dtype == torch.float32 else mean.new_empty(part.numel)
                codec.decode(message, room, part)
                if own.numel:  # this rank's slice: its error when it rounded the mean
                    rounded = torch.empty_like(mean)
                    codec.decode(answer, rounded, own)
                    room.narrow(0, turn.rank * part.row, own.numel).add_(rounded.sub_(mean).mul_(turn.counted))
                section.slices.put(sent, room)
        gathered = received  # the same size, and no longer needed
        yield all_gather_into_tensor(gathered, answer, label=label)

        value = flat if turn.donated else torch.empty_like(flat)
        for section, part in pairs:
            room = section.slices.room(value)
            codec.decode(gathered, room, part)
            section.slices.put(value, room)
        return Reduced(as_dtype(value, grad.dtype), as_dtype(value if sent is None else sent, grad.dtype))

    def reduce_scatter(self, grad: Tensor, state: MessageLayout, turn: Turn) -> Reduction:
        """Send quantized rows to their owners, which average them: the first half of `reduce`, on rows of the bucket."""
        flat, residual = real(grad.view(-1)), turn.residual
        sections, keys = state.rows(turn.world_size), self._keys(turn)
        pieces = [piece for rows in sections for piece in joined(rows)]
        message = flat.new_empty((turn.world_size, pieces[0].part.stride), dtype=torch.uint8)
        for slices, rows, part in pieces:
            key = parity(turn) if part.bits == 1 else next(keys)
            if residual is None:
                codec.quantize(slices.take(flat), message[rows], part, key)
            else:  # whose own row is final as well: the mean is not rounded
                codec.quantize_sum(slices.take(flat), slices.take(residual), message[rows], part, key, -1)
        received = torch.empty_like(message)
        yield all_to_all_single(received, message, label=f"bucket {turn.spec.index}")

        value = flat.new_empty(flat.numel() // turn.world_size)
        for own, _, part in (rows[turn.rank] for rows in sections):
            here = own.within(turn.rank * value.numel(), value.numel(), origin=turn.rank * value.numel())
            mean = here.room(value) if value.dtype == torch.float32 else flat.new_empty(part.numel, dtype=torch.float32)
            codec.decode(received, mean, part, 1 / turn.counted)
            here.put(value, mean)
        sent = flat if turn.donated else torch.empty_like(flat)
        for slices, rows, part in () if turn.donated else pieces:
            room = slices.room(sent)
            codec.decode(message[rows], room, part)
            slices.put(sent, room)
        return Reduced(as_dtype(value, grad.dtype), as_dtype(sent, grad.dtype))

    def capture_key(self, turn: Turn) -> int:
        return parity(turn) if any(bits == 1 for _, bits in self.rules) else 0

    def _keys(self, turn: Turn) -> Iterator[Tensor | None]:
        """A different key for each random rounding of a turn; None if rounding is to nearest."""
        first = None if self.rounding == "nearest" else device_key(self.seed, turn, shared=False)
        for i in count():
            yield first if first is None or i == 0 else first + i * 0x3C6EF372

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        return 2.0 * (world_size - 1) * self.init(spec).stride(world_size)

    def scatter_wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        return float((world_size - 1) * self.init(spec).rows(world_size)[0][0].part.stride)

    def __repr__(self) -> str:
        bits = self.rules[0][1] if len(self.rules) == 1 and self.rules[0][0] == "*" else dict(self.rules)
        return f"quantize(bits={bits}, block={self.block}, rounding={self.rounding!r}, seed={self.seed})"


@checks_arguments(rounding=("nearest", "stochastic"))
def quantize(
    bits: int | Mapping[str, int] = 8,
    *,
    block: int = 256,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    seed: int = 0,
) -> CommHook:
    """The mean of gradients rounded to 8, 4, 2 or 1 bits per element, with one float32 scale per `block` elements.

    After QSGD (arXiv 1610.02132) with a scale per block: 2, 4 and 8 bits are symmetric levels around zero up to the block's largest
    absolute value; 1 bit is the sign, alternating for zeros, times the block's mean absolute value (1-bit SGD, Seide et al. 2014).
    Each rank owns a slice of the bucket: it receives the others' codes for it, decodes and sums them, and sends the mean,
    quantized again, to all. `rounding="stochastic"` makes the expected value exact; it does not apply to 1 bit. A block that
    contains NaN or inf becomes NaN. `bits` may differ by parameter: `{"*.bias": 8, "*": 4}`; the first pattern that matches wins.

    On the wire: 2 (n - 1) (k * block * bits / 8 + 4 k) bytes with n ranks and k = ceil(ceil(numel / block) / n) blocks per rank,
    for each bit width in the bucket; codes and scales are each padded to 16 bytes. In short: (bits + 32 / block) / 32 of the
    volume of float32, each way; as a reduce-scatter one way.
    Memory: during a step about three times the codes, and float32 for the rank's own slice.

    >>> from gradwire.hooks import chain, error_feedback
    >>> chain(error_feedback(), quantize(bits=4))
    error_feedback() > quantize(bits=4, block=256, rounding='nearest', seed=0)
    """
    rules = tuple(bits.items()) if isinstance(bits, Mapping) else (("*", bits),)
    what = f"quantize(bits={bits!r}, block={block!r}, rounding={rounding!r})"
    if not rules:
        raise UsageError(f'{what}: no pattern in bits. Pass at least one, such as "*": 8.')
    for pattern, width in rules:
        if not isinstance(pattern, str) or isinstance(width, bool) or width not in WIDTHS:
            raise UsageError(
                f"{what}: {width!r} bits for {pattern!r}. Bits are 8, 4, 2 or 1, alone or by pattern of names."
            )
    if block & (block - 1) or not _LEAST_BLOCK <= block <= _LARGEST_BLOCK:
        raise UsageError(f"{what}: a block is a power of two from {_LEAST_BLOCK} to {_LARGEST_BLOCK}, e.g. 256.")
    if rounding == "stochastic" and any(width == 1 for _, width in rules):
        raise UsageError(f'{what}: one bit is the sign and is not rounded. Use rounding="nearest", or 2 bits or more.')
    return Quantize(rules, block, rounding, seed)


def parity(turn: Turn) -> int:
    """Which zeros are encoded as positive with one bit: alternates with step and rank."""
    return (turn.step + turn.rank) % 2
