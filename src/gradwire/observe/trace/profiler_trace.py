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
            yield from _moved(trace, ring, alignments[ring.clock], origin, devices)

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
        raise ValueError("it lacks the time at which it begins: it was not written by this version of torch.profiler")
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


def _moved(
    trace: Mapping[str, Any], ring: Ring, alignment: Alignment, origin: int, devices: Iterator[int]
) -> Iterator[Event]:
    """The events of one trace, in the process of their rank. Those before the first record have no place in the picture."""
    shift = int(trace["baseTimeNanoseconds"]) + int(ring.header["started"]) - int(ring.header["started_wall"])
    numbers = {ring.pid: ring.rank}
    for event in trace["traceEvents"]:
        if not isinstance(event, dict) or not isinstance(pid := event.get("pid"), int):
            continue
        if pid not in numbers:
            numbers[pid] = next(devices)
        tid, name, arguments = event.get("tid"), str(event.get("name")), event.get("args")
        moved = {**event, "pid": numbers[pid], "tid": tid + _THREADS if isinstance(tid, int) else tid}
        if event.get("ph") == "M":
            moved.pop("ts", None)
            if name == "process_name" and isinstance(arguments, dict):
                moved["args"] = {"name": f"rank {ring.rank}: {arguments.get('name')}"}
            if pid != ring.pid or not name.startswith("process_"):  # the rank has a name
                yield moved
        elif isinstance(event.get("ts"), (int, float)):
            moved["ts"] = (alignment.apply(shift + round(event["ts"] * 1e3)) - origin) / 1e3
            if event.get("ph") in _FLOWS and "id" in event:
                moved["id"] = f"{ring.rank}.profiler.{event['id']}"
            if moved["ts"] >= 0:
                yield moved
