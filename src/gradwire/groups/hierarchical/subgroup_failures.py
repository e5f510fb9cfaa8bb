"""A part's error in terms of the whole: ranks of the whole group, and the operation that its caller knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from gradwire.errors import CollectiveMismatch, CollectiveTimeout, GroupAborted, GroupError, PeerLost
from gradwire.groups.failure.membership import Membership
from gradwire.groups.failure.monitor import find_culprit
from gradwire.groups.store.rendezvous import Rendezvous
from gradwire.groups.work import Work

G = TypeVar("G", bound=GroupError)


def in_terms_of_whole(
    error: Exception, members: Sequence[int], where: str, membership: Membership | None, place: int
) -> Exception:
    """The error for what was done at `where`, when a part of `members` has failed with `error`.

    The rank that fails first writes into the membership which rank is lost before it fails its parts. So a rank whose part was
    aborted reads it there, and all ranks name the same one.
    """
    if isinstance(error, CollectiveMismatch):
        ops = {members[r]: s for r, s in error.ops.items() if r < len(members)}
        return chained(CollectiveMismatch(f"{where}: {error}", ops=ops), error)
    if not isinstance(error, (PeerLost, GroupAborted)):
        return error
    rank, why = None, "a peer is gone"
    if isinstance(error, PeerLost) and error.rank is not None:
        rank, why = members[error.rank], str(error)
    elif membership is not None:
        rank, why = find_culprit(membership, place, patience=1.0 if isinstance(error, PeerLost) else 0.0)
    if rank is not None:
        text = f"{where}: rank {rank} is lost. Look at its output for the cause; make a new group to go on. What is known: {why}"
        return chained(PeerLost(text, rank=rank, op=error.op if isinstance(error, PeerLost) else None), error)
    if isinstance(error, GroupAborted):
        return chained(GroupAborted(f"{where}: the group was aborted: {error.reason}", reason=error.reason), error)
    return chained(PeerLost(f"{where}: {why}. {error}", op=error.op), error)


@contextmanager
def in_ranks_of_whole(members: Sequence[int], rendezvous: Rendezvous) -> Iterator[None]:
    """While a part of `members` is made: its errors about ranks in terms of the whole, which meets in `rendezvous`."""
    try:
        yield
    except PeerLost as error:
        if rendezvous.found(error) or error.rank is None:
            raise
        raise PeerLost(f"{rendezvous.who}: {error}", rank=members[error.rank]) from error
    except CollectiveTimeout as error:
        if rendezvous.found(error) or error.missing is None:
            raise
        missing = rendezvous.missing_of_all([members[rank] for rank in error.missing])
        joined = [rank for rank in range(rendezvous.size) if rank not in missing]
        raise rendezvous.absent(missing, joined) from error


def interrupted(work: Work, error: BaseException) -> GroupAborted:
    """The error for an operation that `error`, such as Ctrl-C, has broken off on this rank."""
    why = f"rank {work.ledger.rank} broke {work.op} off: {type(error).__name__}{f': {error}' if str(error) else ''}"
    where = work.ledger.where(work)
    return GroupAborted(f"{where}: {why}. Every rank can call recover() to go on.", reason=why)


def for_part(error: BaseException, members: Sequence[int], name: str) -> BaseException:
    """What to fail a part of `members` with, when the whole, called `name`, has failed with `error`."""
    if isinstance(error, PeerLost) and error.rank in members:
        return PeerLost(str(error), rank=members.index(error.rank), op=error.op)
    if isinstance(error, CollectiveTimeout):
        joined, missing = _numbers(error.joined, members), _numbers(error.missing, members)
        return CollectiveTimeout(str(error), op=error.op, joined=joined, missing=missing)
    if isinstance(error, GroupAborted):
        return error
    return GroupAborted(f"{name} has failed: {error}", reason=str(error))


def _numbers(ranks: Sequence[int] | None, members: Sequence[int]) -> tuple[int, ...] | None:
    """Ranks of the whole as ranks of the part of `members`, without those that are not in it."""
    return None if ranks is None else tuple(members.index(rank) for rank in ranks if rank in members)


def chained(error: G, cause: Exception) -> G:
    """`error` with its cause, but without the cause's traceback: its frames would keep the part, and so its memory, alive as
    long as the error. The message of the cause is kept."""
    error.__cause__ = cause.with_traceback(None)
    return error
