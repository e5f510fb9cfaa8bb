"""`Leftovers`: what a piece of code left running or open: threads, child processes, sockets, shared memory, descriptors.

A snapshot is taken before and compared after; only differences count. What is *not* a leftover:

- a `threading._DummyThread`: a thread that C++ started (autograd, gloo) and that once ran Python code;
- the process and the pipe of `multiprocessing`'s resource tracker, which Python keeps;
- names in /dev/shm that another user made, or that a process outside our process group holds;
- descriptors, if the process has started to use CUDA since the snapshot; /dev/nvidia* and, with these, eventfds, if it did before;
- what a `Keeper` passed to `snapshot` owns: the warm pool's workers and their sockets.

What torch opens once per process and never closes is opened early by `prime()`, and so is in every snapshot. Needs Linux's /proc.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from gradwire.groups.store.rendezvous import host_store
from gradwire.runtime.host import process_start

_SHM = "/dev/shm"
_POLL = 0.01
"""Seconds between polls: a closing descriptor cannot be waited on; a thread can, and is."""


class Keeper(Protocol):
    """Something that outlives the checked code, and knows what it owns."""

    def keeps_process(self, pid: int) -> bool:
        """Whether this child process belongs to the keeper."""

    def keeps_descriptor(self, fd: int) -> bool:
        """Whether this open descriptor belongs to the keeper."""


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What was running and open at one moment.

    >>> before = Leftovers.snapshot()
    >>> pipe = os.pipe()
    >>> [line.split(":")[0].rstrip(" 0123456789") for line in before.compare(grace=0)]
    ['file descriptor', 'file descriptor']
    >>> for end in pipe:
    ...     os.close(end)
    >>> before.compare()
    []
    """

    threads: frozenset[threading.Thread]
    processes: frozenset[int]
    descriptors: Mapping[int, str]
    shm: frozenset[str]
    keepers: tuple[Keeper, ...] = ()

    @classmethod
    def snapshot(cls, *keepers: Keeper) -> Leftovers:
        """What is running and open now. What `keepers` own is never a leftover, whenever they acquired it."""
        threads, processes = frozenset(threading.enumerate()), frozenset(_children())
        return cls(threads, processes, open_descriptors(), frozenset(_shm()), keepers)

    def compare(self, *, grace: float = 2.0) -> list[str]:
        """One line for each thing that exists now and did not then; empty if clean.

        What is about to end is not a leak: it gets up to `grace` seconds, and unreachable objects are collected first.
        """
        # The young generation first: a full collection takes a tenth of a second once torch is loaded.
        for generation in (1, 2):
            if not any(True for _ in self._new()):
                return []
            gc.collect(generation)
        deadline = time.monotonic() + grace
        while (left := list(self._new())) and (remaining := deadline - time.monotonic()) > 0:
            thread = next((t for t in self._new_threads() if t is not threading.current_thread()), None)
            if thread is not None:
                thread.join(remaining)
            else:
                time.sleep(_POLL)
            gc.collect()  # what a thread has used until now may be in a cycle: a mapping that keeps its descriptor open
        return left

    def _new_threads(self) -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t not in self.threads and not isinstance(t, threading._DummyThread)]

    def _new(self) -> Iterator[str]:
        for thread in self._new_threads():
            yield f"thread {thread.name!r}{' (daemon)' if thread.daemon else ''}"
        tracker = _resource_tracker()
        for pid in _children():
            if pid not in self.processes and pid != tracker[0] and not any(k.keeps_process(pid) for k in self.keepers):
                yield f"process {pid}: {_command(pid)}"
        new = {fd: target for fd, target in open_descriptors().items() if self.descriptors.get(fd) != target}
        for fd, target in _without_drivers(new, had_cuda=any(map(_is_drivers, self.descriptors.values()))).items():
            if fd != tracker[1] and not any(k.keeps_descriptor(fd) for k in self.keepers):
                yield _describe(fd, target)
        for name in _shm():
            if name not in self.shm and not _held_elsewhere(name):
                yield f"shared memory {_SHM}/{name}"


def prime() -> None:
    """Make torch open now what it opens once per process and never closes, so that it is in every snapshot.

    libuv, under the first TCPStore that a process hosts, makes a pipe for signals that lives as long as the process. oneDNN, which
    compiles some matrix products on some machines, keeps a list of what it compiled for profilers.
    """
    torch.mm(torch.ones(256, 64), torch.ones(64, 64).T)
    host_store(timeout=10.0)


