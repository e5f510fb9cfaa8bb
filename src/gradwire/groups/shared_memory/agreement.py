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
from gradwire.groups.shared_memory.board import CACHED, DIGEST, Board, Cache

Steps = Generator[int, None, None]
"""Yields how many signals every rank must have given before it goes on."""


class AnnouncedPrograms:
    """Programs of one rank of one group that begin with an announcement, and how ranks compare what they have announced."""

    def __init__(self, name: str, board: Board) -> None:
        self.name = name
        self.board = board
        self.rank = board.rank
        self.size = board.size
        self._plan = board.plan
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
        if not self.board.agreed(self.board.turn, digest * self.size):
            yield from self.compare(op)

    def compare(self, op: Collective) -> Steps:
        """Ranks have announced different collectives: exchange their descriptions, and raise."""
        memory, plan = self.board.memory, self._plan
        described = encode(op.signature, limit=plan.chunk - 8)
        described = len(described).to_bytes(8, "little") + described
        offset = plan.buffer(self.rank, 0)
        memory[offset : offset + len(described)] = described
        yield self.board.signal()
        signatures = []
        for rank in range(self.size):
            offset = plan.buffer(rank, 0)
            length = int.from_bytes(memory[offset : offset + 8], "little")
            signatures.append(decode(bytes(memory[offset + 8 : offset + 8 + length]), rank=rank))
        error = mismatch(self.name, signatures, compared=[replace(s, label="") for s in signatures])
        raise error or CollectiveMismatch(
            f"{op} of {self.name}: some ranks bring sparse tensors, others dense ones. Use the same on all ranks.",
            ops=dict(enumerate(signatures)),
        )

    def counted(self, steps: Steps) -> Steps:
        """`steps`, which carry out one collective: it counts as done however they end."""
        turn = self.board.turn
        try:
            yield from steps
        finally:
            self.board.turn = turn + 1
