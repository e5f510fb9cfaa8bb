"""Reads the rings that flight recorders write: of a process that runs, hangs, or is gone. Without torch.

A file that cannot be read gives one error that names it. Records and lines that are incomplete are skipped: a rank may have been
killed while it wrote, and the disk may have been full.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gradwire.errors import UsageError
from gradwire.observe.rings.run_outcome import load
from gradwire.observe.units import printable
from gradwire.recorder.format import (
    HEADER,
    MAGIC,
    NO_PEER,
    ON_DEVICE,
    PAGE,
    RECORD,
    VERSION,
    RecordKind,
    names_path,
    record_dtype,
)
from gradwire.runtime.cleanup import on_failure
from gradwire.runtime.host import ProcessState, clock_identity, process_state

if TYPE_CHECKING:
    import numpy as np

_UNKNOWN = "?"
_KEPT_RINGS = 8
_P2P = frozenset({"send", "recv"})
_KINDS: tuple[Any, ...] = (None, *RecordKind)
"""By number. Kinds count from 1 without a gap."""
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
    """The group's name, for people: several groups may have the same."""
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
    """Of a send or a receive: its tag and number between these two ranks; both have the same."""
    on_device: bool = False
    """Of a submission: whether its tensors are in the memory of a device, such as a GPU."""
    group_id: int = 0
    """The group's identity: the same on all its ranks, and no other group's. 0: none."""
    model: int = 0
    """The number of the model among those over the group, the same on all ranks. 0: none."""

    @property
    def operation(self) -> tuple[int, int, int]:
        """Which operation it is of: its group, the rank in it (threads of one process may be several), and its number there."""
        return self.group_id, self.rank, self.seq


def message_key(record: Record) -> tuple[int, int, int, int]:
    """The message that a send or a receive is of: group, sender, receiver and number, the same on both ranks."""
    sender, receiver = (record.rank, record.peer) if record.op == "send" else (record.peer, record.rank)
    return record.group_id, sender, receiver, record.message


@dataclass(frozen=True)
class Ring:
    """What was read from the ring of one rank."""

    path: Path
    header: dict[str, Any]
    records: list[Record] = field(repr=False)
    """Oldest first, without gaps, except where the ring was written to while it was read."""
    descriptions: dict[str, list[dict[str, Any]]] = field(default_factory=dict, repr=False)
    """By subject, oldest first: see `FlightRecorder.describe`."""
    lost: int = 0
    """How many records were overwritten by later ones."""

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

    def of_kind(self, *kinds: RecordKind) -> Iterator[Record]:
        """The records of these kinds, in order."""
        return (record for record in self.records if record.kind in kinds)


def state_of_writer(header: Mapping[str, Any]) -> ProcessState:
    """What the process that wrote a ring with this header does now; unknown if it is, or was, on another host."""
    if header["clock"] != clock_identity():
        return ProcessState.UNKNOWN
    return process_state(int(header["pid"]), str(header["process_start"]))


def read_ring(path: str | os.PathLike[str]) -> Ring:
    """Read a ring. A record that is being written at this moment is left out. UsageError if the file is damaged."""
    import numpy as np

    with RingFile(Path(path)) as file:
        rows = file.read(0, file.capacity)
        records = file.records(rows[np.argsort(rows["number"])])
        file.read_names()
        return Ring(file.path, file.header, records, file.descriptions, lost=records[0].number if records else 0)


