"""Python stacks of a rank that may not answer. Without torch.

In a rank that is recorded, faulthandler writes the stacks of all threads to `rank-N.stacks`: called by a thread of the rank (see
`gradient_questions.py`), or else on a signal. The handler of the signal is C code that runs immediately, also while other C code
holds the interpreter's lock. But it reads the frames of threads that may be running, which has crashed ranks: so it is for those
whose thread does not answer, when those frames stand still. A process that is stopped, or blocks the signal, does not answer:
py-spy reads its memory, if it is installed (`pip install gradwire[py-spy]`) and has the right to trace. A process may trace those
that it has started, so the launcher may; elsewhere the system decides (`kernel.yama.ptrace_scope`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradwire.observe.hangs.gradient_questions import STACKS, ask
from gradwire.runtime.host import ProcessState, handles_signal, process_state

SIGNAL = signal.SIGRTMIN + 12
"""Not one that programs use."""
_PAUSE = 0.02
_LARGEST = 1 << 20
_STARTERS = ("/gradwire/launch/run_script.py", "/gradwire/integrations/ddp_script.py")
"""Where `gradwire run` starts scripts from."""
_QUESTIONS = "/gradwire/observe/hangs/gradient_questions.py"
_REPORTER = "/gradwire/observe/hangs/hang_watch.py"
_OUTERMOST = ("<module>", "_run_module_as_main")
_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function}() at {self.file}:{self.line}"

    @property
    def short(self) -> str:
        """With a file of the current directory by its name there."""
        return str(replace(self, file=self.file.removeprefix(os.path.join(os.getcwd(), ""))))


Stack = tuple[Frame, ...]
"""What one thread does, most recent call first."""


@contextlib.contextmanager
def write_stacks(path: Path) -> Iterator[None]:
    """In the rank: write stacks on the signal. Entered in the main thread, which alone may set a signal handler."""
    path.unlink(missing_ok=True)  # of an earlier run, or planted
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        signal.signal(SIGNAL, signal.SIG_IGN)  # what unregistering goes back to: a signal may be under way then
        faulthandler.register(SIGNAL, file=fd, all_threads=True)
        yield
    finally:
        faulthandler.unregister(SIGNAL)
        os.close(fd)


def read_stacks(
    headers: Mapping[Path, Mapping[str, Any]],
    how: Mapping[Path, Mapping[str, Any]] | None = None,
    *,
    within: float = 1.0,
) -> dict[Path, list[Stack]]:
    """The stacks of the threads of several ranks now, the main thread's first. By the path of each rank's file of stacks and the
    header of its ring; `how` they can be asked. All are asked at the same time, and have `within` seconds to answer. Those that do
    not, or are stopped, are looked at by py-spy, where it is installed."""
    found: dict[Path, list[Stack]] = {path: [] for path in headers}
    asked = {path: begin for path, header in headers.items() if (begin := _begin(path, int(header["pid"]))) is not None}
    polite = {path for path in asked if how and path in how and ask(headers[path], how[path], STACKS)}
    for path in asked.keys() - polite:
        _signal(int(headers[path]["pid"]))
    texts = dict.fromkeys(asked, "")
    changed = dict.fromkeys(asked, time.monotonic())
    deadline = time.monotonic() + within
    while asked and (left := deadline - time.monotonic()) > 0:
        time.sleep(_PAUSE)
        for path, begin in list(asked.items()):
            with contextlib.suppress(OSError), path.open(errors="replace") as file:
                file.seek(begin)
                if (text := file.read()) != texts[path]:
                    texts[path], changed[path] = text, time.monotonic()
            if left < within / 2 and path in polite and not texts[path]:
                polite.remove(path)
                _signal(int(headers[path]["pid"]))
            found[path] = parse_stacks(texts[path], main=int(headers[path]["main_thread"]))
            # Nothing marks the end, except that the stack of a program ends in a module.
            ended = any(stack and stack[-1].function in _OUTERMOST for stack in found[path][:1])
            if found[path] and time.monotonic() - changed[path] > (_PAUSE if ended else 10 * _PAUSE):
                del asked[path]
    silent = {path: int(headers[path]["pid"]) for path, stacks in found.items() if not stacks}
    for path, text in dump_stacks(silent, within=within).items():
        found[path] = parse_dump(text, main=int(headers[path]["main_thread"]))
    return found


def program() -> str | None:
    """Where py-spy is: next to this interpreter, or in PATH."""
    installed = Path(sys.executable).with_name("py-spy")
    return str(installed) if os.access(installed, os.X_OK) else shutil.which("py-spy")


def dump_stacks(pids: Mapping[Path, int], *, within: float) -> dict[Path, str]:
    """What `py-spy dump` writes about each process, as JSON. Those that take longer than `within` seconds are left out."""
    py_spy = program() if pids else None
    if py_spy is None:
        return {}
    from gradwire.runtime.threads import BoundedCall  # not before: few need it

    def dump(pid: int) -> str:
        command, nothing = [py_spy, "dump", "--nonblocking", "--json", "--pid", str(pid)], subprocess.DEVNULL
        with contextlib.suppress(subprocess.SubprocessError):
            return subprocess.check_output(command, stdin=nothing, stderr=nothing, errors="replace", timeout=within)
        return ""

    # Not a pool, which takes no calls while the interpreter ends: an error may be raised there too.
    calls = {key: BoundedCall(functools.partial(dump, pid), name="gradwire-py-spy") for key, pid in pids.items()}
    return {key: text for key, call in calls.items() if call.wait(within + 1.0) and (text := call.result())}


def _begin(path: Path, pid: int) -> int | None:
    """Where in the file the answer will be, None if the rank cannot answer."""
    if process_state(pid) is ProcessState.STOPPED or not handles_signal(pid, SIGNAL):
        return None
    try:
        if path.stat().st_size > _LARGEST:  # it is only ever added to
            os.truncate(path, 0)
        return path.stat().st_size
    except OSError:
        return None


def _signal(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, SIGNAL)


def parse_stacks(text: str, *, main: int) -> list[Stack]:
    """What faulthandler has written, the main thread's stack first.

    >>> text = 'Thread 0x00ff (most recent call first):\\n  File "a.py", line 3 in f\\n'
    >>> parse_stacks(text, main=255)
    [(Frame(file='a.py', line=3, function='f'),)]
    """
    stacks: dict[int, list[Frame]] = {}  # of a rank that was asked twice, the last
    frames: list[Frame] = []
    for line in text.splitlines():
        if found := _THREAD.match(line):
            frames = stacks[int(found[1], 16)] = []
        elif found := _FRAME.match(line):
            frames.append(Frame(found[1], int(found[2]) if found[2].isdigit() else 0, found[3]))
    return main_first(stacks, main)


def parse_dump(text: str, *, main: int) -> list[Stack]:
    """What py-spy has written, the main thread's stack first; nothing if that is not what it was asked for."""
    try:
        threads = {
            int(thread["thread_id"]): [Frame(one["filename"], one["line"], one["name"]) for one in thread["frames"]]
            for thread in json.loads(text)
        }
    except (KeyError, TypeError, ValueError):
        return []
    return main_first(threads, main)


