"""Reads the rings that flight recorders write: of a process that runs, hangs, or is gone. Without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.errors import UsageError
from gradwire.flight_recorder import HEADER, MAGIC, PAGE, RECORD, VERSION, RecordKind, names_path
from gradwire.host import ProcessState, process_state

_UNKNOWN = "?"


class Record(NamedTuple):
    """Something that happened on a rank. Times are in nanoseconds on the host's monotonic clock."""

    number: int
    time: int
    kind: RecordKind
    op: str
    """What the operation was, of records of collectives."""
    rank: int
    """The rank in `group`."""
    thread: int
    group: str
    label: str
    seq: int
    """The number of an operation in its group on this rank."""
    ordinal: int
    """The number of a collective in its group, the same on all ranks; see `Ledger.next_ordinal`."""
    nbytes: int
    duration: int
    step: int
    """-1: none."""
    bucket: int
    """-1: none."""


@dataclass(frozen=True)
class Ring:
    """What was read from the ring of one rank."""

    path: Path
    header: dict[str, Any]
    records: list[Record] = field(repr=False)
    """Oldest first, without gaps, except where the ring was written to while it was read."""

    @property
    def rank(self) -> int:
        """The rank in the world."""
        return int(self.header["rank"])

    @property
    def pid(self) -> int:
        """The process that writes, or wrote, the ring."""
        return int(self.header["pid"])

    @property
    def state(self) -> ProcessState:
        """What its process does now, as seen from a process on the same host."""
        return process_state(self.pid, str(self.header["process_start"]))

    @property
    def clock(self) -> str:
        """Which monotonic clock its times are on: ranks of one host share it."""
        return str(self.header["clock"])

    @property
    def lost(self) -> int:
        """How many records were overwritten by later ones."""
        return self.records[0].number if self.records else 0

    def wall_time(self, time: int) -> float:
        """A time of a record as seconds since 1970, by the clock of the rank's host when the recorder was started."""
        return float(self.header["started_wall"] + time - self.header["started"]) / 1e9

    def of_kind(self, *kinds: RecordKind) -> Iterator[Record]:
        """The records of these kinds, in order."""
        return (record for record in self.records if record.kind in kinds)


def read_ring(path: str | os.PathLike[str]) -> Ring:
    """Read a ring.

    A record that is being written at this moment is left out, as is what a newer version of gradwire may have added.
    """
    path = Path(path)
    data = path.read_bytes()
    magic, version, size, capacity, length = HEADER.unpack_from(data) if len(data) >= PAGE else (b"", 0, 0, 0, 0)
    if magic != MAGIC:
        raise UsageError(f"{path} is not a ring of gradwire's flight recorder.")
    if version != VERSION or size != RECORD.size or len(data) < PAGE + capacity * size:
        raise UsageError(
            f"{path} was written by another version of gradwire (format {version}; this one reads {VERSION})."
        )
    header = json.loads(data[HEADER.size : HEADER.size + length])
    names = _read_names(path)
    ops = header["ops"]
    kinds = {kind.value: kind for kind in RecordKind}
    records = []
    for slot, fields in enumerate(RECORD.iter_unpack(data[PAGE : PAGE + capacity * size])):
        number, time, code, op, rank, thread, group, label, *rest = fields
        kind = kinds.get(code)
        if kind is None or number % capacity != slot:
            continue
        name = ops[op] if kind <= RecordKind.COLLECTIVE_FAILED and op < len(ops) else ""
        records.append(Record(number, time, kind, name, rank, thread, _name(names, group), _name(names, label), *rest))
    records.sort()
    return Ring(path, header, records)


def read_rings(directory: str | os.PathLike[str]) -> list[Ring]:
    """The rings of all ranks of a run, by rank."""
    paths = sorted(Path(directory).glob("rank-*.ring"))
    if not paths:
        raise UsageError(
            f"{directory}: no flight recorder has written here. Name the directory of a run: `gradwire run --run-dir DIR` makes "
            "one, as does gradwire.observe.start(DIR)."
        )
    return sorted((read_ring(path) for path in paths), key=lambda ring: ring.rank)


def _read_names(path: Path) -> list[str]:
    try:
        lines = names_path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    names = []
    for line in lines[:-1]:  # the last one is empty, or half written
        try:
            names.append(str(json.loads(line)))
        except ValueError:
            names.append(_UNKNOWN)
    return names


def _name(names: list[str], number: int) -> str:
    return names[number] if number < len(names) else _UNKNOWN
