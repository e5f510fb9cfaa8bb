"""Loops over numpy arrays, compiled by numba if it is installed (the extra `gradwire[jit]`); and whether Triton is available.

Without numba the caller takes a slower path, which must give the same bits. A loop is compiled at its first call for the types of
its arguments, and runs without the interpreter lock, on one thread, and without fast-math: sums keep their order, NaN stays NaN.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import IO, Any

_PATIENCE = 10.0
"""Seconds for which a process waits until another one has compiled."""


@functools.cache
def _njit() -> Callable[..., Any] | None:
    """numba's decorator; None where numba is missing, is incompatible with the other libraries, or has compilation disabled."""
    try:
        numba: Any = importlib.import_module("numba")
    except ImportError:  # also where it was built for another numpy
        return None
    njit: Callable[..., Any] = numba.njit
    return None if numba.config.DISABLE_JIT else njit


def compiler() -> str | None:
    """The compiler of loops and its version, or None if there is none. Imports it, which takes about a second."""
    return None if _njit() is None else f"numba {metadata.version('numba')}"


@functools.cache
def kernels(module: str) -> Any | None:
    """The module of that name, which holds Triton kernels; None where Triton is not installed."""
    return None if importlib.util.find_spec("triton") is None else importlib.import_module(module)


@contextlib.contextmanager
def compiled_once() -> Iterator[None]:
    """Around the first call of a loop that all ranks need: the first process compiles it, and the others, which would take as much
    of the cores each, wait until they can load it from numba's cache."""
    deadline = time.monotonic() + _PATIENCE
    with open(__file__) as file:
        if not _lock(file, fcntl.LOCK_EX):
            while not _lock(file, fcntl.LOCK_SH) and time.monotonic() < deadline:
                time.sleep(0.005)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file open, too


def _lock(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class loop:
    """Decorator: a Python function over numpy arrays and numbers, to be compiled.

    >>> @loop
    ... def total(x):
    ...     sum = x[0]
    ...     for i in range(1, len(x)):
    ...         sum += x[i]
    ...     return sum
    >>> import numpy as np
    >>> fast = total.compiled()
    >>> float(fast(np.ones(3)) if fast else np.ones(3).sum())
    3.0
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._compiled: Callable[..., Any] | None = None
        self.__doc__ = function.__doc__

    def compiled(self) -> Callable[..., Any] | None:
        """The compiled function, or None where there is no numba."""
        if self._compiled is None and (njit := _njit()) is not None:
            options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
            try:
                self._compiled = njit(self._function, cache=True, **options)
            except RuntimeError:  # no writable cache folder
                self._compiled = njit(self._function, **options)
        return self._compiled
