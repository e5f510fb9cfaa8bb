"""`Verified` compares what ranks submit, `NanCheck` finds the rank that contributed NaN or infinity. Each adds a small collective
to every operation: debugging tools, not for production.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from gradwire.collectives import Collective, OpKind, all_gather, all_gather_into_tensor
from gradwire.collectives.finite import is_finite
from gradwire.collectives.lower import Program
from gradwire.collectives.matching import comparable, decode, encode, mismatch
from gradwire.errors import CollectiveMismatch, NonFiniteGradient, Origin
from gradwire.groups.work import Work
from gradwire.groups.wrappers.base import TrackedWrapper

_DIGEST_BYTES = 24


class Verified(TrackedWrapper):
    """All ranks compare kind, shape, dtype, reduction, root and label before an operation's bytes move.

    A mismatch raises CollectiveMismatch on every rank, with the ranks that disagree and what each submitted.
    On the wire: 32 bytes per rank and operation; full descriptions are sent only when they differ.
    """

    tells_mismatch = True

    def program(self, op: Collective) -> Program:
        signature = op.signature
        described = encode(signature)
        digest = hashlib.sha256(repr(comparable(signature)).encode()).digest()[:_DIGEST_BYTES]
        mine = _tensor(digest + len(described).to_bytes(8, "little"))
        gathered = torch.empty(self.size * mine.numel(), dtype=torch.uint8, device="cpu")
        yield all_gather_into_tensor(gathered, mine, label=f"verify {op.kind.value}")
        digests = [bytes(part.tolist()) for part in gathered.view(self.size, -1)]
        if any(d[:_DIGEST_BYTES] != digest for d in digests):
            lengths = [int.from_bytes(d[_DIGEST_BYTES:], "little") for d in digests]
            places = [torch.empty(n, dtype=torch.uint8, device="cpu") for n in lengths]
            yield all_gather(places, _tensor(described), label="compare signatures")
            signatures = [decode(bytes(place.tolist()), rank=rank) for rank, place in enumerate(places)]
            raise mismatch(self.name, signatures) or CollectiveMismatch(
                f"{op} of {self.name}: it differs between ranks, in a tensor beyond those that the description covers. "
                "All ranks must submit the same collectives in the same order.",
                ops=dict(enumerate(signatures)),
            )
        yield op


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class NanCheck(TrackedWrapper):
    """All ranks learn which rank contributed NaN or infinity, before it spreads to all results.

    Raises NonFiniteGradient on every rank, with the rank and the operation's label; also if the reduction of finite
    inputs is not finite. On the wire: one byte per rank and operation.
    """

    def submit(self, op: Collective) -> Work:
        """A send is checked on this rank only; collectives are checked on all ranks."""
        if op.kind is OpKind.SEND and not all(map(is_finite, op.inputs)):
            raise self._error(op, self.rank)
        return super().submit(op)

    def program(self, op: Collective) -> Program:
        contributes = op.root is None or op.kind not in (OpKind.BROADCAST, OpKind.SCATTER) or op.root == self.rank
        if op.tensors and (op.tensors[0].dtype.is_floating_point or op.tensors[0].dtype.is_complex):
            bad = contributes and not all(map(is_finite, op.inputs))
            flags = torch.empty(self.size, dtype=torch.uint8, device="cpu")
            yield all_gather_into_tensor(flags, torch.tensor([bad], dtype=torch.uint8, device="cpu"), label="finite?")
            culprits = flags.nonzero().flatten().tolist()
            if culprits:
                raise self._error(op, culprits[0], culprits)
        yield op
        sums = op.kind in (OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER, OpKind.REDUCE_SCATTER_TENSOR)
        if sums and not all(map(is_finite, op.outputs)):
            text = f"{op} of {self.name}: every rank's values were finite, but the result is not"
            text += ". Scale down before the reduction, or reduce in a wider dtype."
            raise NonFiniteGradient(text, parameter=op.label or None, origin=Origin.OVERFLOW)

    def _error(self, op: Collective, rank: int, ranks: list[int] | None = None) -> NonFiniteGradient:
        who = f"ranks {ranks}" if ranks and len(ranks) > 1 else f"rank {rank}"
        text = f"{op} of {self.name}: {who} contributed NaN or infinity. Check its batch, loss and learning rate."
        return NonFiniteGradient(text, rank=rank, parameter=op.label or None, origin=Origin.GRADIENT)
