"""The format of a ring: its header, its records, and the file of names next to it. Shared by the writer and the readers; no torch.

Note [Format]
A ring is a page of header, `HEADER` and then JSON, followed by records. Record number n is in slot n modulo the capacity, and a
slot is valid if its number leads there and its kind is not 0. The kind is written last: readers are other processes, and without
that they would see records of which half is missing. Text (groups, labels, errors) is written once, to a file next to the ring:
one line per text, its number and a JSON string. Records hold the number. Number 0 is the empty string. A line that begins with a
word describes what records refer to, as a JSON object: see `FlightRecorder.describe`.

Note [Identities]
`group_id` is the same on all ranks of a group and differs between any two groups of a run, whatever their names: see
`Ledger.group_id`. `model` numbers the models over one group, from 1, in the order in which they were wrapped, which is the same on
all ranks; 0 means none. `ordinal` numbers the collectives of a group, the same on all ranks; of a send or a receive it has the
tag and which message with that tag it is between the two ranks. So a record can be matched with those of other ranks by equality.
"""

from __future__ import annotations

import functools
import struct
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"GWFLIGHT"
VERSION = 3
HEADER = struct.Struct("<8sIIII")
"""Magic, version, bytes per record, records, length of the JSON that follows."""
PAGE = 4096
CAPACITY = 65536

FIELDS = {
    "number": "Q",
    "time": "Q",
    "group_id": "Q",
    "ordinal": "Q",
    "nbytes": "Q",
    "duration": "Q",
    "thread": "I",
    "group": "I",
    "label": "I",
    "seq": "I",
    "step": "i",
    "bucket": "i",
    "kind": "B",
    "op": "B",
    "rank": "H",
    "peer": "H",
    "model": "H",
}
"""The fields of a record, with their formats. Times are nanoseconds on the monotonic clock that a host's processes share."""
RECORD = struct.Struct("<" + "".join(FIELDS.values()))
KIND_OFFSET = 72
NO_PEER = (1 << 16) - 1
ON_DEVICE = 1 << 7
"""Added to the operation in records of submissions whose tensors are not in the host's memory."""
EPOCH_SHIFT = 40
"""The bits of an ordinal from here on count recoveries of the group; those below count collectives."""


class RecordKind(IntEnum):
    """What a record is about. 0 is an empty slot."""

    COLLECTIVE_SUBMITTED = 1
    COLLECTIVE_STARTED = 2
    COLLECTIVE_FINISHED = 3
    """`duration` counts from submission."""
    COLLECTIVE_FAILED = 4
    """`label` is the error."""
    FORWARD_BEGAN = 5
    FORWARD_ENDED = 6
    BUCKET_FULL = 7
    BUCKET_LAUNCHED = 8
    BUCKET_REDUCED = 9
    BACKWARD_ENDED = 10
    STEP_ENDED = 11
    STEP_FAILED = 12
    """`label` is the error."""
    OPTIMIZER_BEGAN = 13
    OPTIMIZER_ENDED = 14
    GROUP = 15
    """This rank takes part in a group of `nbytes` ranks."""
    MARK = 16
    """A note of the user's: `gradwire.observe.mark`."""
    COLLECTIVE_WAITED = 17
    """A caller waits for a collective that has not finished. Operations without this record run in the background."""
    WARNING = 18
    """`label` is what a check has found: see `writer.warn`."""
    SAMPLES = 19
    """This rank has processed `nbytes` more samples: `gradwire.observe.samples`."""
    VIEW = 20
    """This process has entered a view of an elastic run, number `ordinal`, as one of `nbytes` ranks, after `step` steps."""
    STEP_COMMITTED = 21
    """All ranks of the view have committed this step of an elastic run."""


@functools.cache
def record_dtype() -> np.dtype[Any]:
    """`RECORD` as a structured type. numpy is imported here, so that the launcher can start without it."""
    import numpy as np

    return np.dtype([(name, f"<{code}") for name, code in FIELDS.items()])


def names_path(path: Path) -> Path:
    """The file of a ring's names."""
    return path.with_suffix(".names")


def message_number(tag: int, count: int) -> int:
    """What identifies a message between two ranks of a group: its tag, and how many with that tag were sent before.

    >>> hex(message_number(7, 2))
    '0x700000002'
    """
    return (tag & 0xFFFFFFFF) << 32 | count & 0xFFFFFFFF
