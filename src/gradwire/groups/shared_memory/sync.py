"""Waiting and waking between processes that share memory: a fence, counters, and a wait queue.

Everything here is single-writer: a word is written by one rank only, except a sleep flag, which any rank may clear. Nothing needs
an atomic read-modify-write, which Python does not have.

Note [Loads and stores]
A word is an aligned element of a `memoryview` of format Q or I. CPython reads and writes it by one `memcpy`, which compilers make
one load or store; an aligned one is not torn. A counter only grows, so a reader of an old value just waits a little longer.

Note [The fence]
x86 keeps stores in order; ARM does not, and neither keeps a store before a later load. Python has no full fence by name. It has
locks: releasing one is a store-release or stronger, acquiring one a load-acquire or stronger. ARMv8 keeps a load-acquire behind
every store-release that comes before it in program order, whatever their addresses. So `release` *followed by* `acquire`, on a lock
that only this thread uses, is a full fence (0.1 to 0.3 us). The other way round (`with lock: pass`) is not. On x86 both are locked
instructions and fence by themselves. On POWER and RISC-V a wake-up can be late by `SLICE`; it is never lost.

    writer: bytes; fence; counter += 1; fence; check whether the reader sleeps
    reader: read the counter; fence; bytes

The first fence of the writer and the one of the reader order the bytes with the counter. The writer's second fence and the
one in `WaitQueue.sleep` are the two halves of the next note.

Note [No wake-up is lost]
A sleeper writes 1 into its sleep flag, fences, checks once more what it waits for, and only then sleeps, in the kernel, while the
flag is 1. A writer changes its counter, fences, reads the flag, and if it is 1 writes 0 and wakes. With a full fence between the
store and the load on both sides at least one of them sees the other's store: either the sleeper sees the counter and does not
sleep, or the writer sees the flag. The kernel compares the flag with 1 under its own lock, so a writer that clears the flag between
the sleeper's last check and its sleep is noticed too. Two writers may both see 1: one wake-up too many is harmless. A writer may be
killed between writing 0 and waking; so no rank sleeps longer than `SLICE`, and each then checks whether the others are alive.

Note [The last one wakes]
A sleeper waits until all ranks have signaled a number of times. So of n ranks only the one whose signal completes that number wakes
the others: the one that finds, after its own signal and a fence, that no rank has signaled less often than itself. Of two that
signal at the same time at least one sees the other's signal, as in the note before. One that finds a rank behind was not
the one that anybody waited for: it had signaled at least as often as that rank before.

Note [Spin, then sleep]
A sleep and a wake-up cost 20 to 60 us. So a waiter checks a number of times before it sleeps, as long as there is a core for every
rank: first without pause, then, for a millisecond or two, giving up the interpreter lock at each check. Where ranks outnumber cores
it gives up the core at each check instead, and sleeps soon. So do the two ends of a large message, which take turns. If a program
that computes has taken the core, it comes back after some milliseconds only. Then a waiter sleeps at once for a while: a process
that wakes up is scheduled before those that were busy.

Note [Ranks of one process]
A rank that spins keeps the interpreter lock from another rank of its process, so it checks once and sleeps.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import threading
import time
from collections.abc import Callable

from gradwire.runtime.host import usable_cores

SLICE = 0.05
"""The longest sleep, in seconds, before a waiter checks on the other ranks."""

_SPINS, _CROWDED_SPINS, _THREAD_SPINS = 300, 40, 30
"""How often a caller checks for peers, with a core per rank and without, and the group's thread: see Note [Spin, then sleep]."""
_YIELDS = 800
"""How often a thread then checks, giving up its core each time, before it sleeps: one to two milliseconds."""
_STALL = 1e-3
"""Seconds. A core that was given up and is back later than that is also used by others, who compute."""
_CONTESTED = 200
"""How often a thread then sleeps at once where it would check first."""

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1


