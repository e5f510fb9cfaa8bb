"""Reads the rings that flight recorders write: of a process that runs, hangs, or is gone. Without torch."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.errors import UsageError
from gradwire.observe.rings.ring_checks import checked_header, is_good_description, is_possible, real_capacity
from gradwire.observe.rings.run_outcome import load
from gradwire.recorder.flight_recorder import (
    HEADER,
    MAGIC,
    ON_DEVICE,
    PAGE,
    RECORD,
    VERSION,
    RecordKind,
    names_path,
    unpack_message,
)
from gradwire.runtime.host import ProcessState, clock_identity, process_state

_UNKNOWN = "?"
_FILE_NAME = re.compile(r"rank-(\d{1,6})\.ring")
_P2P = frozenset({"send", "recv"})
_KINDS = {kind.value: kind for kind in RecordKind}
COLLECTIVES = frozenset(kind for kind in RecordKind if kind.name.startswith("COLLECTIVE_"))
"""Records of collectives, sends and receives."""


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
    """The number of a collective in its group, the same on all ranks; 0 for sends and receives. See `Ledger.next_ordinal`."""
    nbytes: int
    duration: int
    step: int
    """-1: none."""
    bucket: int
    """-1: none."""
    peer: int = -1
    """Of a send or a receive: the other rank in `group`, -1 if it is not known."""
    message: int = -1
    """Of a send or a receive: which of the messages between these two ranks it is; both have the same."""
    on_device: bool = False
    """Of a submission: whether its tensors are in the memory of a device, such as a GPU."""


def message_key(record: Record) -> tuple[str, int, int, int]:
    """The message that a send or a receive is of: group, sender, receiver and number, the same on both ranks."""
    sender, receiver = (record.rank, record.peer) if record.op == "send" else (record.peer, record.rank)
    return record.group, sender, receiver, record.message


@dataclass(frozen=True)
class Ring:
    """What was read from the ring of one rank."""

    path: Path
    header: dict[str, Any]
    records: list[Record] = field(repr=False)
    """Oldest first, without gaps, except where the ring was written to while it was read."""
    descriptions: dict[str, list[dict[str, Any]]] = field(default_factory=dict, repr=False)
    """By subject, oldest first: see `FlightRecorder.describe`."""
    damage: dict[str, str] = field(default_factory=dict, repr=False)
    """By the name of a file: what of it could not be read."""
    part_of: Ring | None = field(default=None, repr=False)
    """The ring of the process, if this has the records of one of its threads."""

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
        """What its process does now; unknown if it is, or was, on another host."""
        return state_of_writer(self.header)

    @property
    def clock(self) -> str:
        """Which monotonic clock its times are on: ranks of one host share it."""
        return str(self.header["clock"])

    @property
    def lost(self) -> int:
        """How many records were overwritten by later ones."""
        if self.part_of is not None:
            return self.part_of.lost
        return self.records[0].number if self.records else 0

    def wall_time(self, time: int) -> float:
        """A time of a record as seconds since 1970, by the clock of the rank's host when the recorder was started."""
        return float(self.header["started_wall"] + time - self.header["started"]) / 1e9

    def of_kind(self, *kinds: RecordKind) -> Iterator[Record]:
        """The records of these kinds, in order."""
        return (record for record in self.records if record.kind in kinds)


def state_of_writer(header: Mapping[str, Any]) -> ProcessState:
    """What the process that wrote a ring with this header does now; unknown if it is, or was, on another host."""
    if header["clock"] != clock_identity():
        return ProcessState.UNKNOWN
    return process_state(int(header["pid"]), str(header["process_start"]))


def read_ring(path: str | os.PathLike[str]) -> Ring:
    """Read a ring.

    A record that is being written at this moment is left out, as is what a newer version of gradwire may have added, and what is
    damaged.
    """
    with RingFile(Path(path)) as file:
        records = file.without_strays(sorted(file.read(0, file.capacity)))
        descriptions = file.read_descriptions()
        return Ring(file.path, file.header, records, descriptions, file.damage)


