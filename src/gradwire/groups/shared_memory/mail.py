"""Sends and receives: letters in mailboxes.

Each pair of ranks has a mailbox of `SLOTS` slots in the segment. A sender puts the letter's head into a free slot (number, tag,
dtype, size, and where in its heap the bytes lie) and numbers it last; the receiver copies the bytes out and acknowledges. A
send is over when it is acknowledged, as MPI's synchronous mode. Letters of one sender with one tag are taken in order; a
receive from anybody looks at the ranks in turn, beginning behind the one that was served last. More letters than slots wait
with the sender.

A sender that gives up takes its letter back by marking it; the bytes stay where they are until the receiver has acknowledged,
or the group ends, because it may be reading them at that moment.
"""

from __future__ import annotations

import struct
import zlib
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from gradwire.collectives import OpKind
from gradwire.collectives.lower import is_plain
from gradwire.collectives.reference import store
from gradwire.errors import CollectiveMismatch, GroupError
from gradwire.groups.shared_memory.board import SLOT, SLOTS, Board
from gradwire.groups.shared_memory.heap import Heap
from gradwire.groups.shared_memory.segment import Segment
from gradwire.groups.shared_memory.views import Views
from gradwire.groups.work import Work

_HEAD = struct.Struct("<qQQQ")  # tag, dtype, elements, offset; after the number
_NUMBER, _HEAD_AT, _ACK, _TAKEN_BACK = 0, 8, 40, 48
_GOOD, _UNFIT, _BROKEN = range(3)
_ANSWERS = 4  # an acknowledgement is the letter's number, times this, plus one of these


def _code(dtype: torch.dtype) -> int:
    return zlib.crc32(str(dtype).encode())


class Letter(ABC):
    """A send or receive on its way."""

    def __init__(self, work: Work, peers: list[int]) -> None:
        """`peers` are the ranks that it may go to or come from."""
        self.work = work
        self.peers = peers
        self.over = False

    def step(self) -> bool:
        """Get on with it, unless it is over. What goes wrong is this letter's affair: nothing is raised."""
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

    @abstractmethod
    def _step(self) -> bool:
        """Try; True if anything changed."""


