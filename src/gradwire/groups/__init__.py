"""Groups: who takes part and how bytes move."""

from gradwire.groups.base import Group
from gradwire.groups.c10d import C10dGroup
from gradwire.groups.checked import NanCheck, Verified
from gradwire.groups.hierarchical import HierarchicalGroup
from gradwire.groups.mpi import MPIGroup
from gradwire.groups.shared_memory import SharedMemoryGroup
from gradwire.groups.threads import ThreadGroup
from gradwire.groups.work import Work, WorkInfo
from gradwire.groups.wrapper import BookedWrapper, GroupWrapper, ProgramWrapper
from gradwire.groups.wrappers import Deadline, Latched, Recording

__all__ = [
    "BookedWrapper",
    "C10dGroup",
    "Deadline",
    "Group",
    "GroupWrapper",
    "HierarchicalGroup",
    "Latched",
    "MPIGroup",
    "NanCheck",
    "ProgramWrapper",
    "Recording",
    "SharedMemoryGroup",
    "ThreadGroup",
    "Verified",
    "Work",
    "WorkInfo",
]
