"""Groups: who takes part and how bytes move."""

from gradwire.groups.base import Group
from gradwire.groups.c10d import C10dGroup
from gradwire.groups.completion import WorkInfo
from gradwire.groups.hierarchical import HierarchicalGroup
from gradwire.groups.kinds import GroupKind, Ranks, known_kinds, register_kind
from gradwire.groups.mpi import MPIGroup
from gradwire.groups.shared_memory import SharedMemoryGroup
from gradwire.groups.threads_group import ThreadGroup
from gradwire.groups.work import Work
from gradwire.groups.wrappers import Deadline, GroupWrapper, Latched, NanCheck, Recording, TrackedWrapper, Verified

__all__ = [
    "C10dGroup",
    "Deadline",
    "Group",
    "GroupKind",
    "GroupWrapper",
    "HierarchicalGroup",
    "Latched",
    "MPIGroup",
    "NanCheck",
    "Ranks",
    "Recording",
    "SharedMemoryGroup",
    "ThreadGroup",
    "TrackedWrapper",
    "Verified",
    "Work",
    "WorkInfo",
    "known_kinds",
    "register_kind",
]