class Post:
    """One rank's mailboxes. Used by the thread that drives the group only."""

    def __init__(self, segment: Segment, board: Board, heap: Heap, views: Views) -> None:
        self.board = board
        self.heap = heap
        self.views = views
        self.rank, self.size = board.rank, board.size
        self._memory = segment.memory
        self._words = segment.view[: segment.nbytes // 8 * 8].cast("Q")
        self._sent = 0
        self._free = {
            peer: [board.plan.mailbox(self.rank, peer) + i * SLOT for i in range(SLOTS)] for peer in range(self.size)
        }
        self._inbox = {
            peer: [board.plan.mailbox(peer, self.rank) + i * SLOT for i in range(SLOTS)] for peer in range(self.size)
        }
        self.served = self.rank
        self._left_lying: list[tuple[int, int, int, Tensor]] = []
        self._receiving: list[Receiving] = []

    def letter(self, work: Work) -> Letter:
        """A new one."""
        if work.op.kind is OpKind.SEND:
            return Sending(work, self)
        receiving = Receiving(work, self)
        self._receiving.append(receiving)
        return receiving

    # -- a sender's side -----------------------------------------------------------------------------------------------

    def put(self, peer: int, tag: int, t: Tensor) -> tuple[int, int, Tensor] | None:
        """Put a letter into a slot: (slot, number, where the bytes lie); None while all slots are taken."""
        free = self._free[peer]
        if not free:
            self._tidy()
            if not free:
                return None
        offset = self.views.offset_in_heap(t) if is_plain(t) else -1
        if offset < 0:
            copy = self.heap.tensor(t.numel(), t.dtype)  # there may be no room for it: so before a slot is taken
            store(copy.view(t.shape), t.detach())
            offset, t = max(0, self.views.offset_in_heap(copy)), copy  # an empty tensor lies nowhere
        slot = free.pop()
        self._sent += 1
        _HEAD.pack_into(self._memory, slot + _HEAD_AT, tag, _code(t.dtype), t.numel(), offset)
        self._words[(slot + _TAKEN_BACK) // 8] = 0
        self._publish(slot + _NUMBER, self._sent, peer)
        return slot, self._sent, t

    def answer(self, slot: int, number: int) -> int | None:
        """What the receiver has said to letter `number`; None if nothing yet."""
        answered, status = divmod(self._words[(slot + _ACK) // 8], _ANSWERS)
        return status if answered == number else None

    def release(self, peer: int, slot: int) -> None:
        """The slot can be used again."""
        self._words[(slot + _NUMBER) // 8] = 0
        self._free[peer].append(slot)

    def take_back(self, peer: int, slot: int, number: int, t: Tensor) -> None:
        """The sender has given up."""
        self._publish(slot + _TAKEN_BACK, 1, peer)
        self._left_lying.append((peer, slot, number, t))

    def _tidy(self) -> None:
        for entry in list(self._left_lying):
            peer, slot, number, _ = entry
            if self.answer(slot, number) is not None:
                self._left_lying.remove(entry)
                self.release(peer, slot)

    # -- a receiver's side ---------------------------------------------------------------------------------------------

    def turn_of(self, peer: int) -> int:
        """For receives from anybody: whoever comes after the rank that was served last is first."""
        return (peer - self.served - 1) % self.size

    def claimed_before(self, receiving: Receiving) -> set[int]:
        """Ranks whose next letter with that tag belongs to a receive that was submitted earlier."""
        claimed: set[int] = set()
        wanted = set(receiving.peers)
        while self._receiving and self._receiving[0].over:
            del self._receiving[0]
        for letter in self._receiving:
            if letter is receiving or wanted <= claimed:
                break
            if not letter.over and letter.work.op.tag == receiving.work.op.tag:
                claimed.update(letter.peers)
        return claimed

    def find(self, peer: int, tag: int) -> tuple[int, int] | None:
        """The oldest letter from `peer` with this tag: (slot, number).

        While the slots are looked through, an older letter may come into one that was looked at before a younger one comes
        into one that was not. A sender posts in order, so whoever has seen the younger one finds the older one at a second look.
        """
        return None if self._oldest(peer, tag) is None else self._oldest(peer, tag)

    def _oldest(self, peer: int, tag: int) -> tuple[int, int] | None:
        words = self._words
        found: tuple[int, int] | None = None
        for slot in self._inbox[peer]:
            number = words[slot // 8]
            if not number or words[(slot + _ACK) // 8] // _ANSWERS == number:
                continue
            self.board.fence()  # what else the slot holds was written before its number; it must be read after it, too
            if words[(slot + _TAKEN_BACK) // 8]:
                self.acknowledge(peer, slot, number, _UNFIT)  # so that the sender can use the slot again
                continue
            if (found is None or number < found[1]) and _HEAD.unpack_from(self._memory, slot + _HEAD_AT)[0] == tag:
                found = slot, number
        return found

    def read(self, slot: int) -> tuple[int, int, int]:
        """A letter's (dtype, elements, offset)."""
        _, dtype, numel, offset = _HEAD.unpack_from(self._memory, slot + _HEAD_AT)
        return dtype, numel, offset

    def acknowledge(self, peer: int, slot: int, number: int, status: int) -> None:
        """Tell the sender."""
        self._publish(slot + _ACK, _ANSWERS * number + status, peer)

    def _publish(self, offset: int, value: int, peer: int) -> None:
        fence = self.board.fence
        fence()
        self._words[offset // 8] = value
        fence()
        self.board.bell.ring_one(peer)

    def start_over(self) -> None:
        """All ranks have met after a failure: what is in the boxes that this rank writes is gone."""
        self._left_lying.clear()
        self._receiving.clear()
        self.heap.let_go()
        for peer in range(self.size):
            outgoing = [self.board.plan.mailbox(self.rank, peer) + i * SLOT for i in range(SLOTS)]
            for slot in outgoing:
                self._words[slot // 8] = 0
            self._free[peer] = outgoing


class Sending(Letter):
    """A send."""

    def __init__(self, work: Work, post: Post) -> None:
        assert work.op.peer is not None
        super().__init__(work, [work.op.peer])
        self._post = post
        self._put: tuple[int, int, Tensor] | None = None

    def _step(self) -> bool:
        """Put the letter into a slot, then look for the answer."""
        work, post, (peer,) = self.work, self._post, self.peers
        if self._put is None:
            if work.is_completed():
                self.over = True
                return True
            self._put = post.put(peer, work.op.tag, work.op.inputs[0])
            return self._put is not None
        slot, number, t = self._put
        status = post.answer(slot, number)
        if status is None:
            if work.is_completed():
                post.take_back(peer, slot, number, t)
                self.over = True
            return self.over
        post.release(peer, slot)
        self.over = True
        if status == _GOOD:
            work.finish()
        elif status == _UNFIT:
            work.fail(_unfit(work, f"rank {peer} receives another dtype or number of elements"))
        else:
            work.fail(
                GroupError(
                    f"{work.op} of {work.ledger.name} on rank {work.ledger.rank}: rank {peer} could not write what was sent "
                    "where it was to be received. Look at its error."
                )
            )
        return True


class Receiving(Letter):
    """A receive, from one rank or from anybody."""

    def __init__(self, work: Work, post: Post) -> None:
        peer = work.op.peer
        super().__init__(work, [r for r in range(post.size) if r != post.rank] if peer is None else [peer])
        self._post = post

    def _step(self) -> bool:
        """Look for a letter that fits."""
        work, post = self.work, self._post
        if work.is_completed():
            self.over = True
            return True
        claimed = post.claimed_before(self)
        for peer in sorted(self.peers, key=post.turn_of):
            found = None if peer in claimed else post.find(peer, work.op.tag)
            if found is not None:
                self._take(peer, *found)
                return True
        return False

    def _take(self, peer: int, slot: int, number: int) -> None:
        work, post = self.work, self._post
        dtype, numel, offset = post.read(slot)
        place = work.op.outputs[0]
        self.over = True
        post.served = peer
        if dtype == _code(place.dtype) and numel == place.numel():
            try:
                store(place.detach(), post.views.tensor(offset, place.nbytes, place.dtype))
            except BaseException:
                post.acknowledge(peer, slot, number, _BROKEN)
                raise
            post.acknowledge(peer, slot, number, _GOOD)
            work.finish(source_rank=peer)
        else:
            post.acknowledge(peer, slot, number, _UNFIT)
            kind = "" if numel != place.numel() else " of another dtype"
            work.fail(_unfit(work, f"rank {peer} sends {numel} elements{kind}"))


def _unfit(work: Work, what: str) -> CollectiveMismatch:
    return CollectiveMismatch(
        f"{work.op} of {work.ledger.name} on rank {work.ledger.rank}: {what}. "
        "Both sides need the same dtype and number of elements.",
        ops={work.ledger.rank: work.op.signature},
    )
