"""Dumps that torch's flight recorder analyzer (`torchfrtrace`) reads, from rings of any kind of group. Pure but for the files.

Note [What the analyzer compares]
It matches the n-th collectives of a process group over all ranks, and reports ranks that are missing, and differences in kind,
size and state. Collectives have the same ordinal on all ranks, which becomes the sequence number. It expects all members of a group
to take part in everything, so the messages from one rank to another become a group of their own. Sizes are in bytes, and only those
of operations whose sizes must be equal. Operations before the first one that all members have recorded are left out, as are those
of groups that share a name: they cannot be matched. Before torch 2.15 the analyzer refuses engines whose names it does not know, so
everything but torch's own engines is called gloo, and before 2.12, where it knows NCCL and XCCL only, nccl. The description of the
group has its kind.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradwire.observe.rings.clocks import aligned, ambiguous_groups
from gradwire.observe.rings.intervals import Operation, operations, ranks_apart
from gradwire.observe.rings.ring import Ring
from gradwire.recorder.flight_recorder import RecordKind

PREFIX = "gradwire_trace_rank_"
_VERSION = "2.10"
_ENGINES = ("gloo", "nccl", "xccl")
"""Names of torch's backends that the analyzer knows; the first stands for all others."""
_OLD_ENGINES = ("nccl", "xccl")
"""Before torch 2.12."""
_NAMES = {
    "all_gather_into_tensor": "_all_gather_base",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "all_to_all_single": "all_to_all",
    "barrier": "all_reduce_barrier",  # NCCL's name, the only one before torch 2.12
}
_EQUAL_SIZES = frozenset({"all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor"})
Dump = dict[str, Any]


@dataclass(slots=True)
class _Rank:
    """The operations of one rank of the world that can be matched."""

    rank: int
    found: list[Operation]
    members: dict[str, int] = field(default_factory=dict)
    """By group: its rank there."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A group that operations can be matched in."""

    ranks: list[int]
    """In the world, in the order of the group, as far as they are recorded."""
    kind: str = ""
    engines: Mapping[str, str] = field(default_factory=dict)
    known: Sequence[str] = _ENGINES

    def engine(self, one: Operation) -> str:
        """What the analyzer calls the engine of an operation."""
        devices = sorted(self.engines.keys() - {"cpu"}) if one.on_device else ["cpu"]
        return next((name for d in devices if (name := self.engines.get(d, "")) in self.known), self.known[0])

    def description(self, name: str) -> str:
        """Its name and kind."""
        return f"{name} ({self.kind})" if self.kind else name


def write_dumps(rings: Sequence[Ring], directory: Path) -> tuple[int, int]:
    """Write a dump for each rank into `directory`; returns how many operations they have, and how many were left out."""
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob(f"{PREFIX}*"):
        old.unlink()
    made, left_out = dumps(rings)
    for rank, dump in made.items():
        (directory / f"{PREFIX}{rank}").write_bytes(pickle.dumps(dump))
    return sum(len(dump["entries"]) for dump in made.values()), left_out


def dumps(rings: Sequence[Ring]) -> tuple[dict[int, Dump], int]:
    """The dumps by rank, and how many operations were left out."""
    rings = aligned(ranks_apart(rings))
    doubtful = ambiguous_groups(rings)
    wall = int(rings[0].header["started_wall"]) - int(rings[0].header["started"])
    ranks, total = [], 0
    for ring in rings:
        every = operations(_of_latest_groups(ring))
        total += len(operations(ring.records))
        kept = [one for one in every if one.group not in doubtful and (one.ordinal or one.peer >= 0)]
        members = {one.group: one.rank for one in every}
        members |= {str(d["name"]): int(d["rank"]) for d in ring.descriptions.get("group", []) if "rank" in d}
        ranks.append(_Rank(ring.rank, kept, members))
    _cut(ranks)
    groups = _groups(ranks, rings, doubtful)
    made = {rank.rank: _dump(rank, groups, wall) for rank in ranks}
    return made, total - sum(len(dump["entries"]) for dump in made.values())


def _of_latest_groups(ring: Ring) -> Iterable[Any]:
    """The records without those of groups that were closed and made again under the same name: they count from 1 again."""
    latest = {record.group: record.number for record in ring.of_kind(RecordKind.GROUP)}
    return [record for record in ring.records if record.number >= latest.get(record.group, 0)]


def _cut(ranks: Sequence[_Rank]) -> None:
    """Leave out what some member of the group has not recorded any more: see Note [What the analyzer compares]."""
    first: dict[str, int] = {}
    for rank in ranks:
        own: dict[str, int] = {}
        for one in rank.found:
            if one.ordinal:
                own[one.group] = min(one.ordinal, own.get(one.group, one.ordinal))
        first |= {group: max(ordinal, first.get(group, 0)) for group, ordinal in own.items()}
    ends: dict[tuple[str, int, int, int], set[str]] = {}
    for rank in ranks:
        for one in rank.found:
            if not one.ordinal:
                ends.setdefault(_message(one), set()).add(one.op)
    for rank in ranks:
        rank.found = [
            one
            for one in rank.found
            if (one.ordinal and one.ordinal >= first[one.group])
            or (not one.ordinal and (one.ended is None or len(ends[_message(one)]) == 2))
        ]


