"""Checks of what is read from the files of a recorder, any byte of which may be damaged or missing. Pure.

What passes has the types and ranges that all readers of rings rely on; the rest is left out. A value that is wrong but possible is
not detected: records have no checksums, which would cost as much as the record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gradwire.recorder.flight_recorder import RECORD

_YEAR = 365 * 86400 * 10**9
_BEFORE, _AFTER = _YEAR, 20 * _YEAR
"""How long before and after the start of the recorder records may be, in nanoseconds."""
_MOST_RANKS = 1 << 20
_LARGEST = 1 << 62
_MOST_RECORDS = 1 << 26


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_text_by_text(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


def _is_time(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1 << 61


def _is_buckets(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) and _fits(one, _BUCKET, _BUCKET_MORE) for one in value)


Checks = Mapping[str, Callable[[Any], bool]]
_REQUIRED: Checks = {
    "rank": lambda value: _is_count(value) and value < _MOST_RANKS,
    "clock": _is_text,
    "started": _is_time,
    "started_wall": _is_time,
    "ops": _is_texts,
}
"""What no ring can be read without."""
_OTHERS: Mapping[str, tuple[Callable[[Any], bool], Any]] = {
    "size": (lambda value: _is_count(value) and value <= _MOST_RANKS, 0),
    "pid": (_is_count, 0),
    "process_start": (_is_text, "?"),
    "host": (_is_text, "?"),
    "main_thread": (_is_count, 0),
    "libraries": (_is_texts, []),
    "python": (_is_text, "?"),
    "torch": (_is_text, "?"),
    "gradwire": (_is_text, "?"),
    "command": (_is_text, ""),
}
"""What else a header has, and what is taken where it is damaged."""
_BUCKET: Checks = {"bytes": _is_count, "names": _is_texts}
_BUCKET_MORE: Checks = {"dtype": _is_text, "device": _is_text, "parameters": _is_count}
_DESCRIPTIONS: Mapping[str, tuple[Checks, Checks]] = {
    "group": (
        {"name": _is_text},
        {"kind": _is_text, "rank": _is_count, "size": _is_count, "engines": _is_text_by_text},
    ),
    "buckets": ({"group": _is_text, "buckets": _is_buckets}, {"rank": _is_count}),
    "warning": ({"text": _is_text, "step": _is_number, "time": _is_time}, {}),
    "system": ({}, {"system": _is_text, "cpus": _is_count, "threads": _is_count}),
    "end": ({"time": _is_time}, {}),
    "questions": ({"descriptor": _is_count, "inode": _is_count}, {}),
}
"""By subject: what its descriptions must have, and may have."""


def _fits(facts: Mapping[str, Any], required: Checks, optional: Checks) -> bool:
    return all(name in facts and check(facts[name]) for name, check in required.items()) and all(
        name not in facts or check(facts[name]) for name, check in optional.items()
    )


def checked_header(header: object) -> tuple[dict[str, Any], list[str]] | None:
    """A header with what is damaged in it replaced, and the names of that; None if it is of no use.

    >>> checked_header({"rank": 0, "clock": "a", "started": 1, "started_wall": 2, "ops": [], "pid": "x"})[1]
    ['pid']
    """
    if not isinstance(header, dict) or not _fits(header, _REQUIRED, {}):
        return None
    damaged = [name for name, (check, _) in _OTHERS.items() if name in header and not check(header[name])]
    whole = {**header, **{name: _OTHERS[name][1] for name in damaged}}
    filled = {name: default for name, (_, default) in _OTHERS.items() if name not in whole}
    whole |= filled
    whole["size"] = max(int(whole["size"]), int(whole["rank"]) + 1)
    return whole, damaged


def is_good_description(subject: str, facts: object) -> bool:
    """Whether a description has what readers expect of its subject. Of subjects that are not known, nothing is expected."""
    required, optional = _DESCRIPTIONS.get(subject, ({}, {}))
    return isinstance(facts, dict) and _fits(facts, required, optional)


def is_possible(time: int, duration: int, place: tuple[int, int], started: int) -> bool:
    """Whether a record may have this time, duration, and `place`: its step and bucket."""
    return -_BEFORE < time - started < _AFTER and duration < _AFTER and min(place) >= -1


def real_capacity(stated: int, size: int, page: int) -> int | None:
    """How many records a ring has, by its header and by the size of its file; None if neither can be.

    A file that was cut has fewer slots than its header says, and a damaged header says anything.

    >>> (
    ...     real_capacity(16, 4096 + 16 * 64, 4096),
    ...     real_capacity(16, 4096 + 10 * 64, 4096),
    ...     real_capacity(17, 4096 + 16 * 64, 4096),
    ... )
    (16, 16, 16)
    """
    slots = (size - page) // RECORD.size
    if slots != stated and _is_capacity(slots) and (not _is_capacity(stated) or slots > stated):
        return slots
    return stated if _is_capacity(stated) else None


def _is_capacity(number: int) -> bool:
    return 0 < number <= _MOST_RECORDS and number & (number - 1) == 0
