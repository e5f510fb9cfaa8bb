"""`Verified`: ranks compare what they submit before bytes move. It adds a small collective to every operation: a debugging tool,
not for production.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from gradwire.collectives import Collective, all_gather, all_gather_into_tensor
from gradwire.collectives.lower import Program
from gradwire.collectives.matching import LIMIT, comparable, decode, encode, mismatch
from gradwire.errors import CollectiveMismatch, GroupError
from gradwire.groups.wrappers.base import TrackedWrapper

_DIGEST_BYTES = 24


class Verified(TrackedWrapper):
    """All ranks compare kind, shape, dtype, reduction, root and label before an operation's bytes move.

    A mismatch raises CollectiveMismatch on every rank, with the ranks that disagree and what each submitted.
    On the wire: 32 bytes per rank and operation; full descriptions are sent only when they differ.
    """

    tells_mismatch = True

    def program(self, op: Collective) -> Program:
        """Compare digests; on a difference exchange the descriptions and raise."""
        signature = op.signature
        described = encode(signature)
        digest = hashlib.sha256(repr(comparable(signature)).encode()).digest()[:_DIGEST_BYTES]
        mine = _tensor(digest + len(described).to_bytes(8, "little"))
        gathered = torch.empty(self.size * mine.numel(), dtype=torch.uint8, device="cpu")
        yield all_gather_into_tensor(gathered, mine, label=f"verify {op.kind.value}")
        digests = [bytes(part.tolist()) for part in gathered.view(self.size, -1)]
        if any(d[:_DIGEST_BYTES] != digest for d in digests):
            lengths = [int.from_bytes(d[_DIGEST_BYTES:], "little") for d in digests]
            if max(lengths) > LIMIT:
                raise GroupError(
                    f"{op} of {self.name}: rank {lengths.index(max(lengths))} announces a description of {max(lengths)} bytes, "
                    f"but the limit is {LIMIT}. Check that all ranks run the same version of gradwire."
                )
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
