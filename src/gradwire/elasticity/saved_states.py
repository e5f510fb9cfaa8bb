"""`SavedState`: what one member has saved of a run, as a dict or in a file. Those of all members together have what each owes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gradwire.elasticity.state import load, unpack
from gradwire.errors import UsageError
from gradwire.runtime.warnings import warn_user

Source = Mapping[str, Any] | str | os.PathLike[str]


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
