"""Runs a script as `python` does, on a rank of `gradwire run`; an exception that ends it is also saved as data for the launcher.

The script is `__main__`, with the arguments, path and globals of `python script.py` or `python -m module`. Python itself handles
what the script raises; only our own frames are removed from the traceback.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import runpy
import signal
import sys
import threading
import types
import warnings
import zipfile
from collections.abc import Callable
from types import TracebackType

from gradwire.errors import UsageError
from gradwire.launch.environment import ELASTIC, MEMBER, RUN_DIRECTORY, SERVER, read_checks
from gradwire.launch.world import World, find_world
from gradwire.policies import set_default_checks
from gradwire.runtime.rank_error import RankError, is_importing

ERRORS, OBSERVE = "--errors", "--observe"


def python_command(module: str, *, errors: str | None = None, observe: bool = False) -> list[str]:
    """Options of Python that run a script by the `main` of `module`: this one, or one that calls `run_script`.

    The script's rank writes its error to the directory `errors`; with `observe` it is recorded even if it does not call gradwire.
    """
    # The working directory must not come before Python's own modules while ours are imported.
    path = "sys.flags.safe_path or sys.path.__setitem__(0, sys.path[1])"
    interrupt = "signal.getsignal(2) is signal.SIG_IGN or signal.signal(2, signal.SIG_DFL)"  # without a traceback
    rank = "from gradwire.launch.run_script import become_rank; become_rank()"
    start = f"import sys; {path}; import signal; {interrupt}; {rank}; from {module} import main; main()"
    return ["-c", start, *([] if errors is None else [ERRORS, errors]), *([OBSERVE] * observe)]


def become_rank() -> None:
    """Return in ranks only: at once, or, in a process of which ranks are forks, in the forks."""
    if SERVER in os.environ:
        from gradwire.launch.preload_server import serve

        serve()


def main() -> None:
    """Run the file, or with -m the module, that the arguments of this process name, after options of `python_command`."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # while modules were imported
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if ELASTIC in os.environ:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # SLURM may send it to all processes of a job
    words = sys.argv[1:]
    save = None
    if words[0] == ERRORS:
        save, words = _save_errors(words[1], int(os.environ["GRADWIRE_RANK"])), words[2:]
    set_default_checks(read_checks(os.environ))
    observe, words = words[0] == OBSERVE, words[words[0] == OBSERVE :]
    is_module = words[0] == "-m"
    if observe:
        sys.argv = list(words)  # the command that is recorded
        start_recorder(find_world(os.environ), "gradwire run --observe")
    sys.argv = list(words[is_module:])
    name = sys.argv[0]
    script = types.ModuleType("__main__")
    sys.modules["__main__"] = script
    try:
        if is_module:
            _set_path(os.getcwd())
            runpy._run_module_as_main(name)  # type: ignore[attr-defined]
            return
        _set_path(os.path.dirname(os.path.realpath(name)))
        if zipfile.is_zipfile(name) or name.endswith(".pyc"):
            runpy.run_path(name, run_name="__main__")
            return
        path = os.path.abspath(name)
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        script.__dict__.update(__builtins__=builtins, __file__=path, __cached__=None, __loader__=loader)
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, script.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        frames = None if error.__traceback__ is None else error.__traceback__.tb_next
        error.__traceback__ = frames
        if save is not None:
            save(error)
        _show_frames(error, frames)
        raise


def _set_path(directory: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = directory


def _show_frames(error: BaseException, frames: TracebackType | None) -> None:
    """When Python passes `error` to the script's `sys.excepthook`, its traceback has these frames. That of an interrupted import
    is not shown: ranks take seconds to import torch, and where they are says nothing."""
    hook = sys.excepthook
    interrupted = isinstance(error, KeyboardInterrupt) and is_importing(frames)

    def excepthook(kind: type[BaseException], value: BaseException, shown: TracebackType | None) -> None:
        if value is error:
            error.__traceback__ = sys.last_traceback = shown = frames
        if not (value is error and interrupted):
            hook(kind, value, shown)

    sys.excepthook = excepthook


def _save_errors(directory: str, rank: int) -> Callable[..., None]:
    """What saves an exception of this process; those that end threads are saved from now on. Not in processes that it forks."""
    pid, hook = os.getpid(), threading.excepthook

    def save(error: BaseException, thread: str = "") -> None:
        if os.getpid() == pid:
            try:
                RankError.of(error, rank, thread=thread).save(directory, os.environ.get(MEMBER, ""))
            except Exception as failure:  # which must not hide `error`
                warnings.warn(f"gradwire run: the error of this rank is not saved: {failure}", stacklevel=2)

    def thread_failed(failed: threading.ExceptHookArgs) -> None:
        if failed.exc_value is not None and not isinstance(failed.exc_value, SystemExit):
            save(failed.exc_value, failed.thread.name if failed.thread is not None else "unknown")
        hook(failed)

    threading.excepthook = thread_failed
    return save


def start_recorder(world: World, who: str) -> None:
    """Start the flight recorder where `gradwire run`, or the user, has named a directory for it."""
    from gradwire.observe.recording import start

    directory, member = os.environ.get(RUN_DIRECTORY), os.environ.get(MEMBER, "")
    if not directory:
        return
    number = member.rpartition("-")[2]  # of processes that come and go, each has its own
    rank = int(number) if number.isdecimal() else world.rank
    try:
        start(directory, rank=rank, size=max(world.size, rank + 1), member=member)
    except (OSError, UsageError) as error:  # training does not depend on it
        warnings.warn(f"{who} on {world}: it is not recorded. {error}", stacklevel=4)
