"""One picture of a run: what all ranks did, in Chrome's JSON format, which Perfetto opens. A rank is a process of the trace.

The tracks of a rank are the phases of its steps, its buckets from full to averaged, the hooks that reduce them, and its operations
by group. Arrows lead from a bucket to its hook, and from the hook to its operations. Slices that overlap are on several tracks of
the same name. What torch.profiler has written of operators and kernels can be added.

Note [The profiler's clock]
Times of a trace are microseconds after its `baseTimeNanoseconds`, which are nanoseconds since 1970, on the wall clock of the host
(torch 2.13; a test checks it). Times of records are on the monotonic clock. The header of a ring has the time of its start on
both, and only a wall clock that was set in the meantime makes a difference: when NTP speeds a clock up or down, both change.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradwire.errors import UsageError
from gradwire.observe.rings.clocks import Alignment, align, aligned
from gradwire.observe.rings.intervals import BucketSpan, Operation, bucket_spans, free_lane, operations, ranks_apart
from gradwire.observe.rings.ring import Record, Ring
from gradwire.observe.rings.views import read_faults
from gradwire.observe.stragglers.steps import Phase, spans
from gradwire.recorder.format import RecordKind

_STEP = 1
"""The number of the first track. Those of a rank are numbered, whatever is on them."""
_OTHER_PROCESSES = 1_000_000
"""Numbers of processes in the picture from here on are devices; below are ranks."""
_THREADS = 10_000_000
"""Is added to the numbers of threads, which are apart from those of a rank's tracks then."""
_FLOWS = ("s", "t", "f")
_NOTES = {RecordKind.MARK: "mark", RecordKind.STEP_FAILED: "step failed", RecordKind.WARNING: "warning"}
Event = dict[str, Any]


@dataclass(slots=True)
class TraceSlice:
    """Something with a beginning and an end, in nanoseconds on the clock of the first rank's host."""

    name: str
    start: int
    end: int
    arguments: dict[str, Any]
    cause: TraceSlice | None = None
    """The slice from which an arrow leads here."""
    inner: list[TraceSlice] = field(default_factory=list)
    """Parts of it, one after another."""


def write_trace(rings: Sequence[Ring], path: Path, more: Iterable[Event] = ()) -> int:
    """Write the trace of `rings`, with the events `more`, to `path`; returns how many events it has."""
    number = 0
    with path.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, event in enumerate(itertools.chain(trace_events(rings), more), 1):
            file.write((",\n" if number > 1 else "") + json.dumps(event))
        file.write("\n]}\n")
    return number


def trace_events(rings: Sequence[Ring]) -> Iterator[Event]:
    """The events of the trace, on the clock of the first rank's host."""
    ranks, origin = _on_one_clock(rings)
    for ring in ranks:
        yield from _rank_events(ring, origin)


def fault_events(directory: Path, rings: Sequence[Ring]) -> Iterator[Event]:
    """Marks for what has happened to processes of an elastic run, as exact as the wall clock of the first rank's host."""
    if faults := read_faults(directory):
        header, (_, origin) = rings[0].header, _on_one_clock(rings)
        shift = int(header["started"]) - int(header["started_wall"]) - origin
        places = {ring.header.get("member"): ring.rank for ring in rings}
        for fault in faults:
            event = {"ph": "i", "name": fault.text, "s": "g", "cat": "fault", "tid": _STEP}
            yield {**event, "pid": places.get(fault.member, rings[0].rank), "ts": (fault.time * 1e9 + shift) / 1e3}


def _on_one_clock(rings: Sequence[Ring]) -> tuple[list[Ring], int]:
    """A ring for each rank, and when their trace begins."""
    ranks = aligned(ranks_apart(rings))
    return ranks, min((r.time - r.duration for ring in ranks for r in ring.records), default=0)


def _rank_events(ring: Ring, origin: int) -> Iterator[Event]:
    def event(phase: str, track: int, time: int, **more: Any) -> Event:
        return {"ph": phase, "pid": ring.rank, "tid": track, "ts": (time - origin) / 1e3, **more}

    def meta(what: str, track: int, **arguments: Any) -> Event:
        return {"ph": "M", "pid": ring.rank, "tid": track, "name": what, "args": arguments}

    who = ring.header.get("member") or f"rank {ring.rank}"
    yield meta("process_name", 0, name=f"{who} ({ring.header['host']}, process {ring.pid})")
    yield meta("process_sort_index", 0, sort_index=ring.rank)
    found = operations(ring.records)
    rows = list(tracks(ring, found))
    place: dict[int, int] = {}  # by slice: its track
    flows = itertools.count(1)
    for number, (name, slices) in enumerate(rows, _STEP):
        yield meta("thread_name", number, name=name)
        yield meta("thread_sort_index", number, sort_index=number)
        for piece in slices:
            place[id(piece)] = number
            for part in (piece, *piece.inner):
                duration = (part.end - part.start) / 1e3
                yield event("X", number, part.start, name=part.name, dur=duration, args=part.arguments)
            if (cause := piece.cause) is not None:
                flow = {"name": "hook", "cat": "hook", "id": f"{ring.rank}.{next(flows)}"}
                start = max(cause.start, min(piece.start, cause.end))
                yield event("s", place[id(cause)], start, **flow)
                yield event("f", number, piece.start, bp="e", **flow)
    for name, time, value in _counters(rows[0][1], found):
        yield event("C", 0, time, name=name, args={"value": value})
    for note in ring.of_kind(*_NOTES):
        what = _NOTES[note.kind]
        yield event("i", _STEP, note.time, name=note.label or what, s="p", cat=what)