class RingFile(AbstractContextManager["RingFile"]):
    """A ring that is open for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with on_failure(os.close, self._fd):
            page = os.pread(self._fd, PAGE, 0)
            if len(page) < PAGE or not page.startswith(MAGIC):
                raise UsageError(f"{path} is not a ring of gradwire's flight recorder.")
            _, version, size, self.capacity, length = HEADER.unpack_from(page)
            if version != VERSION or size != RECORD.size:
                raise UsageError(
                    f"{path} was written by another version of gradwire (format {version}; this one reads {VERSION})."
                )
            try:
                self.header = _header(page[HEADER.size : HEADER.size + length])
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise UsageError(f"{path} is damaged: its header cannot be read ({error}).") from None
            expected = PAGE + self.capacity * size
            if os.fstat(self._fd).st_size != expected or self.capacity < 1 or self.capacity & (self.capacity - 1):
                raise UsageError(f"{path} is damaged: {self.capacity} records in {os.fstat(self._fd).st_size} bytes.")
        self._names: dict[int, str] = {0: ""}
        self._names_read = 0
        self.descriptions: dict[str, list[dict[str, Any]]] = {}
        """What records refer to, by subject, as far as it was read: see `read_names`."""

    def read(self, slot: int, count: int, *, least: int = 0) -> np.ndarray:
        """The valid records from number `least` on in `count` slots from `slot` on, in their order, which does not wrap."""
        import numpy as np  # not before: the launcher starts without it

        size = RECORD.size
        rows = np.frombuffer(os.pread(self._fd, count * size, PAGE + slot * size), record_dtype())
        numbers, kinds = rows["number"], rows["kind"]
        valid = (kinds > 0) & (kinds < len(_KINDS)) & (numbers >= least)
        valid &= numbers % self.capacity == np.arange(slot, slot + len(rows), dtype=np.uint64)
        return rows if valid.all() else rows[valid]

    def records(self, rows: np.ndarray) -> list[Record]:
        """Rows of the file as records."""
        ops, names = self.header["ops"], self._names
        if not {*rows["group"].tolist(), *rows["label"].tolist()} <= names.keys():
            self.read_names()
        found = []
        for row in rows.tolist():
            number, time, group_id, ordinal, nbytes, duration, thread, group, label, seq, step, bucket, *rest = row
            code, op, rank, peer, model = rest
            kind, on_device, name, message, other = _KINDS[code], False, "", -1, -1
            if kind in COLLECTIVES:
                on_device, op = op >= ON_DEVICE, op % ON_DEVICE
                name = ops[op] if op < len(ops) else ""
                if name in _P2P:
                    message, other = (ordinal, peer) if peer != NO_PEER else (-1, -1)
                    ordinal = 0
            text, what = names.get(group, _UNKNOWN), names.get(label, _UNKNOWN)
            found.append(
                Record(number, time, kind, name, rank, thread, text, what, seq, ordinal, nbytes, duration, step, bucket,
                       other, message, on_device, group_id, model)
            )  # fmt: skip
        return found

    def newest(self) -> int:
        """The number of the newest record; -1 if there is none."""
        numbers = self.read(0, self.capacity)["number"]
        return int(numbers.max()) if len(numbers) else -1

    def read_names(self) -> None:
        """Read what was written to the file of names since the last time: names, and descriptions."""
        try:
            with names_path(self.path).open("rb") as file:
                file.seek(self._names_read)
                lines = file.read().split(b"\n")[:-1]  # the last one is empty, or half written
        except OSError:
            return
        for line in lines:
            self._names_read += len(line) + 1
            subject, _, text = line.partition(b" ")
            try:
                value = printable(json.loads(text))
            except (ValueError, RecursionError):  # a disk that was full
                continue
            if subject.isdigit() and isinstance(value, str):
                self._names[int(subject)] = value
            elif isinstance(value, dict):
                self.descriptions.setdefault(subject.decode(errors="replace"), []).append(value)

    def is_replaced(self) -> bool:
        """Whether another ring has taken its path, or none is there any more."""
        try:
            return not os.path.samestat(os.fstat(self._fd), self.path.stat())
        except OSError:
            return True

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __exit__(self, *_: object) -> None:
        self.close()


_DEFAULTS = dict.fromkeys(("process_start", "host", "python", "torch", "gradwire"), _UNKNOWN)


def _header(text: bytes) -> dict[str, Any]:
    """The facts of a header; raises if it lacks what readers need."""
    numbers = dict.fromkeys(("size", "pid", "main_thread"), 0)
    header = {**_DEFAULTS, **numbers, "libraries": [], "command": "", **printable(json.loads(text))}
    header |= {name: int(header[name]) for name in (*numbers, "rank", "started", "started_wall")}
    header |= {name: str(header[name]) for name in (*_DEFAULTS, "clock", "command")}
    header |= {name: [str(one) for one in header[name]] for name in ("ops", "libraries")}
    if header["rank"] < 0:
        raise ValueError(f"rank {header['rank']}")
    header["size"] = max(header["size"], header["rank"] + 1)
    return header


def read_rings(directory: str | os.PathLike[str]) -> list[Ring]:
    """The rings of all ranks of a run, by rank. Warns of files that cannot be read, which are left out."""
    rings, left_out = load_rings(Path(directory))
    for name, why in left_out.items():
        warnings.warn(f"{Path(directory) / name}: {why}", RuntimeWarning, stacklevel=2)
    return rings


def load_rings(directory: Path) -> tuple[list[Ring], dict[str, str]]:
    """As `read_rings`, and by the name of a file why it is left out."""
    headers, left_out = read_headers(directory)
    return list(StoredRings(ranks_of_launchers(headers))), left_out


class StoredRings(Iterable[Ring]):
    """Rings that are read each time that they are gone through: 64 ranks have 4 million records. A few of them are kept."""

    def __init__(self, ranks: Mapping[Path, int]) -> None:
        """`ranks` are their numbers in reports: see `ranks_of_launchers`."""
        self._ranks = ranks
        self._read = lru_cache(_KEPT_RINGS)(read_ring)

    def __iter__(self) -> Iterator[Ring]:
        for path, rank in sorted(self._ranks.items(), key=itemgetter(1, 0)):
            ring = self._read(path)
            yield replace(ring, header={**ring.header, "rank": rank})


def read_headers(directory: Path) -> tuple[dict[Path, dict[str, Any]], dict[str, str]]:
    """The headers of the rings of a run, and by the name of a file why it is left out."""
    headers: dict[Path, dict[str, Any]] = {}
    left_out: dict[str, str] = {}
    for path in sorted(directory.glob("rank-*.ring")):
        try:
            with RingFile(path) as ring:
                headers[path] = ring.header
        except (OSError, UsageError) as error:
            left_out[path.name] = f"left out: {error}"
    if not headers:
        raise nothing_recorded(directory, *left_out.values())
    return headers, left_out


def ranks_of_launchers(headers: Mapping[Path, Mapping[str, Any]], first: str = "") -> dict[Path, int]:
    """By ring: its number in reports. Each launcher of an elastic run counts its processes from 0, so those of the others follow
    those of the launcher `first`, or else of the one whose rank was the first to record."""
    launchers: dict[str, list[Path]] = {}
    for path in sorted(headers, key=lambda path: int(headers[path]["started_wall"])):
        launchers.setdefault(str(headers[path].get("member", "")).rpartition("-")[0], []).append(path)
    ranks: dict[Path, int] = {}
    for launcher in sorted(launchers, key=lambda name: name != first):
        shift = max(ranks.values(), default=-1) + 1
        ranks |= {path: shift + int(headers[path]["rank"]) for path in launchers[launcher]}
    return ranks


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
