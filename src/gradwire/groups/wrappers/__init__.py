"""Groups around groups. They nest: `Latched(Deadline(group, seconds=30))`."""

from gradwire.groups.wrappers.base import Deadline, GroupWrapper, Latched, Recording, TrackedWrapper
from gradwire.groups.wrappers.checking import NanCheck, Verified

__all__ = ["Deadline", "GroupWrapper", "Latched", "NanCheck", "Recording", "TrackedWrapper", "Verified"]