Track = tuple[str, list[TraceSlice]]
"""A name, and slices one after another."""


def _place(record: Record) -> tuple[int, int, int]:
    return record.model, record.step, record.bucket


def tracks(ring: Ring, found: Sequence[Operation]) -> Iterator[Track]:
    """The tracks of steps, of buckets, of hooks, and of the operations `found`, by their group."""
    yield "step", [TraceSlice(s.phase.value, s.start, s.end, {"step": s.step}) for s in spans(ring.records)]
    of_bucket: dict[tuple[int, int, int], list[Operation]] = {}
    for operation in found:
        if operation.record.bucket >= 0:
            of_bucket.setdefault(_place(operation.record), []).append(operation)
    buckets, hooks = [], []
    hook_of: dict[int, TraceSlice] = {}
    for one in bucket_spans(ring.records):
        if one.reduced is None:
            continue
        full = one.record
        arguments = {"step": full.step, "bucket": full.bucket, "bytes": full.nbytes, "group": full.group}
        buckets.append(TraceSlice(f"bucket {full.bucket}", full.time, one.reduced, arguments))
        own = [o for o in of_bucket.get(_place(full), []) if full.time <= o.submitted <= one.reduced]
        hooks.append(_hook(one, own, buckets[-1]))
        hook_of.update({id(operation): hooks[-1] for operation in own})
    end = max((record.time for record in ring.records), default=0)
    wire: dict[str, list[TraceSlice]] = {}
    for operation in found:
        wire.setdefault(operation.record.group, []).append(_wire(operation, hook_of.get(id(operation)), end))
    views = [record for record in ring.records if record.kind is RecordKind.VIEW]
    ends = [record.time for record in views[1:]] + [end]
    if views:
        names = [f"view {view.ordinal}: rank {view.rank} of {view.nbytes}" for view in views]
        yield "view", [TraceSlice(n, v.time, stop, {"step": v.step}) for n, v, stop in zip(names, views, ends)]
    yield from _apart("buckets", buckets)
    yield from _apart("hook", hooks)
    for group, slices in sorted(wire.items()):
        yield from _apart(f"wire: {group}", slices)


def _hook(one: BucketSpan, own: Sequence[Operation], bucket: TraceSlice) -> TraceSlice:
    """The hook of a bucket, with the stages between its operations: what it computes itself."""
    ends = [operation.ended for operation in own if operation.ended is not None]
    stop = max([*ends, one.launched or bucket.start])
    arguments = {"step": one.record.step, "bucket": one.record.bucket}
    hook = TraceSlice(one.hook or "hook", bucket.start, min(stop, bucket.end), arguments, bucket)
    reached = bucket.start
    for number, operation in enumerate(own, 1):
        if operation.submitted > reached:
            hook.inner.append(TraceSlice(f"stage {number}", reached, operation.submitted, arguments))
        reached = max(reached, min(hook.end, operation.ended or bucket.start))
    return hook


def _wire(operation: Operation, cause: TraceSlice | None, end: int) -> TraceSlice:
    record, start = operation.record, operation.submitted
    arguments: dict[str, Any] = {"sequence number": record.seq, "bytes": record.nbytes, "label": record.label}
    if record.bucket >= 0:
        arguments |= {"step": record.step, "bucket": record.bucket}
    if record.peer >= 0:
        arguments["peer"] = record.peer
    if operation.error:
        arguments["error"] = operation.error
    if operation.ended is None:
        return TraceSlice(f"{record.op} (not finished)", start, max(start, end), arguments, cause)
    return TraceSlice(f"{record.op}{' failed' if operation.error else ''}", start, operation.ended, arguments, cause)


def _apart(name: str, slices: Iterable[TraceSlice]) -> Iterator[Track]:
    """`slices` on as many tracks of this name as they need in order not to overlap."""
    lanes: list[int] = []
    found: dict[int, list[TraceSlice]] = {}
    for piece in sorted(slices, key=lambda piece: piece.start):
        found.setdefault(free_lane(lanes, piece.start, piece.end), []).append(piece)
    return ((name, track) for track in found.values())


def _counters(steps: Sequence[TraceSlice], found: Iterable[Operation]) -> Iterator[tuple[str, int, float]]:
    in_flight = communicated = 0
    ended = [(one.ended, one.record.nbytes, one) for one in found if one.ended is not None]
    changes = [(one.submitted, nbytes) for _, nbytes, one in ended] + [(end, -nbytes) for end, nbytes, _ in ended]
    for time, change in sorted(changes):
        in_flight += change
        yield "bytes in flight", time, in_flight
    for end, nbytes in sorted((end, nbytes) for end, nbytes, one in ended if not one.error):
        communicated += nbytes
        yield "bytes communicated", end, communicated
    for step in steps:
        if step.name == Phase.EXPOSED.value:
            yield "exposed communication (ms)", step.end, (step.end - step.start) / 1e6


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
        _, origin = _on_one_clock(self.rings)
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
