"""Groups and `os.fork`: a group belongs to the process that made it.

A forked child has a copy of every group and none of their threads. At exit it would mark the rank as left, in memory or a store
that the other ranks read, although its parent has not left. So finalizers and `close()` do nothing in a child, and every other use
of the group raises UsageError. A child that needs to communicate makes a group of its own, preferably in a spawned process.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Any

from gradwire.errors import UsageError


def finalize_here(owner: object, fn: Callable[..., object], *args: Any) -> weakref.finalize[..., Any]:
    """Like `weakref.finalize(owner, fn, *args)`, but a no-op in processes forked from this one."""
    return weakref.finalize(owner, _if_in, os.getpid(), fn, *args)


def _if_in(pid: int, fn: Callable[..., object], *args: Any) -> None:
    if os.getpid() == pid:
        fn(*args)


def leak_in_child(owner: object, engines: list[Any]) -> None:
    """Never destroy `engines` in forked children: a C++ destructor joins threads that a child does not have."""
    pid = os.getpid()
    weakref.finalize(owner, lambda: None if os.getpid() == pid else leak([*engines]))


def leak(value: object) -> None:
    """Never free `value`."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def refuse_in_child(pid: int, *what: object) -> None:
    """Raise UsageError for `what`, the words of a sentence, in a child of the process `pid`, which made the group."""
    if os.getpid() != pid:
        raise UsageError(
            f"{' '.join(map(str, what))}: process {os.getpid()} was forked from process {pid}, which made the group. A group "
            'cannot be used in a forked child. Make a new group there, or start the child with multiprocessing\'s "spawn".'
        )
