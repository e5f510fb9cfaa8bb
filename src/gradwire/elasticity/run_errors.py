"""Why a member of a run cannot go on, in words."""

from __future__ import annotations

import time

from gradwire.elasticity.machine import HubState, Member, View
from gradwire.errors import GroupError, ReplicasDiverged, TooFewMembers
from gradwire.runtime.warnings import warn_user

_FAILED = 5
"""After how many views that failed before they began a member warns, and waits before it tries the next."""
_PAUSE = 0.02


def nobody_has_the_state(me: str, last: View) -> TooFewMembers:
    return TooFewMembers(
        f"joining the run as {me}: its last members, {', '.join(last.members)}, have all ended, or are stopped, and nobody has the "
        f"state after step {last.step} or later. Begin again from a checkpoint: gw.elastic(state=...)."
    )


def too_few(member: Member, hub: HubState, seconds: float | None) -> TooFewMembers:
    """After a wait of so many seconds, or that has ended since this process is to end."""
    why = "until it was told to end" if seconds is None else f"for {seconds:.3g} s"
    silent = silent_members(member, hub)
    missing = f"waits for {', '.join(silent)}" if silent else f"fewer than {member.min_ranks} members are left"
    return TooFewMembers(
        f"change of members after step {member.step} on {member.me}: {missing}, {why}. Let processes join, or begin again from a "
        "checkpoint with fewer (min_ranks=)."
    )


def silent_members(member: Member, hub: HubState) -> list[str]:
    """Those that have not published their standing yet, and are not gone."""
    assert member.view is not None
    return [one for one in member.view.members if one not in hub.standings and one not in hub.gone]


def warn(member: Member, seconds: float) -> None:
    warn_user(
        f"{member.me}: fewer than {member.min_ranks} members are left after step {member.step}. Training waits for others to join, "
        f"for {seconds:.0f} s at most."
    )


def diverged(member: Member) -> ReplicasDiverged:
    return ReplicasDiverged(
        f"vote on step {member.step} in view {member.epoch}: members differ in parameters, buckets, hook, data set, update=, "
        "state=, or numbers of the optimizer, as those of a scheduler that is not stepped in update=, and this one is "
        f"{member.me}. Nothing was committed. Begin again from the last checkpoint."
    )


def pause_after(failed: int, me: str, why: GroupError | None, patience: float) -> None:
    """So many views in a row have failed before they began. A fault is over then; a lack of memory, say, is not."""
    if failed == _FAILED:
        warn_user(
            f"{me}: {failed} views in a row have failed before they began, the last one because of {type(why).__name__}: {why} "
            f"This is tried again for {patience:.3g} s."
        )
    time.sleep(min(1.0, _PAUSE * max(0, failed + 1 - _FAILED)))
