"""Engines' errors in gradwire's words: one table from what c10d's engines say to what it means."""

from __future__ import annotations

import re

from gradwire.errors import CollectiveTimeout, GradwireError, GroupError, PeerLost
from gradwire.groups.membership import Membership
from gradwire.groups.work import Work

_TIMED_OUT = re.compile(r"timed? ?out waiting|operation timed out|watchdog.*timeout|connect timeout", re.IGNORECASE)
_PEER_GONE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by peer|reset by peer|broken pipe|socket (closed|error)|"
    r"pair closure|remote process|nccl.*(remote|system) error|connection.*lost",
    re.IGNORECASE,
)


def translate(error: BaseException, work: Work, engine: str, membership: Membership | None) -> BaseException:
    """The gradwire error for what `engine` raised during `work`, with the original as its cause."""
    if isinstance(error, GradwireError) and not isinstance(error, CollectiveTimeout):
        return error
    said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    where = work.ledger.where(work)
    translated: GroupError
    if isinstance(
        error, CollectiveTimeout
    ):  # of a gradwire group under torch's names: it knows the operation by another label
        translated = CollectiveTimeout(
            f"{where}: {engine} ran out of time. It said: {error}",
            op=work.op.signature,
            joined=error.joined,
            missing=error.missing,
        )
    elif _PEER_GONE.search(said):
        rank, why = (None, "a peer is gone") if membership is None else membership.find_culprit(membership.joined)
        translated = PeerLost(
            f"{where}: {why}. Look at that rank's own output for the cause; this group cannot be used any more. "
            f"{engine} said: {said}",
            rank=rank,
            op=work.op.signature,
        )
    elif _TIMED_OUT.search(said):
        known = work.ledger.timed_out(work, work.timeout)
        translated = CollectiveTimeout(
            f"{known} {engine} said: {said}", op=known.op, joined=known.joined, missing=known.missing
        )
    else:
        translated = GroupError(f"{where}: {engine} failed. It said: {said}")
    # Frames of a traceback hold the engine's Work, and with it the engine's connections.
    error.__context__ = None
    translated.__cause__ = error.with_traceback(None)
    return translated
