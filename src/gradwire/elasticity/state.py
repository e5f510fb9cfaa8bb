"""State on its way to another member or into a file: tensors as bytes, all else as JSON, and nothing is ever executed.

`pack` takes apart what `state_dict()`s are made of: dicts, lists, tuples, numbers, texts and tensors. `send` and `receive` bring it
to a member that joins, with a checksum for each tensor. `save` and `load` keep it in a safetensors file. A `SavedState` is what one
member has saved of a run, as a dict or in a file; those of all members together have what each owes.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import build
from gradwire.errors import GroupError, UsageError, UsageTypeError
from gradwire.groups.base import Group
from gradwire.runtime.cleanup import on_failure
from gradwire.runtime.warnings import warn_user

_PIECE, _PACED_PIECE = 2**24, 2**20
"""Bytes of a message: a member that receives needs no second copy of the whole."""
_TAG = 0x656C61
_ABOUT = "gradwire"
Source = Mapping[str, Any] | str | os.PathLike[str]


def pack(value: Any, tensors: list[Tensor], path: str = "state") -> Any:
    """`value` as JSON, in which tensors are their places in `tensors`.

    >>> tensors = []
    >>> pack({"step": 1, 0: (torch.ones(2),)}, tensors)
    ['dict', [['step', 1], [0, ['tuple', [['tensor', 0]]]]]]
    """
    if getattr(value, "ndim", None) == 0 and not isinstance(value, Tensor):
        value = value.item()  # a number of numpy's
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return ["tensor", len(tensors) - 1]
    if isinstance(value, Mapping):
        items = [[pack(k, tensors, path), pack(v, tensors, f"{path}[{k!r}]")] for k, v in value.items()]
        return ["counter" if isinstance(value, Counter) else "dict", items]
    if isinstance(value, list | tuple):
        parts = [pack(part, tensors, f"{path}[{i}]") for i, part in enumerate(value)]
        return ["list" if isinstance(value, list) else "tuple", parts]
    raise UsageTypeError(
        f"{path} is a {type(value).__name__}, which cannot travel to another member. Let state_dict() return numbers, texts, "
        "tensors, and dicts, lists and tuples of them."
    )


def unpack(packed: Any, tensors: Sequence[Tensor | None]) -> Any:
    """What `pack` was given."""
    if not isinstance(packed, list):
        return packed
    kind, parts = packed
    match kind:
        case "tensor":
            return tensors[parts]
        case "dict" | "counter":
            items = {unpack(key, tensors): unpack(part, tensors) for key, part in parts}
            return items if kind == "dict" else Counter(items)
        case "list":
            return [unpack(part, tensors) for part in parts]
        case "tuple":
            return tuple(unpack(part, tensors) for part in parts)
    raise GroupError(f"a state with a {kind!r} in it was received. All members need the same version of gradwire.")


def send(group: Group, rank: int, value: Any, *, pause: Callable[[float], object] | None = None) -> None:
    """Bring a state to a member, which calls `receive`. After each message `pause` is called with the seconds that it took: the
    other one calls with `paced`, and there are no other members."""
    rows = _rows(value)
    for row in (torch.tensor([rows[0].numel()], device="cpu").view(torch.uint8), *rows):
        for piece in row.split(_PIECE if pause is None else _PACED_PIECE) if row.numel() else ():
            began = time.monotonic()
            group.submit(build.send(piece, dst=rank, tag=_TAG, label="state")).wait()
            if pause is not None:
                group.barrier(label="state")  # to send may end when the message is in a buffer
                pause(time.monotonic() - began)


def receive(group: Group, rank: int, *, paced: bool = False) -> Any:
    """The state that this member sends."""

    def take(nbytes: int) -> Tensor:
        row = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        for piece in row.split(_PACED_PIECE if paced else _PIECE) if nbytes else ():
            group.submit(build.recv(piece, src=rank, tag=_TAG, label="state")).wait()
            if paced:
                group.barrier(label="state")
        return row

    found = _from_rows(take(int(take(8).view(torch.int64).item())), lambda _, nbytes: take(nbytes))
    if isinstance(found, int):
        raise GroupError(
            f"tensor {found} of the state from rank {rank} of {group}: the checksum differs. It is sent again."
        )
    return unpack(*found)


def copied(value: Any) -> Any:
    """A state whose tensors are copies on the CPU."""
    tensors: list[Tensor] = []
    packed = pack(value, tensors)
    return unpack(packed, [t.to("cpu", copy=True) for t in tensors])


def _rows(value: Any) -> list[Tensor]:
    """A state as bytes: what it is made of, and each of its tensors."""
    tensors: list[Tensor] = []
    packed = pack(value, tensors)
    rows = list(map(_bytes_of, tensors))
    about = [
        [str(t.dtype).removeprefix("torch."), list(t.shape), checksum(row)]
        for t, row in zip(tensors, rows, strict=True)
    ]
    return [torch.frombuffer(bytearray(json.dumps([packed, about]).encode()), dtype=torch.uint8), *rows]


def _from_rows(head: Tensor, take: Callable[[int, int], Tensor]) -> tuple[Any, list[Tensor]] | int:
    """What `unpack` takes, from rows that `take` gives by number and length; or the number of a tensor whose bytes have changed."""
    packed, about = json.loads(bytes(head.numpy()))
    tensors: list[Tensor] = []
    for number, (dtype, shape, before) in enumerate(about):
        like = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        row = take(number, like.nbytes)
        if checksum(row) != before:
            return number
        tensors.append(row.view(like.dtype).view(shape) if like.nbytes else like)
    return packed, tensors


def save(value: Any, path: Path) -> None:
    """Write a state into a file, which is there when all of it is."""
    rows, whole = _rows(value), path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    last = {row.untyped_storage().data_ptr(): number for number, row in enumerate(rows)}
    for number, row in enumerate(rows):  # a file has no tensors that share memory
        rows[number] = row if last[row.untyped_storage().data_ptr()] == number else row.clone()
    with on_failure(whole.unlink, missing_ok=True):
        whole.touch()
        mode = whole.stat().st_mode  # the library's own is for the owner alone
        safetensors("torch").save_file({_ABOUT: rows[0], **{str(n): row for n, row in enumerate(rows[1:])}}, whole)
        whole.chmod(mode)
        whole.replace(path)


def load(path: Path, *, whole: bool = True) -> Any:
    """The state in a file of `save`, with its tensors on the CPU; not `whole`: with None in their places."""
    advice = "Pass one that run.save() has written; of a file of torch.save, pass the dict that it holds."
    library = safetensors("")
    try:
        with library.safe_open(path, "pt") as file:
            if not whole:
                packed, about = json.loads(bytes(file.get_tensor(_ABOUT).numpy()))
                return unpack(packed, [None] * len(about))
            found = _from_rows(file.get_tensor(_ABOUT), lambda number, _: file.get_tensor(str(number)).clone())
    except (library.SafetensorError, OSError, ValueError) as error:
        raise UsageError(f"{path}: this file holds no state of a run ({error}). {advice}") from None
    if isinstance(found, int):
        raise UsageError(f"{path}: the checksum of tensor {found} differs, so the file is damaged. Take an older one.")
    return unpack(*found)


def safetensors(module: str = "") -> Any:
    """The library, or a module of it."""
    try:
        return importlib.import_module(f"safetensors.{module}".rstrip("."))
    except ImportError as error:
        raise UsageError("Files of a run need safetensors: pip install 'gradwire[elastic]'.") from error


def checksum(t: Tensor) -> int:
    """Of all bits, in the order of the shape."""
    return zlib.crc32(_bytes_of(t).numpy().data)


def _bytes_of(t: Tensor) -> Tensor:
    return t.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)


class SavedState:
    """The state of a run as one of its members saved it. The tensors of a file are read when they are needed."""

    def __init__(self, source: Source) -> None:
        self._source = source
        about = self.read(whole=False)
        self.rank: int = about["saved"].pop("rank")
        self.facts: dict[str, Any] = {"step": about["committed"], **about["saved"]}
        """The same in all that were saved together."""

    def read(self, *, whole: bool = True) -> dict[str, Any]:
        """What `Training.state_dict` returned; not `whole`: a file's without its tensors."""
        state = self._source if isinstance(self._source, Mapping) else load(Path(self._source), whole=whole)
        tensors = [state["tensors"][str(number)] for number in range(len(state["tensors"]))]
        return {"model": state["model"], **unpack(json.loads(state["run"]), tensors)}

    def __str__(self) -> str:
        source = "" if isinstance(self._source, Mapping) else f"{os.fspath(self._source)} "
        return f"{source}of rank {self.rank} ({', '.join(f'{key} {value}' for key, value in self.facts.items())})"


def find_states(given: Source | Iterable[Source], *, remembers: bool) -> list[SavedState]:
    """What a run begins from, by rank. UsageError unless it was saved together and, with a hook that remembers, is complete."""
    alone = isinstance(given, Mapping | str | os.PathLike)
    states = sorted(map(SavedState, [given] if alone else given), key=lambda state: state.rank)  # type: ignore[arg-type]
    if not states:
        raise UsageError("gw.elastic(state=[]): it is empty. Leave it out to begin a new run.")
    first, ranks = states[0], [state.rank for state in states]
    for other in states:
        if other.facts != first.facts:
            raise UsageError(
                f"gw.elastic(state=...): the state {other} was not saved together with that {first}. Pass those of one step of "
                "one run."
            )
    size = first.facts["size"]
    if remembers and ranks != list(range(size)):
        text = (
            f"gw.elastic(state=...): what each of {size} ranks owes is in its own state, and here are those of {ranks}."
        )
        if len({*ranks}) < len(ranks) or not (alone or first.facts["rescued"]):
            raise UsageError(f"{text} Pass each once. To begin without what others owe, pass one alone, not in a list.")
        warn_user(f"{text} What others owe is lost, unless you pass a list with theirs.")
    return states
