"""What each rank does in `gradwire bench collectives`: make all contenders, check them, and time them in turns."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from gradwire.cli.bench.contenders import CONTENDERS, Call
from gradwire.cli.experiment.rank_context import RankContext
from gradwire.cli.experiment.timing import Rounds, interleave

Key = tuple[str, int]
"""A contender's name, and a number of bytes."""
_FLOAT32 = 4
_MOST_CALLS = 1000
_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Race:
    """What is measured: contenders `names` at `sizes` in bytes; `turn` is the target duration of a turn in seconds."""

    op: str
    sizes: tuple[int, ...]
    rounds: int
    turn: float
    names: tuple[str, ...]

    @property
    def keys(self) -> list[Key]:
        """All pairs, grouped by size, in the order of their turns."""
        return [(name, nbytes) for nbytes in self.sizes for name in self.names]


@dataclass(frozen=True, slots=True)
class Laps:
    """What one rank has measured: seconds per call in each round, and the number of calls per turn."""

    seconds: Mapping[Key, tuple[float, ...]]
    blocks: Mapping[Key, int]


def run_race(race: Race, context: RankContext) -> Laps:
    """Measure on this rank, together with all others."""
    with ExitStack() as stack:
        largest = race.sizes[-1] // _FLOAT32
        made = {name: CONTENDERS[name](context, race.op, largest, stack) for name in race.names}
        for name, nbytes in race.keys:
            made[name].check(name, nbytes // _FLOAT32, context.rank)
            context.report(0)
        calls = {(name, nbytes): made[name].call(nbytes // _FLOAT32) for name, nbytes in race.keys}
        blocks = _agree(context, {key: _block(context, call, race.turn) for key, call in calls.items()})
        gc.collect()
        gc.freeze()
        series = interleave(
            {_text(key): call for key, call in calls.items()},
            Rounds(race.rounds, {_text(key): block for key, block in blocks.items()}, lead_in=1, warm_up=_WARM_UP),
            fence=context.barrier.wait,
            after_round=context.report if context.rank == 0 else None,
        )
        context.barrier.wait()  # no rank closes while another is still working
    return Laps({key: series[_text(key)].seconds for key in calls}, blocks)


def _block(context: RankContext, call: Call, turn: float) -> int:
    """How many calls a turn should have, as measured on this rank."""
    context.barrier.wait()
    call()
    begin = time.perf_counter()
    call()
    call()
    seconds = (time.perf_counter() - begin) / 2
    return max(1, min(_MOST_CALLS, round(turn / seconds)))


def _agree(context: RankContext, blocks: Mapping[Key, int]) -> dict[Key, int]:
    """Rank 0's numbers, on every rank: all must make the same calls."""
    if context.rank == 0:
        context.store.set("bench/blocks", json.dumps(list(blocks.values())))
    return dict(zip(blocks, json.loads(context.store.get("bench/blocks")), strict=True))


def _text(key: Key) -> str:
    return f"{key[0]}, {key[1]} bytes"
