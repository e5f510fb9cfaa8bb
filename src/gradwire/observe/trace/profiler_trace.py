"""Events of torch.profiler's traces, for the picture of a run: what operators and kernels did within a step. Without torch.

Note [The profiler's clock]
Times of a trace are microseconds after its `baseTimeNanoseconds`, which are nanoseconds since 1970, on the wall clock of the host
(torch 2.13; a test checks it). Times of records are on the monotonic clock. The header of a ring has the time of its start on
both, and only a wall clock that was set in the meantime makes a difference: when NTP speeds a clock up or down, both change.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradwire.errors import UsageError
from gradwire.observe.rings.clocks import Alignment, align, aligned
from gradwire.observe.rings.intervals import ranks_apart
from gradwire.observe.rings.ring import Ring
from gradwire.observe.trace.chrome_trace import Event, beginning

_OTHER_PROCESSES = 1_000_000
"""Numbers of processes in the picture from here on are devices; below are ranks."""
_THREADS = 10_000_000
"""Is added to the numbers of threads, which are apart from those of a rank's tracks then."""
_FLOWS = ("s", "t", "f")


@dataclass
class ProfilerTraces:
    """The traces that torch.profiler has written for ranks of a run."""

    rings: Sequence[Ring]
    paths: Sequence[Path]
    """Files, or directories with files."""
    files: int = 0
    """How many traces were added."""
    skipped: dict[str, str] = field(default_factory=dict)
    """By file: why it was not."""

    def events(self) -> Iterator[Event]:
        """Their events on the clock of the trace of `rings`."""
        alignments = align(self.rings)
        origin = beginning(aligned(ranks_apart(self.rings)))
        devices = itertools.count(_OTHER_PROCESSES)
        for path in self._find():
            try:
                trace = _load(path)
                ring = _ring_of(trace, self.rings)
            except (OSError, EOFError, ValueError) as error:
                self.skipped[str(path)] = str(error)
                continue
            self.files += 1
            yield from _Moved(trace, ring, alignments[ring.clock], origin, devices).events()

    def _find(self) -> Iterator[Path]:
        for path in self.paths:
            if path.is_dir():
                found = sorted(p for p in path.rglob("*") if p.name.endswith((".json", ".json.gz")))
                if not found:
                    raise UsageError(f"--profiler {path}: there is no file *.json or *.json.gz.")
                yield from found
            elif path.exists():
                yield path
            else:
                raise UsageError(f"--profiler {path}: there is no such file.")


def _load(path: Path) -> Mapping[str, Any]:
    """A trace; raises ValueError if it is none."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    trace = json.loads(data)
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError("it is not a trace")
    if not isinstance(trace.get("baseTimeNanoseconds"), int):
        raise ValueError(
            "it does not have the time at which it begins: it was not written by torch.profiler, or by another version"
        )
    return trace


def _ring_of(trace: Mapping[str, Any], rings: Sequence[Ring]) -> Ring:
    """The ring of the process that was profiled. Processes of several hosts may have the same number: then their rank decides."""
    pids = {event.get("pid") for event in trace["traceEvents"] if isinstance(event, dict)}
    known = trace.get("distributedInfo")
    rank = known.get("rank") if isinstance(known, dict) else None
    found = [ring for ring in rings if ring.pid in pids]
    if len(found) > 1:
        found = [ring for ring in found if ring.rank == rank]
    if len(found) != 1:
        raise ValueError("it is not of a process of this run")
    return found[0]


class _Moved:
    """The events of one trace, in the process of their rank."""

    def __init__(
        self, trace: Mapping[str, Any], ring: Ring, alignment: Alignment, origin: int, devices: Iterator[int]
    ) -> None:
        self._trace, self._ring, self._alignment, self._origin = trace, ring, alignment, origin
        self._devices = devices
        self._numbers: dict[int, int] = {}
        header = ring.header
        self._shift = int(trace["baseTimeNanoseconds"]) + int(header["started"]) - int(header["started_wall"])

    def events(self) -> Iterator[Event]:
        for event in self._trace["traceEvents"]:
            if isinstance(event, dict) and isinstance(event.get("pid"), int):
                yield from self._moved(event)

    def _moved(self, event: Event) -> Iterator[Event]:
        own = event["pid"] == self._ring.pid
        if event.get("ph") == "M":
            name = str(event.get("name"))
            if own and name.startswith("process_"):
                return  # the rank has a name
            arguments = event.get("args")
            if name == "process_name" and isinstance(arguments, dict):
                arguments = {"name": f"rank {self._ring.rank}: {arguments.get('name')}"}
            yield {**self._placed(event), "args": arguments}
        elif isinstance(event.get("ts"), (int, float)):
            time = self._alignment.apply(self._shift + round(event["ts"] * 1e3)) - self._origin
            if time >= 0:  # what was profiled before the first record has no place in the picture
                moved = {**self._placed(event), "ts": time / 1e3}
                if event.get("ph") in _FLOWS and "id" in event:
                    moved["id"] = f"{self._ring.rank}.profiler.{event['id']}"
                yield moved

    def _placed(self, event: Event) -> Event:
        """The event in its process of the picture, at no time."""
        pid, tid = event["pid"], event.get("tid")
        if pid == self._ring.pid:
            number = self._ring.rank
        else:
            number = self._numbers.get(pid) or self._numbers.setdefault(pid, next(self._devices))
        rest = {key: value for key, value in event.items() if key not in ("pid", "tid", "ts")}
        return {**rest, "pid": number, "tid": tid + _THREADS if isinstance(tid, int) else tid}
