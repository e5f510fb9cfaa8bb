"""Imported by the fork server, first: its children end without taking torch apart.

At exit, Python clears every module and torch's libraries deregister every operator, in Python and in C++: with the pages that are
copied for it, half a second of CPU time, more than most children need for all else. Exit handlers, the exit status and what becomes
of `__main__` are as in any process. Tests of how a process ends set WHOLE_EXIT.
"""

import atexit
import ctypes
import os
import sys
import weakref

from helpers.fork_client import WHOLE_EXIT


@atexit.register  # before all others, so that it runs after them
def _keep_modules() -> None:
    if WHOLE_EXIT in os.environ:
        return
    kept = {name: module for name, module in sys.modules.items() if name not in ("__main__", "builtins", "sys")}
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    sys.modules.update(dict.fromkeys(kept))  # None, as Python itself sets it: nothing is imported a second time
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # is called with the exit status, before what was registered earlier


def _keep_operators() -> None:
    if WHOLE_EXIT not in os.environ:
        for info in weakref.finalize._registry.values():  # type: ignore[attr-defined]
            info.atexit = info.atexit and not info.func.__module__.startswith("torch.")


# After all others, so that it runs before them.
os.register_at_fork(after_in_child=lambda: atexit.register(_keep_operators))