class Fence:
    """A full memory fence: `release` and then `acquire`, or one call. One per thread: see Note [The fence]."""

    def __init__(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        self.release, self.acquire = lock.release, lock.acquire

    def __call__(self) -> None:
        self.release()
        self.acquire()


class Patience:
    """How often the threads of one rank check before they sleep: see Note [Spin, then sleep]."""

    def __init__(self, ranks: int, *, shares: bool) -> None:
        """`shares`: this process has several of the ranks. See Note [Ranks of one process]."""
        self.crowded = ranks > usable_cores()
        self.spins = 1 if shares else _CROWDED_SPINS if self.crowded else _SPINS
        self.thread_spins = 1 if shares else _THREAD_SPINS
        self.yields = 0 if shares or self.crowded else _YIELDS
        self.contested = 0
        """How often to sleep at once from now on, because others use the cores."""

    def give_way(self) -> None:
        """Give up the core, and the interpreter lock, for a moment."""
        began = time.perf_counter()
        os.sched_yield()
        if time.perf_counter() - began > _STALL and not self.crowded:  # else another rank had it
            self.contested = _CONTESTED

    def sleeps_early(self) -> bool:
        """Whether a sleep is due after a few checks; counted."""
        early = self.contested > 0
        self.contested = max(0, self.contested - 1)
        return early


class Futex:
    """How a rank sleeps while its flag, the word at an offset, is 1: the kernel's way, through libc's `syscall`, on Linux."""

    def __init__(self, address: int) -> None:
        """`address` is where offset 0 is mapped in this process."""
        self._address = address
        self._number = _SYS_FUTEX[platform.machine()]
        libc = ctypes.CDLL(None, use_errno=True)
        self._syscall = libc.syscall
        self._syscall.restype = ctypes.c_long

    @staticmethod
    def available() -> bool:
        """Whether this system has it, and lets us use it."""
        if not sys.platform.startswith("linux") or platform.machine() not in _SYS_FUTEX:
            return False
        word = ctypes.c_uint32(0)
        futex = Futex(ctypes.addressof(word))
        ctypes.set_errno(0)
        return futex._call(0, _FUTEX_WAKE, 1, None) == 0 and ctypes.get_errno() == 0

    def _call(self, word: int, what: int, value: int, limit: object) -> int:
        where = ctypes.c_void_p(self._address + word)
        result: int = self._syscall(self._number, where, what, ctypes.c_uint32(value), limit, None, 0)
        return result

    def sleep(self, word: int, seconds: float) -> None:
        """Sleep for at most `seconds`. May return early for no reason."""
        # A timespec, which an array passes as a pointer.
        limit = (ctypes.c_long * 2)(int(seconds), int(seconds % 1 * 1e9))
        if self._call(word, _FUTEX_WAIT, 1, limit) == -1:
            problem = ctypes.get_errno()
            if problem not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise OSError(problem, f"futex: {os.strerror(problem)}")

    def wake(self, word: int) -> None:
        """Wake the rank that sleeps at `word`, which has been cleared."""
        self._call(word, _FUTEX_WAKE, 1, None)


class Polling:
    """Where there is no futex: check again after a sleep that grows from 20 us to 1 ms. No wake-up is needed."""

    def __init__(self, view: memoryview) -> None:
        self._words = view.cast("I")

    def sleep(self, word: int, seconds: float) -> None:
        deadline = time.perf_counter() + seconds
        pause = 20e-6
        while self._words[word // 4] == 1 and time.perf_counter() < deadline:
            time.sleep(pause)
            pause = min(1e-3, pause * 1.5)

    def wake(self, word: int) -> None:
        """The sleeper will see it."""


Sleep = Futex | Polling


class WaitQueue:
    """What ranks sleep on, and by which they wake each other. One sleep flag per rank, each on a cache line of its own."""

    STRIDE = 64

    def __init__(self, view: memoryview, offset: int, rank: int, size: int, sleep: Sleep) -> None:
        """`view` is the whole mapping, `offset` where the sleep flags begin."""
        self._words = view[offset : offset + size * self.STRIDE].cast("I")
        self._step = self.STRIDE // 4
        self._offset = offset
        self._mine = rank * self._step
        self._others = [r * self._step for r in range(size) if r != rank]
        self._sleep = sleep

    def wake_all(self) -> None:
        """Wake every other rank that sleeps. Fence before."""
        words = self._words
        for index in self._others:
            if words[index]:
                self._clear(index)

    def wake(self, rank: int) -> None:
        """Wake one rank, perhaps this one, if it sleeps. Fence before."""
        if self._words[rank * self._step]:
            self._clear(rank * self._step)

    def _clear(self, index: int) -> None:
        self._words[index] = 0
        self._sleep.wake(self._offset + index * 4)

    def sleep(self, ready: Callable[[], bool], fence: Fence, seconds: float) -> None:
        """Sleep until woken, unless `ready()`: see Note [No wake-up is lost]."""
        self._words[self._mine] = 1
        fence()
        if not ready():
            self._sleep.sleep(self._offset + self._mine * 4, seconds)
        self._words[self._mine] = 0
