"""The process of a `ForkServer` (`forks.py`): imports modules once, then forks for every request. Without torch.

Note [A process that was forked]
It must not differ from one that was started by itself. The server forks twice, so that its owner adopts the grandchild
(`PR_SET_CHILD_SUBREAPER`), which is from then on a child like any other: signals, exit status and the end of the owner need no code
of their own. Random states that Python, numpy and torch draw at their start are drawn again. The server has one thread.
"""

from __future__ import annotations

import builtins
import fcntl
import gc
import importlib
import io
import json
import os
import socket
import sys
import tempfile
import threading
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradwire.runtime import FORK_SERVER

READY = b"ready"
Program = tuple[types.CodeType, dict[str, Any]]
"""Code, and the globals of `__main__`."""


def serve() -> Program | None:
    """The main function of the server. Returns in forks only: what they execute, or None in one that goes on as it started."""
    settings = json.loads(os.environ.pop(FORK_SERVER))
    control = socket.socket(fileno=settings["fd"])
    control.set_inheritable(False)
    before = set(sys.modules)
    gc.disable()  # nothing of what is imported is garbage
    try:
        for name in settings["modules"]:
            importlib.import_module(name)
        problem = _why_not_fork(set(sys.modules) - before, settings["directory"])
    except BaseException as error:  # a process that imports it by itself meets it too, and shows it
        problem = f"importing it fails: {type(error).__name__}: {error}"
    control.sendall(problem.encode() or READY)
    gc.freeze()  # a collection would write to memory that forks share
    while True:
        request, fds = next_request(control)
        if request is None:
            os._exit(0)  # the owner has closed the server, or has ended
        between = os.fork()
        if not between:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            break
        for fd in fds:
            os.close(fd)
        os.waitpid(between, 0)
    while os.getppid() == between:  # until the owner has adopted this process
        os.sched_yield()
    return _start(request, fds, control)


def ask(server: socket.socket, request: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Send a request and descriptors."""
    text = json.dumps(request).encode()
    socket.send_fds(server, [len(text).to_bytes(8, "big")], fds)
    server.sendall(text)


def next_request(source: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """A request and its descriptors; None if the other end has closed."""
    head, fds, _, _ = socket.recv_fds(source, 8, 16)
    size, text = int.from_bytes(head, "big"), b""
    while len(text) < size and (more := source.recv(size - len(text))):
        text += more
    return json.loads(text) if head and len(text) == size else None, fds


def _start(request: Mapping[str, Any], fds: list[int], control: socket.socket) -> Program | None:
    """Make this process, a fork, what the request describes."""
    if request["group"] is not None:
        os.setpgid(0, request["group"])
    control.sendall(str(os.getpid()).encode())
    control.close()
    os.chdir(f"/proc/{os.getppid()}/cwd")
    become(fds, request["fds"], request["env"])
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # it would be that of the parent
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if "numpy.random" in sys.modules:  # Python does this for its own generator
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:  # its seed is drawn when the library is loaded
        sys.modules["torch"].default_generator.seed()
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
    return None if request["argv"] is None else program(request["argv"])


def become(fds: Sequence[int], numbers: Sequence[int], env: Mapping[str, str]) -> None:
    """Give a fork its descriptors, with these numbers, and its environment."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(high, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # determined again from the environment
    gc.enable()


def program(argv: Sequence[str]) -> Program:
    """What `argv`, a command `python -c CODE ...`, executes."""
    code = argv.index("-c") + 1
    sys.argv[:] = ["-c", *argv[code + 1 :]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins)
    return compile(argv[code], "<string>", "exec", dont_inherit=True), main.__dict__


def _why_not_fork(imported: Iterable[str], directory: str | None) -> str:
    """Why a fork would differ from a process that imports the same by itself; empty if it would not.

    `directory` is that of the script which it is to run, None if there is none.
    """
    if not os.fork():  # before a fork OpenBLAS ends its threads, and it starts them again when they are needed
        os._exit(0)
    os.wait()
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"importing it starts threads: {threads - 1}"
    if directory is None:
        return ""
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