def open_descriptors() -> dict[int, str]:
    """Every open descriptor of this process and what it leads to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own descriptor, or one that closed meanwhile
            # A file that is removed in the meantime is still the same descriptor.
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}").removesuffix(" (deleted)")
    return found


def _children() -> Iterator[int]:
    # Linux lists children per thread that started them; when a thread ends, its children pass to another thread.
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{task}/children") as file:  # unless the thread ended meanwhile
            yield from map(int, file.read().split())


def _shm() -> Iterator[str]:
    for name in os.listdir(_SHM) if os.path.isdir(_SHM) else ():
        with suppress(OSError):  # removed meanwhile
            if os.lstat(f"{_SHM}/{name}").st_uid == os.getuid():
                yield name


def _held_elsewhere(name: str) -> bool:
    """Whether a process outside our process group has the name mapped. Checked only when there is something to report."""
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # gone, or another user's
            if os.getpgid(int(entry)) != os.getpgrp():
                with open(f"/proc/{entry}/maps") as file:
                    if any(line.rstrip().endswith(f"{_SHM}/{name}") for line in file):
                        return True
    return False


def _resource_tracker() -> tuple[int | None, int | None]:
    """Process id and pipe of multiprocessing's resource tracker, if one is running."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    tracker = getattr(module, "_resource_tracker", None)
    return getattr(tracker, "_pid", None), getattr(tracker, "_fd", None)


def _command(pid: int) -> str:
    # Linux sets the command line at the end of exec, when the parent already continues.
    for _ in range(100):
        with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            if command := file.read().decode(errors="replace").replace("\0", " ").strip():
                return command[:200]
        if process_start(pid) is None:
            return "ended, but has not been waited for"
        time.sleep(_POLL)
    return "without a command line"


def _describe(fd: int, target: str) -> str:
    if not target.startswith("socket:"):
        return f"file descriptor {fd}: {target}"
    ports = []
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as twin:  # closed meanwhile; or no peer
        if twin.family in (socket.AF_INET, socket.AF_INET6) and twin.type == socket.SOCK_STREAM:
            ports.append(twin.getsockname()[1])
            ports.append(twin.getpeername()[1])
    where = f"TCP port {' to port '.join(map(str, ports))}" if ports else target
    return f"socket, descriptor {fd}: {where}"


def _without_drivers(new: Mapping[int, str], *, had_cuda: bool) -> Mapping[int, str]:
    """New descriptors, without those that CUDA's driver keeps open."""
    if not any(map(_is_drivers, new.values())):
        return new
    of_driver = ("/dev/nvidia", "anon_inode:[eventfd]")
    return {fd: target for fd, target in new.items() if not target.startswith(of_driver)} if had_cuda else {}


def _is_drivers(target: str) -> bool:
    return target.startswith("/dev/nvidia")


class TorchModules:
    """The attributes of torch's modules, and its number of threads, which a job in a process that is kept must not replace. What
    torch, gradwire or another imported module has put there is not a leftover; what code that was sent to the process has is."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[tuple[str, ...], tuple[object, ...]]] = {}
        self._threads = torch.get_num_threads()
        self.replaced()

    def replaced(self) -> list[str]:
        """One line for each attribute that is now another object than in the call before."""
        found = []
        for name, module in sys.modules.copy().items():
            if not name.startswith("torch") or type(module) is not types.ModuleType:
                continue
            attributes, before = self._before.get(name, ((), ()))
            now = vars(module)
            if _same(before, values := tuple(now.values())):
                continue
            for attribute, value in zip(attributes, before):
                if (new := now.get(attribute)) is not value and _is_sent(new):
                    found.append(f"{name}.{attribute} is replaced by {new!r}")
            self._before[name] = tuple(now), values
        if (threads := torch.get_num_threads()) != self._threads:
            found.append(f"torch uses {threads} threads instead of {self._threads}")
            self._threads = threads
        return found


def _same(before: tuple[object, ...], now: tuple[object, ...]) -> bool:
    """Whether these are the same objects. Tuples look at that first, at ten times the speed of a loop."""
    with suppress(Exception):  # what is not the same object is compared by its own method, e.g. a tensor's
        return before == now
    return False


def _is_sent(value: object) -> bool:
    """Whether code defines this that the process has not imported."""
    owner = value if isinstance(value, (types.FunctionType, type)) else type(value)
    return owner.__module__ not in sys.modules
