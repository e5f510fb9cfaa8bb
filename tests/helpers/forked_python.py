"""`ForkedPython`: Popen for Python programs that start as forks of this process, which has imported torch: in milliseconds.

For tests that start hundreds of ranks. This process must have no threads: one that holds a lock at a fork, as of an import, would
never release it in the child.
"""

import argparse
import atexit
import ctypes
import faulthandler
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from gradwire.cli import run as run_command
from gradwire.launch.supervise import Supervisor

_PR_SET_PDEATHSIG = 1
_FIRST = 3
"""The first descriptor that is not a standard stream."""


class ForkedPython(subprocess.Popen[bytes]):
    """Runs `python [options] SCRIPT` or `python [options] -c CODE`, with arguments, in a fork of this process."""

    def _execute_child(self, args: Any, *how: Any) -> None:
        """Overrides how Popen starts a program; the order of its arguments is that of CPython 3.11 to 3.14."""
        pass_fds, env, process_group = how[3], how[5], how[-1]
        stdin, our_stdin, our_stdout, stdout, our_stderr, stderr = how[9:15]
        assert threading.active_count() == 1, f"a fork of a process with threads: {threading.enumerate()}"
        sys.stdout.flush()
        sys.stderr.flush()
        launcher = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                if process_group >= 0:
                    os.setpgid(0, process_group)
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != launcher:
                    os._exit(1)
                _take_streams(stdin, stdout, stderr, pass_fds)
                _become(list(args), env)
            finally:
                os._exit(1)
        self._child_created = True
        if process_group >= 0:
            try:
                os.setpgid(self.pid, process_group or self.pid)  # whichever of the two comes first
            except OSError:
                pass
        for theirs, ours in ((stdin, our_stdin), (stdout, our_stdout), (stderr, our_stderr)):
            if ours >= 0:  # a pipe
                os.close(theirs)
        if hasattr(self, "_devnull"):
            os.close(self._devnull)
        self._closed_child_pipe_fds = True


def _take_streams(stdin: int, stdout: int, stderr: int, kept: Sequence[int]) -> None:
    for target, fd in enumerate((stdin, stdout, stderr)):
        if fd >= 0 and fd != target:
            os.dup2(fd, target)
    for name in os.listdir("/proc/self/fd"):
        if int(name) >= _FIRST and int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:  # of the listing itself
                pass


def _become(args: list[str], env: Mapping[str, str] | None) -> NoReturn:
    """Run the program, and exit as an interpreter does."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable(2)
    code = 0
    try:
        _run(args[1:])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(words: list[str]) -> None:
    while words and words[0].startswith("-") and words[0] != "-c":
        words.pop(0)
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def launch(popen: Any = ForkedPython) -> None:
    """The main function of a launcher: `gradwire run` with the arguments in sys.argv, and ranks that are forks."""
    parser = argparse.ArgumentParser()
    run_command.add_options(parser)
    args = parser.parse_args()
    args.debug = False
    args.no_preload |= popen is not subprocess.Popen
    Supervisor._popen = popen
    sys.exit(run_command.run(args))