def main_first(threads: Mapping[int, Sequence[Frame]], main: int) -> list[Stack]:
    """The stacks of `threads`, that of `main` first, without the one that waits for questions."""
    order = sorted(threads, key=lambda thread: thread != main)
    waits = {one for one in order if one != main and any(f.file.endswith(_QUESTIONS) for f in threads[one][:1])}
    return [tuple(threads[one]) for one in order if one not in waits]


def user_frames(frames: Sequence[Frame], header: Mapping[str, Any]) -> list[Frame]:
    """The frames that are not in files of Python, torch, gradwire or other installed packages: what the user wrote."""
    libraries = tuple(header["libraries"])
    return [frame for frame in frames if not frame.file.startswith((*libraries, "<frozen"))]


def user_line(frames: Sequence[Frame], header: Mapping[str, Any]) -> Frame | None:
    """The innermost line of user code."""
    return next(iter(user_frames(frames, header)), None)


def of_script(frames: Sequence[Frame]) -> Sequence[Frame]:
    """The frames without those that start the script (`python -m`, `gradwire run`) and those of a rank that is writing the report.

    >>> script, runpy = Frame("train.py", 3, "<module>"), Frame("<frozen runpy>", 88, "_run_code")
    >>> started = Frame("/lib/gradwire/launch/run_script.py", 36, "main")
    >>> reports = Frame("/lib/gradwire/observe/hangs/hang_watch.py", 29, "report_for_error")
    >>> of_script([reports, script, runpy, started, runpy]) == [script]
    True
    """
    begin = max((i + 1 for i, frame in enumerate(frames) if frame.file.endswith(_REPORTER)), default=0)
    end = min((i for i, frame in enumerate(frames) if frame.file.endswith(_STARTERS)), default=len(frames))
    while end and frames[end - 1].file == "<frozen runpy>":
        end -= 1
    return frames[begin:end]


def libraries() -> list[str]:
    """Where Python, torch, gradwire and other installed packages are."""
    packages = [sys.modules[name].__file__ for name in ("gradwire", "torch") if name in sys.modules]
    found = [os.path.dirname(file) for file in packages if file]
    found += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return [os.path.join(path, "") for path in dict.fromkeys(found)]
