"""Groups: who takes part and how bytes move."""

from gradwire.groups.base import Group, GroupWrapper
from gradwire.groups.threads import ThreadGroup
from gradwire.groups.work import Work, WorkInfo

__all__ = ["Group", "GroupWrapper", "ThreadGroup", "Work", "WorkInfo"]
