"""Sends and receives: point-to-point messages through slots in the segment.

Each ordered pair of ranks has `SLOTS` slots. A sender writes a message's header into a free slot (tag, dtype, size, and where in
its heap the bytes lie) and its number last; the receiver copies the bytes out and acknowledges. A send is over when it is
acknowledged, as in MPI's synchronous mode. Messages of one sender with one tag are taken in order; a receive from any rank
checks the ranks in turn, beginning after the one that was served last. A sender that gives up marks its message as withdrawn; the
bytes stay where they are until the receiver, which may be reading them at that moment, has acknowledged, or the group ends.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.collectives import OpKind
from gradwire.collectives.aliasing import is_plain
from gradwire.collectives.reference import store
from gradwire.errors import CollectiveMismatch
from gradwire.groups.shared_memory.board import SLOT, SLOTS, Board
from gradwire.groups.shared_memory.heap import Heap
from gradwire.groups.work import Work

_HEAD = struct.Struct("<qQQQ")  # tag, dtype, elements, offset; after the number
_NUMBER, _HEAD_AT, _ACK, _WITHDRAWN = 0, 8, 40, 48
# An acknowledgment is the message's number times the last, plus one of the first two.
_OK, _REFUSED, _ANSWERS = range(3)
_BYTES_PER_CHECK = 4096


def _code(dtype: torch.dtype) -> int:
    return zlib.crc32(str(dtype).encode())


class MailboxMessage:
    """A send or receive under way. `peers` are the ranks that it may go to or come from."""

    def __init__(self, work: Work, mailbox: Mailbox, peers: list[int]) -> None:
        self.work = work
        self.mailbox = mailbox
        self.peers = peers
        self.over = False
        self.checks = 1 + work.op.nbytes // _BYTES_PER_CHECK
        """About how many checks go by while its bytes are copied."""

    def step(self) -> bool:
        """Make progress, unless it is over. An error fails this operation alone: nothing is raised."""
        if self.over:
            return False
        try:
            return self._step()
        except Exception as error:
            self.over = True
            self.work.fail(error)
            return True

    def is_stranded(self, rank: int, left: list[int]) -> bool:
        """Whether `rank`, one of the ranks that have left, was the last that it could go to or come from."""
        return not self.over and rank in self.peers and all(peer in left for peer in self.peers)

    def _step(self) -> bool:
        raise NotImplementedError


def checks_per_round(messages: Sequence[MailboxMessage], *, alone: bool) -> int:
    """For how many checks a look at all messages counts: more if all are large, and no collective is under way."""
    return len(messages) * (min(message.checks for message in messages) if alone else 1) if messages else 1


class Mailbox:
    """The message slots that one rank reads and writes. Used only by the thread that drives the group."""

    def __init__(self, board: Board, heap: Heap) -> None:
        self.board = board
        self.heap = heap
        self.rank, self.size = board.rank, board.size
        self._memory = board.memory
        self._words = memoryview(board.memory)[: board.plan.heaps].cast("Q")
        self._sent = 0
        self._free = {peer: self._slots(self.rank, peer) for peer in range(self.size)}
        self._inbox = {peer: self._slots(peer, self.rank) for peer in range(self.size)}
        self.served = self.rank
        self._withdrawn: list[tuple[int, int, int, Tensor]] = []
        self._receiving: list[PendingReceive] = []

    def _slots(self, sender: int, receiver: int) -> list[int]:
        first = self.board.plan.slots(sender, receiver)
        return [first + i * SLOT for i in range(SLOTS)]

    def message(self, work: Work) -> MailboxMessage:
        peers = [rank for rank in range(self.size) if rank != self.rank] if work.op.peer is None else [work.op.peer]
        if work.op.kind is OpKind.SEND:
            return PendingSend(work, self, peers)
        self._receiving.append(PendingReceive(work, self, peers))
        return self._receiving[-1]

    def put(self, peer: int, tag: int, t: Tensor) -> tuple[int, int, Tensor] | None:
        """Put a message into a slot: (slot, number, where the bytes lie); None while all slots are taken."""
        free = self._free[peer]
        for entry in [] if free else list(self._withdrawn):
            to, slot, number, _ = entry
            if self.acknowledged(slot, number) is not None:
                self._withdrawn.remove(entry)
                self.release(to, slot)
        if not free:
            return None
        offset = self.board.offset_in_heap(t.data_ptr()) if is_plain(t) else -1
        if offset < 0:
            copy = self.heap.tensor(t.numel(), t.dtype)  # there may be no room for it: so before a slot is taken
            store(copy.view(t.shape), t.detach())
            offset, t = max(0, self.board.offset_in_heap(copy.data_ptr())), copy  # an empty tensor lies nowhere
        slot = free.pop()
        self._sent += 1
        _HEAD.pack_into(self._memory, slot + _HEAD_AT, tag, _code(t.dtype), t.numel(), offset)
        self._words[(slot + _WITHDRAWN) // 8] = 0
        self._publish(slot + _NUMBER, self._sent, peer)
        return slot, self._sent, t

    def acknowledged(self, slot: int, number: int) -> int | None:
        """The status with which the receiver has acknowledged message `number`; None if it has not yet."""
        answered, status = divmod(self._words[(slot + _ACK) // 8], _ANSWERS)
        return status if answered == number else None

    def release(self, peer: int, slot: int) -> None:
        self._words[(slot + _NUMBER) // 8] = 0
        self._free[peer].append(slot)

    def withdraw(self, peer: int, slot: int, number: int, t: Tensor) -> None:
        self._publish(slot + _WITHDRAWN, 1, peer)
        self._withdrawn.append((peer, slot, number, t))

    def claimed_before(self, receiving: PendingReceive) -> set[int]:
        """Ranks whose next message with that tag belongs to a receive that was submitted earlier."""
        claimed: set[int] = set()
        wanted = set(receiving.peers)
        while self._receiving and self._receiving[0].over:
            del self._receiving[0]
        for message in self._receiving:
            if message is receiving or wanted <= claimed:
                break
            if not message.over and message.work.op.tag == receiving.work.op.tag:
                claimed.update(message.peers)
        return claimed

    def find(self, peer: int, tag: int) -> tuple[int, int] | None:
        """The oldest message from `peer` with this tag: (slot, number). While the slots are checked, an older one may arrive in one
        that was checked before, and then a younger one; so once one has been seen, a second scan finds the oldest."""
        return None if self._oldest(peer, tag) is None else self._oldest(peer, tag)

    def _oldest(self, peer: int, tag: int) -> tuple[int, int] | None:
        words = self._words
        found: tuple[int, int] | None = None
        for slot in self._inbox[peer]:
            number = words[slot // 8]
            if not number or words[(slot + _ACK) // 8] // _ANSWERS == number:
                continue
            self.board.fence()  # what else the slot holds was written before its number; it must be read after it, too
            if words[(slot + _WITHDRAWN) // 8]:
                self.acknowledge(peer, slot, number, _REFUSED)  # so that the sender can use the slot again
                continue
            if (found is None or number < found[1]) and _HEAD.unpack_from(self._memory, slot + _HEAD_AT)[0] == tag:
                found = slot, number
        return found

    def acknowledge(self, peer: int, slot: int, number: int, status: int) -> None:
        self._publish(slot + _ACK, _ANSWERS * number + status, peer)

    def _publish(self, offset: int, value: int, peer: int) -> None:
        fence = self.board.fence
        fence()
        self._words[offset // 8] = value
        fence()
        self.board.wait_queue.wake(peer)

    def start_over(self) -> None:
        """All ranks have met after a failure: drop what is in the slots that this rank writes."""
        self._withdrawn.clear()
        self._receiving.clear()
        self.heap.holds_back = False
        for peer in range(self.size):
            self._free[peer] = self._slots(self.rank, peer)
            for slot in self._free[peer]:
                self._words[slot // 8] = 0


class PendingSend(MailboxMessage):
    """A send: puts the message into a slot, then waits for the acknowledgment."""

    _put: tuple[int, int, Tensor] | None = None

    def _step(self) -> bool:
        work, mailbox, (peer,) = self.work, self.mailbox, self.peers
        if self._put is None:
            if work.is_completed():
                self.over = True
                return True
            self._put = mailbox.put(peer, work.op.tag, work.op.inputs[0])
            return self._put is not None
        slot, number, t = self._put
        status = mailbox.acknowledged(slot, number)
        if status is None:
            if work.is_completed():
                mailbox.withdraw(peer, slot, number, t)
                self.over = True
            return self.over
        mailbox.release(peer, slot)
        self.over = True
        if status == _OK:
            work.finish()
        else:
            work.fail(_mismatch(work, f"rank {peer} receives another dtype or number of elements, or see its error"))
        return True


class PendingReceive(MailboxMessage):
    """A receive, from one rank or from any: looks for a message with its tag."""

    def _step(self) -> bool:
        work, mailbox = self.work, self.mailbox
        if work.is_completed():
            self.over = True
            return True
        claimed = mailbox.claimed_before(self)
        for peer in sorted(self.peers, key=lambda peer: (peer - mailbox.served - 1) % mailbox.size):
            found = None if peer in claimed else mailbox.find(peer, work.op.tag)
            if found is not None:
                self._take(peer, *found)
                return True
        return False

    def _take(self, peer: int, slot: int, number: int) -> None:
        work, mailbox = self.work, self.mailbox
        _, dtype, numel, offset = _HEAD.unpack_from(mailbox.board.memory, slot + _HEAD_AT)
        place = work.op.outputs[0]
        self.over = True
        mailbox.served = peer
        if dtype == _code(place.dtype) and numel == place.numel():
            try:
                store(place.detach(), mailbox.board.tensor(offset, place.nbytes, place.dtype))
            except BaseException:
                mailbox.acknowledge(peer, slot, number, _REFUSED)
                raise
            mailbox.acknowledge(peer, slot, number, _OK)
            work.finish(source_rank=peer)
        else:
            mailbox.acknowledge(peer, slot, number, _REFUSED)
            kind = "" if numel != place.numel() else " of another dtype"
            work.fail(_mismatch(work, f"rank {peer} sends {numel} elements{kind}"))


def _mismatch(work: Work, what: str) -> CollectiveMismatch:
    text = f"{work.ledger.where(work)}: {what}. Both sides need the same dtype and number of elements."
    return CollectiveMismatch(text, ops={work.ledger.rank: work.op.signature})
