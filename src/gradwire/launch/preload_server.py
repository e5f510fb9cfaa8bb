"""The process that imports torch once, of which ranks are forks: see Note [A rank that was forked] in preload.py."""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import socket
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from gradwire.launch.environment import SERVER
from gradwire.runtime.fork_server import become, next_request

READY = b"ready"


def serve() -> None:
    """Import modules, then fork for every request. Returns in ranks only."""
    settings = json.loads(os.environ.pop(SERVER))
    control = socket.socket(fileno=settings["fd"])
    control.set_inheritable(False)
    before = set(sys.modules)
    gc.disable()  # nothing of what is imported is garbage
    try:
        for name in settings["modules"]:
            importlib.import_module(name)
        problem = _why_not_fork(set(sys.modules) - before, settings["directory"])
    except BaseException as error:  # a rank meets it too, and shows it
        problem = f"importing it fails: {type(error).__name__}: {error}"
    control.sendall(problem.encode() or READY)
    gc.freeze()  # a collection would write to memory that ranks share
    while True:
        request, fds = next_request(control)
        if request is None:
            os._exit(0)  # the launcher has closed the server, or has ended
        between = os.fork()
        if not between:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            break
        for fd in fds:
            os.close(fd)
        os.waitpid(between, 0)
    while os.getppid() == between:  # until the launcher has adopted this process
        os.sched_yield()
    _start(request, fds, control)


def _start(request: Mapping[str, Any], fds: list[int], control: socket.socket) -> None:
    """Make this process, a fork, what the request describes."""
    os.setpgid(0, request["group"])
    control.sendall(str(os.getpid()).encode())
    control.close()
    become(fds, request["env"], request["fds"])
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # it would be that of the parent
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if "numpy.random" in sys.modules:  # Python does this for its own generator
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:  # its seed is drawn when the library is loaded
        sys.modules["torch"].default_generator.seed()
    if request["argv"] is not None:
        code = request["argv"].index("-c") + 1
        sys.argv = ["-c", *request["argv"][code + 1 :]]
        exec(request["argv"][code], {"__name__": "__main__"})
        os._exit(0)
    for fd, text in zip((1, 2), request["output"]):
        os.write(fd, text.encode("latin-1"))
    if sys.__stdin__ is not None:  # Python has looked at the server's when it started
        raw = io.FileIO(0, closefd=False)
        raw.name = "<stdin>"
        buffer, old = io.BufferedReader(raw), sys.__stdin__
        line_buffering = os.isatty(0)
        stdin = io.TextIOWrapper(buffer, old.encoding, old.errors, newline="\n", line_buffering=line_buffering)
        object.__setattr__(stdin, "mode", "r")
        vars(sys).update(stdin=stdin, __stdin__=stdin)


def _why_not_fork(imported: Iterable[str], directory: str) -> str:
    """Why a fork would differ from a process that imports the same by itself; empty if it would not."""
    tasks = "/proc/self/task"
    if len(os.listdir(tasks)) > 1:
        if not os.fork():  # before it OpenBLAS ends its threads, and it starts them again when they are needed
            os._exit(0)
        os.wait()
        if (threads := len(os.listdir(tasks))) > 1:
            return f"importing it starts threads: {threads - 1}"
    if sys.gettrace() or sys.getprofile() or any(map(_monitor, range(6))):
        return "a debugger, a profiler or a coverage tool is active"
    for name in ("sitecustomize", "usercustomize"):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and os.path.dirname(file) != os.path.dirname(os.__file__):  # that of a distribution of Linux
            return f"{file} may depend on the rank"
    if (cuda := sys.modules.get("torch.cuda")) is not None and cuda.is_initialized():
        return "importing it initializes CUDA"
    return "" if sys.flags.safe_path else _hidden(imported, directory)


def _monitor(tool: int) -> str | None:
    monitoring = getattr(sys, "monitoring", None)  # since Python 3.12
    return None if monitoring is None else monitoring.get_tool(tool)


def _hidden(imported: Iterable[str], directory: str) -> str:
    """A module of the script's directory that comes before one that was imported."""
    tops = {name.partition(".")[0] for name in imported}
    for entry in os.scandir(directory):
        name, _, ending = entry.name.partition(".")
        is_package = os.path.exists(os.path.join(entry.path, "__init__.py"))
        if name not in tops or not (is_package or ending in ("py", "pyc") or ending.endswith("so")):
            continue
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        if not file.startswith(os.path.join(directory, name)):
            return f"{entry.path} comes before the module {name} that it imports"
    return ""