class RingFile:
    """A ring that is open for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bad_facts: list[str] = []
        self._bad_slots: set[int] = set()
        self._bad_lines = 0
        self._unknown: set[int] = set()
        """Names that records refer to and that are not there."""
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            page = os.pread(self._fd, PAGE, 0)
            magic, version, size, capacity, length = (
                HEADER.unpack_from(page) if len(page) == PAGE else (b"", 0, 0, 0, 0)
            )
            if magic != MAGIC:
                raise UsageError(f"{path} is not a ring of gradwire's flight recorder.")
            if version != VERSION or size != RECORD.size:
                raise UsageError(
                    f"{path} was written by another version of gradwire (format {version}; this one reads {VERSION})."
                )
            self._read_header(page[HEADER.size : HEADER.size + length])
            self._find_capacity(capacity, os.fstat(self._fd).st_size)
        except BaseException:
            os.close(self._fd)
            raise
        self._names: dict[int, str] = {}
        self._names_read = 0
        self._descriptions: dict[str, list[dict[str, Any]]] = {}

    def _read_header(self, text: bytes) -> None:
        try:
            found = checked_header(json.loads(text))
        except (ValueError, RecursionError):
            found = None
        if found is None:
            raise UsageError(f"{self.path} has a damaged header.")
        self.header, self._bad_facts = found
        named = _FILE_NAME.fullmatch(self.path.name)
        if named is not None and int(named[1]) != self.header["rank"]:
            self._bad_facts.append("rank")
            self.header["rank"] = int(named[1])
            self.header["size"] = max(self.header["size"], int(named[1]) + 1)

    def _find_capacity(self, stated: int, size: int) -> None:
        capacity = real_capacity(stated, size, PAGE)
        if capacity is None:
            raise UsageError(f"{self.path} has a damaged header.")
        self.capacity = capacity
        self._is_cut = capacity != stated or size < PAGE + capacity * RECORD.size

    @property
    def damage(self) -> dict[str, str]:
        """By the name of a file: what of it could not be read so far."""
        ring = [f"{', '.join(self._bad_facts)} in its header"] if self._bad_facts else []
        ring += ["a part of the file is missing"] if self._is_cut else []
        ring += [f"{len(self._bad_slots)} of its records"] if self._bad_slots else []
        names = [f"{self._bad_lines} of its lines"] if self._bad_lines else []
        names += [f"{len(self._unknown)} names are missing"] if self._unknown else []
        found = {self.path.name: ring, names_path(self.path).name: names}
        return {name: f"damaged: {', '.join(what)}" for name, what in found.items() if what}

    def without_strays(self, records: list[Record]) -> list[Record]:
        """Records without those whose numbers are damaged: all numbers of a ring lie within its capacity."""
        if not records:
            return records
        middle = records[len(records) // 2].number
        strays = {record.number for record in records if abs(record.number - middle) > self.capacity}
        self._bad_slots |= {number % self.capacity for number in strays}
        return [record for record in records if record.number not in strays] if strays else records

    def read(self, slot: int, count: int, *, least: int = 0) -> list[Record]:
        """The valid records from number `least` on in `count` slots from `slot` on, in their order, which does not wrap."""
        data = os.pread(self._fd, count * RECORD.size, PAGE + slot * RECORD.size)
        data = data[: len(data) // RECORD.size * RECORD.size]  # of a file that was cut
        ops, started = self.header["ops"], self.header["started"]
        records = []
        for i, fields in enumerate(RECORD.iter_unpack(data)):
            number, time, code, op, rank, thread, group, label, *rest = fields
            kind = _KINDS.get(code)
            if kind is None or number < least:
                continue
            if number % self.capacity != slot + i or not is_possible(time, rest[3], (rest[4], rest[5]), started):
                self._bad_slots.add(slot + i)
                continue
            on_device, op = op & ON_DEVICE, op & ~ON_DEVICE
            name = ops[op] if kind in COLLECTIVES and op < len(ops) else ""
            record = Record(number, time, kind, name, rank, thread, self._name(group), self._name(label), *rest)
            if name in _P2P:
                peer, message = unpack_message(record.ordinal)
                record = record._replace(ordinal=0, peer=peer, message=message)
            records.append(record._replace(on_device=True) if on_device else record)
        return records

    def newest(self) -> int:
        """The number of the newest record; or of an earlier one, where records before it were never written."""
        first = self._number(0)
        low, high = 0, self.capacity - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._number(middle) < max(first, 1):
                high = middle - 1
            else:
                low = middle
        return self._number(low)

    def has(self, number: int) -> bool:
        """Whether a record of this number or a later one is in its slot."""
        return self._number(number % self.capacity) >= number

    def _number(self, slot: int) -> int:
        """The number of the record in a slot; -1 if there is none."""
        data = os.pread(self._fd, RECORD.size, PAGE + slot * RECORD.size)
        if len(data) < RECORD.size:  # of a file that was cut
            return -1
        number, _, kind, *_ = RECORD.unpack(data)
        return int(number) if kind and number % self.capacity == slot else -1

    def _name(self, number: int) -> str:
        if number not in self._names and number not in self._unknown:
            self._read_names()
            if number not in self._names:
                self._unknown.add(number)
        return self._names.get(number, _UNKNOWN)

    def read_descriptions(self) -> dict[str, list[dict[str, Any]]]:
        """What records refer to, by subject, as far as it was written: see `FlightRecorder.describe`."""
        self._read_names()
        return self._descriptions

    def _read_names(self) -> None:
        try:
            with names_path(self.path).open("rb") as file:
                file.seek(self._names_read)
                lines = file.read().split(b"\n")[:-1]  # the last one is empty, or half written
        except OSError:
            return
        for line in lines:
            self._names_read += len(line) + 1
            number, _, text = line.partition(b" ")
            subject = number.decode(errors="replace")
            try:
                said = json.loads(text)
                if number.isdigit() and isinstance(said, str):
                    self._names[int(number)] = said
                    self._unknown.discard(int(number))
                elif not number.isdigit() and is_good_description(subject, said):
                    self._descriptions.setdefault(subject, []).append(said)
                else:
                    self._bad_lines += 1
            except (ValueError, RecursionError):  # also of a disk that was full
                self._bad_lines += 1

    def state(self) -> ProcessState:
        """As `Ring.state`."""
        return state_of_writer(self.header)

    def is_replaced(self) -> bool:
        """Whether another ring has taken its path, or none is there any more."""
        try:
            return not os.path.samestat(os.fstat(self._fd), self.path.stat())
        except OSError:
            return True

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __enter__(self) -> RingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_rings(directory: str | os.PathLike[str]) -> list[Ring]:
    """The rings of all ranks of a run, by rank. Warns of files that are damaged; what can be read of them is returned."""
    rings, damage = load_rings(Path(directory))
    for name, what in damage.items():
        warnings.warn(f"{Path(directory) / name}: {what}", RuntimeWarning, stacklevel=2)
    return rings


def load_rings(directory: Path) -> tuple[list[Ring], dict[str, str]]:
    """As `read_rings`, and by the name of a file what of it could not be read."""
    rings: list[Ring] = []
    damage: dict[str, str] = {}
    for path in sorted(directory.glob("rank-*.ring")):
        try:
            rings.append(read_ring(path))
            damage |= rings[-1].damage
        except (OSError, UsageError) as error:
            damage[path.name] = f"left out: {error}"
    if not rings:
        raise nothing_recorded(directory, *damage.values())
    return sorted(rings, key=lambda ring: ring.rank), damage


def nothing_recorded(directory: str | os.PathLike[str], *reasons: str) -> UsageError:
    """The error of a command that is given a directory without records; `reasons` are those of files that cannot be read."""
    why = "".join(f" {reason}" for reason in reasons)
    outcome = load(Path(directory))
    if outcome is not None:
        how = f": {outcome.text}" if outcome.text else ""
        return UsageError(
            f"{directory}: no rank of this run was recorded.{why} It has ended{how}. Ranks are recorded from gw.init() on, or, "
            "with `gradwire run --observe`, from their start."
        )
    return UsageError(
        f"{directory}: no flight recorder has written here.{why} Name the directory of a run: `gradwire run --run-dir DIR` makes "
        "one, as does gradwire.observe.start(DIR)."
    )
