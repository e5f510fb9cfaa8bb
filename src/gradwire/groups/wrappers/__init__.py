"""Groups around groups. They nest: `Latched(Deadline(group, seconds=30))`."""

from gradwire.groups.wrappers.base import GroupWrapper, TrackedWrapper
from gradwire.groups.wrappers.checking import NanCheck, Verified
from gradwire.groups.wrappers.pass_through import Deadline, Latched, Recording

__all__ = ["Deadline", "GroupWrapper", "Latched", "NanCheck", "Recording", "TrackedWrapper", "Verified"]
