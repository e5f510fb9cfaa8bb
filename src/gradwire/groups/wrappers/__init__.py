"""Groups around groups. They nest: `Latched(Deadline(group, seconds=30))`."""

from gradwire.groups.wrappers.base import GroupWrapper, TrackedWrapper
from gradwire.groups.wrappers.deadline import Deadline
from gradwire.groups.wrappers.latched import Latched
from gradwire.groups.wrappers.nan_check import NanCheck
from gradwire.groups.wrappers.recording import Recording
from gradwire.groups.wrappers.verified import Verified

__all__ = ["Deadline", "GroupWrapper", "Latched", "NanCheck", "Recording", "TrackedWrapper", "Verified"]
