"""Translates c10d's errors into gradwire's, by patterns in their messages."""

from __future__ import annotations

import re

from gradwire.errors import CollectiveTimeout, GradwireError, GroupError, PeerLost
from gradwire.groups.failure.membership import Membership, find_culprit
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
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    where = work.ledger.where(work)
    translated: GroupError
    if isinstance(
        error, CollectiveTimeout
    ):  # from a gradwire group behind torch's API, which has another label for the operation
        translated = CollectiveTimeout(
            f"{where}: {engine} timed out: {error}",
            op=work.op.signature,
            joined=error.joined,
            missing=error.missing,
        )
    elif _PEER_GONE.search(text):
        rank, why = (None, "a peer is gone") if membership is None else find_culprit(membership, membership.joined)
        translated = PeerLost(
            f"{where}: {why}. Look at that rank's output for the cause; this group can no longer be used. "
            f"Error of {engine}: {text}",
            rank=rank,
            op=work.op.signature,
        )
    elif _TIMED_OUT.search(text):
        known = work.ledger.timed_out(work, work.timeout)
        translated = CollectiveTimeout(
            f"{known} Error of {engine}: {text}", op=known.op, joined=known.joined, missing=known.missing
        )
    else:
        translated = GroupError(f"{where}: {engine} failed: {text}")
    # The frames of a traceback hold the engine's Work, and with it the engine's connections.
    error.__context__ = None
    translated.__cause__ = error.with_traceback(None)
    return translated
