"""What `gradwire run --verify-ddp` compares: digests of the steps of a script, a file per rank and a line per step. Without torch.

A step is one of an optimizer that has parameters of a wrapped model. Its line has the digests of their gradients, taken before the
step (after it, if gradients are computed in a closure), and of the parameters after it, each with the norm of the tensor and a
sketch: a few sums of its elements with random signs, the same in all runs. Two sketches are about as far apart as the tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.observe.units import plural

Digest = list[float] | None
"""The digest, the norm and the sketch of a tensor; None for a parameter without a gradient."""
_KINDS = {"gradients": "the gradient of {} in step {}", "parameters": "the parameter {} after step {}"}


@dataclass(slots=True)
class RankDigests:
    """What one rank has written."""

    models: int
    """How many were wrapped."""
    steps: Sequence[Mapping[str, Mapping[str, Digest]]]
    """By "gradients" and "parameters", and by name."""


def digest_file(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank-{rank}.digests"


def read_digests(folder: Path, ranks: int) -> list[RankDigests]:
    """What each rank has written in `folder`; the last line of one that was killed may be cut off."""
    return [_read(digest_file(folder, rank)) for rank in range(ranks)]


def _read(path: Path) -> RankDigests:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("\n")]
    steps = [row for row in rows if "parameters" in row]
    return RankDigests(len(rows) - len(steps), steps)


def first_difference(
    a: Sequence[RankDigests], b: Sequence[RankDigests], *, names: tuple[str, str], finished: bool = True
) -> str | None:
    """Where two runs differ first, in words; None if they are bitwise equal. Unless both have `finished`, only steps of both count.

    >>> steps = [{"gradients": {"w": None}, "parameters": {"w": [7, 2.0, 2.0]}}]
    >>> one, two = (
    ...     RankDigests(1, steps),
    ...     RankDigests(1, [{"gradients": {"w": None}, "parameters": {"w": [8, 2.0, -2.0]}}]),
    ... )
    >>> first_difference([one], [two], names=("A", "B"))
    'the parameter w after step 1 on rank 0 (norm 2 with A, 2 with B, about 4 of the difference)'
    """
    both = [min(len(one.steps), len(two.steps)) for one, two in zip(a, b, strict=True)]
    for step in range(max(both)):
        for kind, words in _KINDS.items():
            for rank, (one, two) in enumerate(zip(a, b, strict=True)):
                if step >= both[rank]:
                    continue
                mine, theirs = one.steps[step][kind], two.steps[step][kind]
                for name in {**mine, **theirs}:
                    x, y = mine.get(name, []), theirs.get(name, [])
                    if (x and x[:1]) != (y and y[:1]):
                        return f"{words.format(name, step + 1)} on rank {rank} ({_apart(x, y, names)})"
    for rank, (one, two) in enumerate(zip(a, b, strict=True)):
        if finished and len(one.steps) != len(two.steps):
            made = (plural(len(run.steps), "step") for run in (one, two))
            return f"rank {rank} makes {' and '.join(f'{n} with {name}' for n, name in zip(made, names, strict=True))}"
    return None


def _apart(a: Digest, b: Digest, names: tuple[str, str]) -> str:
    if not a or not b:
        texts = ("none" if one is None else "in the step" if one else "not in the step" for one in (a, b))
        return ", ".join(f"{text} with {name}" for text, name in zip(texts, names, strict=True))
    (_, x, *mine), (_, y, *theirs) = a, b
    norms = f"norm {x:.7g} with {names[0]}, {y:.7g} with {names[1]}"
    apart = math.dist(mine, theirs) if len(mine) == len(theirs) else math.nan  # of another shape
    return f"{norms}, about {apart:.2g} of the difference" if math.isfinite(apart) else norms
