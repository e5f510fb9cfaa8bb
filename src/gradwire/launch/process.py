"""One rank as the launcher sees it: a process that leads its own process group, two pipes, and an exit status.

Note [No orphans]
Signals go to the rank's process group, so what a rank has started (data loader workers) ends with it. For a launcher that is killed
there are two safeguards:

- PR_SET_PDEATHSIG kills a rank with its launcher. The rank requests it, in a few lines of Python that then exec the program: code
  between fork and exec is not safe in a launcher with C++ threads. The signal is sent when the *thread* that started the rank
  ends, so it is requested only if that is the main thread.
- A guardian: a shell in the group, with all signals blocked, that reads from a pipe whose other end only the launcher holds. When
  the pipe closes it kills the whole group. As a member it also keeps the group's id from being reused.

A rank that has ended is reaped only after its group has been killed, so that its pid is not reused before.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

BECOME = (
    "import ctypes,os,sys;"
    "ctypes.CDLL(None).prctl(1,9);"  # PR_SET_PDEATHSIG, SIGKILL
    "os.getppid()==int(sys.argv[1]) or os._exit(1);"  # the launcher died before the request
    "os.execv(sys.argv[2],sys.argv[2:])"
)
_GUARD = ["/bin/sh", "-c", "read -r line; kill -KILL 0"]


class _Guardian:
    """Kills the process group `group` when this process ends, in whatever way. See Note [No orphans]."""

    def __init__(self, group: int) -> None:
        theirs, self._pipe = os.pipe()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # inherited by the guardian
        try:
            self._process = subprocess.Popen(
                _GUARD, stdin=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=group
            )
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            os.close(theirs)
        self.pid = self._process.pid

    def release(self) -> None:
        """Reap it, once its group has been killed."""
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
        popen: type[subprocess.Popen[bytes]] = subprocess.Popen,
    ) -> None:
        self.rank = rank
        if threading.current_thread() is threading.main_thread():
            command = [sys.executable, "-I", "-S", "-c", BECOME, str(os.getpid()), *command]
        self._process = popen(
            list(command),
            env=dict(environ),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            process_group=0,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.stdout, self.stderr = self._process.stdout, self._process.stderr
        self.pid = self._process.pid
        try:
            self._guardian = _Guardian(self.pid)
        except BaseException:
            self._process.kill()
            self._process.wait()
            self.stdout.close()
            self.stderr.close()
            raise
        self.ended = os.pidfd_open(self.pid)
        """A descriptor that becomes readable once the process has ended, even if another process holds its pipes."""
        for pipe in (self.stdout, self.stderr):
            os.set_blocking(pipe.fileno(), False)

    @property
    def status(self) -> int | None:
        """Its exit code, or the negative number of the signal that killed it; None while it runs."""
        result = os.waitid(os.P_PIDFD, self.ended, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status

    def send(self, number: int) -> None:
        """Send a signal to the rank and the processes it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def companions(self) -> list[int]:
        """Processes of the rank's group that still run, except the rank and its guardian."""
        ours = (self.pid, self._guardian.pid)
        return [
            pid for pid, group, state in _processes() if group == self.pid and pid not in ours and state not in "ZX"
        ]

    def release(self) -> None:
        """Kill what is left of its group, reap it, and close its descriptors."""
        self.send(signal.SIGKILL)
        self.stdout.close()
        self.stderr.close()
        os.close(self.ended)
        with suppress(subprocess.TimeoutExpired):  # it is in an uninterruptible sleep
            self._process.wait(timeout=1.0)
        self._guardian.release()


def _processes() -> Iterator[tuple[int, int, str]]:
    """Pid, process group and state of every visible process."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                state, _, group = file.read().rpartition(b")")[2].split()[:3]
                yield int(name), int(group), state.decode()
