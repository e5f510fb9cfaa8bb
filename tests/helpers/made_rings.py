"""Rings that are made up: ranks that train, as a real run records them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from gradwire.observe.rings.ring import Record, Ring
from gradwire.recorder.format import NO_PEER, RecordKind as K
from gradwire.recorder.writer import FlightRecorder, Place, RankInGroup
from helpers.recorder_put import group_id_of

MS = 1_000_000
STEP = 20 * MS
"""What a step takes."""
BUCKET = 1 << 20
_EMPTY = {"op": "", "rank": 0, "thread": 1, "group": "", "label": "", "seq": 0, "ordinal": 0, "nbytes": 0}
_PLACE = {"duration": 0, "step": -1, "bucket": -1}


def header(rank: int, size: int, **more: Any) -> dict[str, Any]:
    """The header of a ring of a process that is not on this host."""
    facts = {
        "rank": rank,
        "size": size,
        "pid": 1000 + rank,
        "process_start": "",
        "host": "node-a",
        "clock": "node-a",
        "started": 0,
        "started_wall": 1_800_000_000 * 10**9,
        "main_thread": 1,
        "libraries": [],
        "ops": ["all_reduce", "send", "recv", "broadcast"],
        "python": "3.11",
        "torch": "2.13",
        "gradwire": "0.1",
        "command": "train.py --lr 0.1",
    }
    return facts | more


def step_records(
    rank: int,
    step: int,
    *,
    late: int = 0,
    buckets: int = 2,
    hook: str = "mean()",
    numbers: itertools.count[int] | None = None,
) -> list[Record]:
    """A step of a rank from `step * STEP` on, ready `late` nanoseconds after the others: data, forward, backward, optimizer."""
    numbers = numbers or itertools.count(step * (6 + 6 * buckets))
    start, world = step * STEP, {"group": "world", "rank": rank}
    found: list[Record] = []

    def add(kind: K, at: int, **fields: Any) -> None:
        found.append(made(next(numbers), start + at, kind, **fields))

    add(K.OPTIMIZER_BEGAN, 1 * MS, rank=rank)
    add(K.OPTIMIZER_ENDED, 2 * MS, rank=rank)
    add(K.FORWARD_BEGAN, 4 * MS + late, step=step, **world)
    add(K.FORWARD_ENDED, 7 * MS + late, step=step, **world)
    ends = []
    for bucket in range(buckets):
        seq = step * buckets + bucket
        at = 8 * MS + late + bucket * 4 * MS // buckets
        facts = {"nbytes": BUCKET, "bucket": bucket, "step": step, **world}
        collective = {"op": "all_reduce", "label": f"bucket {bucket}", "seq": seq, "ordinal": seq + 1, **facts}
        add(K.BUCKET_FULL, at, **facts)
        add(K.COLLECTIVE_SUBMITTED, at + 10_000, **collective)
        add(K.COLLECTIVE_STARTED, at + 20_000, **collective)
        add(K.BUCKET_LAUNCHED, at + 30_000, label=hook, **facts)
        ends.append((collective, 17 * MS + bucket * MS // buckets, at + 10_000))
    add(K.BACKWARD_ENDED, 12 * MS + late, step=step, **world)
    for collective, end, submitted in ends:
        add(K.COLLECTIVE_FINISHED, end, **{**collective, "step": -1, "bucket": -1, "duration": end - submitted})
    for bucket in range(buckets):
        add(K.BUCKET_REDUCED, 18 * MS + bucket * 1000, nbytes=BUCKET, bucket=bucket, step=step, **world)
    add(K.STEP_ENDED, 20 * MS - 1, step=step, **world)
    return found


def made_ring(
    rank: int, steps: range, *, size: int = 2, late: int = 0, more: list[Record] | None = None, **facts: Any
) -> Ring:
    """The ring of a rank that has recorded these steps."""
    records = [record for step in steps for record in step_records(rank, step, late=late)]
    described = {
        "system": [{"system": "Linux", "cpus": 2, "threads": 1, "cuda": None}],
        "group": [{"name": "world", "kind": "ThreadGroup", "rank": rank, "size": size, "id": group_id_of("world")}],
        "buckets": [
            {
                "group": "world",
                "group_id": group_id_of("world"),
                "model": 0,
                "rank": rank,
                "buckets": [
                    {"bytes": BUCKET, "dtype": "float32", "device": "cpu", "parameters": 2, "names": ["w", "b"]}
                ]
                * 2,
            }
        ],
        "end": [{"time": steps.stop * STEP}],
    }
    return Ring(Path(f"rank-{rank}.ring"), header(rank, size, **facts), records + (more or []), described)


def mark(number: int, time: int, kind: K, label: str, **fields: Any) -> Record:
    """A record of another kind."""
    return made(number, time, kind, label=label, **fields)


def made(number: int, time: int, kind: K, **fields: Any) -> Record:
    """A record; what is not given is empty. Groups of one name are one."""
    given = {**_EMPTY, **_PLACE, **fields}
    given.setdefault("group_id", group_id_of(given["group"]))
    return Record(number, time, kind, **given)


def write_ring(directory: Path, ring: Ring, *, capacity: int = 1024) -> Path:
    """A ring as a file."""
    path = directory / f"rank-{ring.header.get('member') or ring.rank}.ring"
    recorder = FlightRecorder(path, header=ring.header, capacity=capacity)
    ops = ring.header["ops"]
    for r in ring.records:
        op = ops.index(r.op) if r.op else 0
        member = RankInGroup(r.group_id, recorder.number_of(r.group), r.rank)
        peer, ordinal = (r.peer, r.message) if r.peer >= 0 else (NO_PEER, r.ordinal)
        operation = op, r.seq, ordinal, peer, r.duration / 1e9, r.time / 1e9
        place = Place(r.step, r.bucket, r.model)
        recorder.put(r.kind, member, operation, label=r.label, nbytes=r.nbytes, place=place)
    for subject, facts in ring.descriptions.items():
        for one in facts:
            recorder.describe(subject, one)
    recorder.close()
    return path


def write_steps(recorder: FlightRecorder, rank: int, first: int, number: int) -> int:
    """Steps from `first` on, of at least `number` records; returns the next step."""
    while number > 0:
        for r in step_records(rank, first):
            member = RankInGroup(r.group_id, recorder.number_of(r.group), r.rank)
            operation = 0, r.seq, r.ordinal, (1 << 16) - 1, r.duration / 1e9, None
            place = Place(r.step, r.bucket, 1)
            recorder.put(r.kind, member, operation, label=r.label, nbytes=r.nbytes, place=place)
            number -= 1
        first += 1
    return first
