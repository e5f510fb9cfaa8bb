"""How each contender of `python -m benchmarks faults --peer …` is started, and what starts its ranks again.

A contender's processes write who they are to `folder/started`, so that whoever injects faults can kill the rank in a given place.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradwire.errors import GroupError

_SCRIPT = Path(__file__).with_name("faults_peer_rank.py")
_LAST_LINES = 20
_PATIENCE = 30.0
"""Seconds that a launcher gets to end."""


class Lines:
    """The lines of a file that others append to, as they come."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def new(self) -> list[Any]:
        """Those that were not returned before."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self._read += len(data)
        return [json.loads(line) for line in data.splitlines()]


class Processes:
    """The ranks of a contender, by place: the last that was started in each."""

    def __init__(self, folder: Path) -> None:
        self._started, self._steps = Lines(folder / "started"), Lines(folder / "steps")
        self._found: dict[int, tuple[int, int]] = {}
        """Numbers and descriptors of processes. Unlike its number, a descriptor is never another process's."""
        self._trained = set[int]()

    def look(self) -> None:
        """Find those that have started, and those that have committed a step, since."""
        for _, place, number in self._started.new():
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(number)
                if place in self._found:
                    os.close(self._found[place][1])
                self._found[place] = number, descriptor
        self._trained |= {number for _, number, _, committed, *_ in self._steps.new() if committed}

    @property
    def alive(self) -> list[int]:
        """Places of processes that have not ended."""
        ended = select.select([descriptor for _, descriptor in self._found.values()], [], [], 0)[0]
        return sorted(place for place, (_, descriptor) in self._found.items() if descriptor not in ended)

    @property
    def trained(self) -> list[int]:
        """Places of those of them that have committed a step, and so have the state."""
        return [place for place in self.alive if self._found[place][0] in self._trained]

    def kill(self, place: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._found[place][1], signal.SIGKILL)

    def close(self) -> None:
        for _, descriptor in self._found.values():
            os.close(descriptor)
        self._found.clear()


class Contender:
    """A way of training, running in `folder`."""

    durable = False
    """Whether nothing is lost for good when all ranks die."""

    def __init__(self, folder: Path, way: str, options: dict[str, Any]) -> None:
        self.folder, self.way, self.options = folder, way, options
        self._started: list[subprocess.Popen[bytes]] = []

    def words(self) -> list[str]:
        """The rank's script and its arguments."""
        return [str(_SCRIPT), self.way, str(self.folder), json.dumps(self.options)]

    def spawn(self, command: Sequence[str], **variables: str) -> subprocess.Popen[bytes]:
        with (self.folder / "screen").open("ab") as out:
            environment = {**os.environ, **variables}
            process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
            )
        self._started.append(process)
        return process

    def tend(self) -> None:
        """Start again what has to be; called many times in a second."""
        raise NotImplementedError

    def fail(self, what: str) -> GroupError:
        """An error, with the end of what the processes have printed."""
        screen = self.folder / "screen"
        lines = screen.read_text(errors="replace").splitlines() if screen.exists() else []
        error = GroupError(f"{self.way}: {what}")
        error.add_note("\n".join(lines[-_LAST_LINES:]))
        return error

    def close(self) -> None:
        """End all processes."""
        running = [process for process in self._started if process.poll() is None]
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Launched(Contender):
    """A run of `gradwire run`, which is started again when it ends, if `again`."""

    def __init__(self, folder: Path, way: str, options: dict[str, Any], *extra: str, again: bool = False) -> None:
        super().__init__(folder, way, options)
        self._again = self.durable = again
        command = [sys.executable, "-m", "gradwire", "run", "--no-record", "--nproc", str(options["ranks"]), *extra]
        self._command = [*command, *self.words()]
        self._launcher = self.spawn(self._command)

    def tend(self) -> None:
        if self._launcher.poll() is None:
            return
        if not self._again:
            raise self.fail(f"the run has ended, with exit code {self._launcher.returncode}")
        self._started.remove(self._launcher)
        self._launcher = self.spawn(self._command)


class TorchFT(Contender):
    """A lighthouse, and a replica in each place, which is started again at once when it ends. `timeout` is that of heartbeats."""

    def __init__(self, folder: Path, options: dict[str, Any], python: str, timeout: float | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        super().__init__(folder, "torchft", {**options, "lighthouse": f"http://localhost:{port}"})
        command = [str(lighthouse(python)), "--bind", f"[::]:{port}", "--min_replicas", "1"]
        command += ["--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]  # as its documentation has it
        if timeout is not None:
            command += ["--heartbeat_timeout_ms", f"{timeout * 1e3:.0f}"]
        self._lighthouse = self.spawn(command, RUST_BACKTRACE="1")
        self._command = [python, "-P", *self.words()]
        self._replicas = [self._replica(place) for place in range(options["ranks"])]

    def _replica(self, place: int) -> subprocess.Popen[bytes]:
        return self.spawn(self._command, RANK=str(place), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

    def tend(self) -> None:
        if self._lighthouse.poll() is not None:
            raise self.fail("the lighthouse has ended")
        for place, replica in enumerate(self._replicas):
            if replica.poll() is not None:
                self._started.remove(replica)
                self._replicas[place] = self._replica(place)


def lighthouse(python: str) -> Path:
    """The program next to that interpreter."""
    return Path(python).with_name("torchft_lighthouse")


def torchft_version(python: str) -> tuple[str, str]:
    """The version of torchft there is for that interpreter, and why it cannot be run; one of them is empty."""
    code = "import importlib.metadata as m, torchft, torch; "
    code += "print(next(f'{n} {m.version(n)}' for n in m.packages_distributions()['torchft']), 'with torch', torch.__version__)"
    try:
        done = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{python}: {error}"
    if done.returncode:
        return "", done.stderr.strip().rpartition("\n")[2]
    if not lighthouse(python).exists():
        return "", f"there is no {lighthouse(python)}"
    return done.stdout.strip(), ""
