"""One rank as the launcher sees it: a process in a process group of its own, two pipes, and an exit status.

Note [No orphans]
Signals go to the rank's process group, so what a rank has started (data loader workers) ends with it. The group's leader is a
guardian: a shell with all signals blocked that reads from a pipe whose other end only the launcher holds. When the pipe closes,
also because the launcher was killed, the guardian kills the whole group. It is started before the rank, so no rank is without one,
and while it lives the group's id is not reused. A rank that has ended is reaped only after its group has been killed. A rank may
call setpgrp or setsid; then the group that it leads is treated the same way.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gradwire.runtime.cleanup import on_failure

_GUARD = ["/bin/sh", "-c", "read -r rank; read -r line; kill -s KILL -- -$rank; kill -s KILL 0"]
FORWARDED = [signal.Signals[f"SIG{name}"] for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "WINCH", "TSTP")]
"""Signals of the launcher that ranks get."""

Start = Callable[..., Any]
"""Starts a process: `subprocess.Popen`, or what takes the same arguments."""


class Guardian:
    """Leads a new process group, which it kills when this process ends, in whatever way. See Note [No orphans]."""

    def __init__(self) -> None:
        theirs, self._pipe = os.pipe()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # inherited by the guardian
        try:
            with on_failure(os.close, self._pipe):
                self._process = subprocess.Popen(
                    _GUARD, stdin=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            os.close(theirs)
        self.pid = self._process.pid

    def protect(self, rank: int) -> None:
        """End the group that the process `rank` leads too, if it starts one."""
        with suppress(BrokenPipeError):  # it was killed
            os.write(self._pipe, b"%d\n" % rank)

    def release(self) -> None:
        """End its group, and reap it."""
        os.close(self._pipe)
        with suppress(subprocess.TimeoutExpired):  # it is in an uninterruptible sleep
            self._process.wait(timeout=1.0)


class RankProcess:
    """A rank that runs or has run."""

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        stdin: int,
        popen: Start = subprocess.Popen,
    ) -> None:
        self.rank = rank
        self._guardian = Guardian()
        with on_failure(self._guardian.release):
            self._process = popen(
                list(command),
                env=dict(environ),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                process_group=self._guardian.pid,
            )
        self.stdout, self.stderr = self._process.stdout, self._process.stderr
        self.pid = self._process.pid
        self._guardian.protect(self.pid)
        self.ended = os.pidfd_open(self.pid)
        """A descriptor that becomes readable once the process has ended, even if another process holds its pipes."""
        for pipe in (self.stdout, self.stderr):
            os.set_blocking(pipe.fileno(), False)

    @property
    def status(self) -> int | None:
        return exit_status(self.ended)

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it, and not a debugger."""
        try:
            found = os.waitid(os.P_PIDFD, self.ended, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # it has ended
            return False
        return found is not None and found.si_code == os.CLD_STOPPED

    def send(self, number: int) -> None:
        """Send a signal to the rank and the processes it has started."""
        for group in (self._guardian.pid, self.pid):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)
        if number == signal.SIGSTOP:  # which cannot be blocked
            with suppress(ProcessLookupError):
                os.kill(self._guardian.pid, signal.SIGCONT)

    def companions(self) -> list[int]:
        """Processes of the rank's group that still run, except the rank and its guardian."""
        ours, found = (self.pid, self._guardian.pid), []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
                state, _, group = file.read().rpartition(b")")[2].split()[:3]
                if int(group) in ours and pid not in ours and state not in b"ZX":
                    found.append(pid)
        return found

    def release(self) -> None:
        """Kill what is left of its group, reap it, and close its descriptors. May be called again."""
        if self.stdout.closed:
            return
        self.send(signal.SIGKILL)
        self.stdout.close()
        self.stderr.close()
        os.close(self.ended)
        with suppress(subprocess.TimeoutExpired):  # it is in an uninterruptible sleep
            self._process.wait(timeout=1.0)
        self._guardian.release()
        with suppress(ChildProcessError):  # none is left that this process has adopted while it started another rank
            for _ in range(100):
                if not os.waitpid(-self._guardian.pid, os.WNOHANG)[0]:
                    time.sleep(0.01)


def exit_status(pidfd: int) -> int | None:
    """The exit code of a process, or the negative number of the signal that killed it; None while it runs. Does not reap it."""
    result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
