"""Announcing a collective, and agreeing on it: every rank compares what all ranks have announced before any byte moves.

Note [What may be written when]
Small slots and tables are used in turn, by the parity of the collective's number n, and are written before the announcement
of n is signaled. Their last use was n - 2, and no rank can still be reading that: this rank has finished n - 1, so it has seen
every rank's announcement of n - 1, which each makes after it has finished n - 2. Staging buffers are written only after
every rank's announcement of n was seen, which each makes after finishing n - 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from dataclasses import replace

from gradwire.collectives import Collective
from gradwire.collectives.matching import comparable, decode, encode, mismatch
from gradwire.errors import CollectiveMismatch
from gradwire.groups.shared_memory.board import DIGEST, Board
from gradwire.groups.shared_memory.views import CACHED, Cache, Views

Steps = Generator[int, None, None]
"""Yields how many signals every rank must have given before it goes on."""


class Agreement:
    """What one rank announces, and how it compares that with the announcements of the others."""

    def __init__(self, name: str, board: Board, views: Views) -> None:
        self.name = name
        self.board = board
        self._memory = views.memory
        self._digests: Cache[tuple[object, ...], bytes] = Cache(CACHED)

    def digest(self, op: Collective) -> bytes:
        """What ranks compare, in 16 bytes. Labels are for people; ranks may choose them differently."""
        key = (op.kind, op.reduce_op, op.root, *[(t.shape, t.dtype, t.is_sparse) for t in op.tensors])
        known = self._digests.get(key)
        if known is None:
            described = repr((comparable(replace(op.signature, label="")), any(t.is_sparse for t in op.tensors)))
            known = self._digests.keep(key, hashlib.blake2b(described.encode(), digest_size=DIGEST).digest())
        return known

    def announce(self, digest: bytes, parts: list[tuple[int, int]] | None, *, hold: bool = False) -> int:
        """Announce the next collective and signal; returns the number of signals that every rank must have given by then."""
        board = self.board
        board.announce(board.turn, digest)
        if parts is not None:
            board.write_table(board.turn, parts, hold=hold)
        return board.signal()

    def check(self, op: Collective, digest: bytes) -> Steps:
        """All ranks have announced: raise unless it is the same collective."""
        if not self.board.agreed(self.board.turn, digest * self.board.size):
            yield from self.compare(op)

    def compare(self, op: Collective) -> Steps:
        """Ranks have announced different collectives: exchange their descriptions, and raise."""
        board, memory, plan = self.board, self._memory, self.board.plan
        described = encode(op.signature, limit=plan.chunk - 8)
        described = len(described).to_bytes(8, "little") + described
        offset = plan.buffer(board.rank, 0)
        memory[offset : offset + len(described)] = described
        yield board.signal()
        signatures = []
        for rank in range(board.size):
            offset = plan.buffer(rank, 0)
            length = int.from_bytes(memory[offset : offset + 8], "little")
            signatures.append(decode(bytes(memory[offset + 8 : offset + 8 + length]), rank=rank))
        error = mismatch(self.name, signatures, compared=[replace(s, label="") for s in signatures])
        raise error or CollectiveMismatch(
            f"{op} of {self.name}: some ranks bring sparse tensors, others dense ones. Use the same on all ranks.",
            ops=dict(enumerate(signatures)),
        )


class AnnouncedPrograms:
    """What programs that begin with an announcement work on, on one rank of one group."""

    def __init__(self, board: Board, views: Views, agreement: Agreement) -> None:
        self.board = board
        self.rank = board.rank
        self.size = board.size
        self._plan = board.plan
        self._views = views
        self._agreement = agreement
