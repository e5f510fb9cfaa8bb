"""`gradwire run --verify-ddp`: a script with torch's DDP and with gradwire's, compared step by step.

Note [Whether the script is deterministic]
Two runs that are equal have answered that. Only if they differ is there a third, again with torch's class: if it differs from the
first, so may any run, and nothing is said about gradwire's class.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from gradwire.errors import UsageError
from gradwire.launch.environment import VERIFY
from gradwire.observe.step_digests import RankDigests, first_difference, read_digests
from gradwire.observe.units import plural

Launch = Callable[[str, Mapping[str, str]], int]
"""Runs the script, under a name and with variables for its ranks, and returns the exit code."""
_TORCHS, _OURS, _AGAIN = "torch", "gradwire", "torch-again"
_ROUNDING = " Unless the number of ranks is a power of two, averages are rounded differently: try with 2."
_CLASSES = {_TORCHS: "torch's class", _OURS: "gradwire's", _AGAIN: "torch's class again"}


def verify_ddp(launch: Launch, *, steps: int, ranks: int) -> int:
    """Run the script, compare, and return the exit code: 0 if the runs are equal, 1 if not, that of the script if it fails."""
    found: dict[str, list[RankDigests]] = {}
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:

        def run(name: str) -> int:
            place = Path(folder, name)
            place.mkdir()
            _say(f"{plural(steps, 'step')} with {_CLASSES[name]}")
            code = launch(name, {VERIFY: f"{name.partition('-')[0]}:{steps}:{place}"})
            found[name] = read_digests(place, ranks)
            if code:
                _say(
                    f"with {_CLASSES[name]} the script ended with code {code} after {plural(_made(found[name]), 'step')}"
                )
            elif name == _TORCHS:
                _check(found[name], steps)
            return code

        for name in (_TORCHS, _OURS):
            if code := run(name):
                if name == _OURS:
                    unlike = _compare(found, _OURS, finished=False)
                    _say(f"before that it differs in {unlike}" if unlike else "until then it was bitwise equal")
                return code
        if (unlike := _compare(found, _OURS)) is None:
            _say(f"bitwise equal: {_compared(found[_TORCHS], steps)}")
            return 0
        _say("the two runs differ. Is the script deterministic?")
        if code := run(_AGAIN):
            return code
    if (noise := _compare(found, _AGAIN)) is not None:
        raise UsageError(
            f"gradwire run --verify-ddp {steps}: the script is not deterministic: two runs with torch's class differ in {noise}. "
            "Set the seeds of what it draws from, see torch.use_deterministic_algorithms, and try again."
        )
    _say(f"different: {unlike}. Two runs with torch's class are equal.{_ROUNDING if ranks & (ranks - 1) else ''}")
    return 1


def _say(text: str) -> None:
    print(f"gradwire run: {text}", file=sys.stderr, flush=True)


def _made(run: list[RankDigests]) -> int:
    """How many steps all ranks have made."""
    return min(len(rank.steps) for rank in run)


def _compare(found: Mapping[str, list[RankDigests]], name: str, *, finished: bool = True) -> str | None:
    return first_difference(found[_TORCHS], found[name], names=(_CLASSES[_TORCHS], _CLASSES[name]), finished=finished)


def _check(run: list[RankDigests], steps: int) -> None:
    """Refuse a script in which there is nothing to compare."""
    who = f"gradwire run --verify-ddp {steps}"
    if not any(rank.models for rank in run):
        raise UsageError(
            f"{who}: the script has wrapped no model in torch.nn.parallel.DistributedDataParallel, so there is nothing to compare. "
            "Name the script that wraps it, in the process that gradwire run starts: one that spawns its ranks itself is not seen."
        )
    if not any(rank.steps for rank in run):
        raise UsageError(
            f"{who}: the script has wrapped a model, but no optimizer that has its parameters made a step, so there is nothing to "
            "compare. Let it train: gradients are compared when an optimizer of torch.optim steps."
        )


def _compared(run: list[RankDigests], steps: int) -> str:
    names = {name for rank in run for step in rank.steps for name in step["parameters"]}
    made = _made(run)
    early = f" (the script ended before step {made + 1})" if made < steps else ""
    return f"{plural(len(names), 'parameter')} and their gradients in {plural(made, 'step')}{early} on {plural(len(run), 'rank')}"