def _message(one: Operation) -> tuple[str, int, int, int]:
    sender, receiver = (one.rank, one.peer) if one.op == "send" else (one.peer, one.rank)
    return one.group, sender, receiver, one.message


def _groups(ranks: Sequence[_Rank], rings: Sequence[Ring], doubtful: set[str]) -> dict[str, _Group]:
    """The groups by name."""
    found: dict[str, dict[int, int]] = {}
    for rank in ranks:
        for group, number in rank.members.items():
            if group not in doubtful:
                found.setdefault(group, {})[number] = rank.rank
    world = max(int(ring.header["size"]) for ring in rings)
    facts: dict[str, dict[str, Any]] = {}
    for ring in rings:
        for described in ring.descriptions.get("group", []):
            facts.setdefault(described["name"], {}).update(described)
    known = _OLD_ENGINES if _is_old(str(rings[0].header["torch"])) else _ENGINES
    groups = {}
    for group, numbers in found.items():
        own = facts.get(group, {})
        members = list(range(world)) if own.get("size") == world else [numbers[i] for i in sorted(numbers)]
        groups[group] = _Group(members, own.get("kind", ""), own.get("engines", {}), known)
    return groups


def _is_old(torch: str) -> bool:
    """Whether this is a version of torch before 2.12. A version that cannot be read is not.

    >>> _is_old("2.11.0+cu130"), _is_old("2.12.0"), _is_old("?")
    (True, False, False)
    """
    numbers = re.match(r"(\d{1,6})\.(\d{1,6})", torch)
    return numbers is not None and tuple(map(int, numbers.groups())) < (2, 12)


def _dump(rank: _Rank, groups: dict[str, _Group], wall: int) -> Dump:
    """`wall` is what makes times nanoseconds since 1970."""
    entries: list[Dump] = []
    config: dict[str, Dump] = {}
    status: dict[str, Dump] = {}
    for one in rank.found:
        name, ranks, what = _group_of(one, groups)
        if rank.rank not in ranks:
            continue
        description = groups[one.group].description(one.group)
        config[name] = {"name": name, "desc": description, "ranks": str(ranks)}
        entry = _entry(len(entries), one, (name, description), what, len(ranks))
        for key in ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns"):
            entry[key] = None if entry[key] is None else entry[key] + wall
        entries.append(entry)
        last = status.setdefault(
            name,
            {"last_enqueued_collective": -1, "last_started_collective": -1, "last_completed_collective": -1},
        )
        number = entry["collective_seq_id"]
        last["last_enqueued_collective"] = number
        if entry["state"] != "scheduled":
            last["last_started_collective"] = number
        if entry["state"] == "completed":
            last["last_completed_collective"] = number
    for name, group in groups.items():  # a rank that has submitted nothing is a member all the same
        if rank.rank in group.ranks:
            config.setdefault(name, {"name": name, "desc": group.description(name), "ranks": str(group.ranks)})
    return {"version": _VERSION, "entries": entries, "pg_config": config, "pg_status": status, "rank": rank.rank}


def _group_of(one: Operation, groups: dict[str, _Group]) -> tuple[str, list[int], str]:
    """The group of an operation, its ranks in the world, and what the analyzer calls the operation."""
    members, engine = groups[one.group].ranks, groups[one.group].engine(one)
    if one.ordinal:
        return one.group, members, f"{engine}:{_NAMES.get(one.op, one.op)}"
    _, sender, receiver, _ = _message(one)
    pair = [members[rank] for rank in (sender, receiver) if rank < len(members)]
    places = {rank: place for place, rank in enumerate(sorted(pair))}
    a, b = (places[rank] for rank in pair) if len(pair) == 2 else (0, 0)
    arrow = f"{a}->{b}" if one.op == "send" else f"{b}<-{a}"
    return f"{one.group}: {sender} to {receiver}", sorted(pair), f"{engine}:{one.op} {arrow}"


def _entry(number: int, one: Operation, group: tuple[str, str], what: str, size: int) -> Dump:
    sizes = [one.nbytes] if one.op in _EQUAL_SIZES or not one.ordinal else [0]
    outputs = {"all_gather_into_tensor": [one.nbytes * size], "reduce_scatter_tensor": [one.nbytes // size]}
    sequence = one.ordinal or one.message + 1
    done = one.ended is not None and not one.error
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": group,
        "collective_seq_id": sequence,
        "p2p_seq_id": 0 if one.ordinal else sequence,
        "op_id": one.seq,
        "profiling_name": what,
        "time_created_ns": one.submitted,
        "time_discovered_started_ns": one.started,
        "time_discovered_completed_ns": one.ended if done else None,
        "duration_ms": (one.ended - (one.started or one.submitted)) / 1e6 if one.ended is not None and done else None,
        "input_sizes": [sizes],
        "input_dtypes": ["Byte"],
        "output_sizes": [outputs.get(one.op, sizes)],
        "output_dtypes": ["Byte"],
        "state": "completed" if done else "scheduled" if one.started is None else "started",
        "timeout_ms": 0,
        "is_p2p": not one.ordinal,
        "retired": one.ended is not None,
        "frames": [],
        "gradwire": {
            "label": one.label,
            "bytes": one.nbytes,
            "step": one.step,
            "bucket": one.bucket,
            "error": one.error,
        },
    }
