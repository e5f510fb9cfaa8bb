"""Ranks as processes of one host that share memory."""

from gradwire.groups.shared_memory.group import SharedMemoryGroup as SharedMemoryGroup
