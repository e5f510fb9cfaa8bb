"""Which hook a run would be faster with, predicted from its report. Pure.

Note [The model]
Of a step of T seconds, W pass while buckets are reduced, E of them exposed, after the last gradient, both on the rank that was
ready last and does not wait for others. So W - E are hidden behind the backward. A hook that sends r of the bytes needs r W on the
same link, of which as much can be hidden again, but not its last bucket, and computes for c seconds per byte of gradients:

    T' = T - E + c bytes + max(r W - (W - E), r min(E, W / buckets))

If only every k-th step communicates, T' = T - E + (c bytes + r W) / k: that is after the optimizer's step, where nothing hides it.
A hook must save a tenth of T, else the model is not good enough; a third on one host, where hooks compute on the cores that other
ranks train with: 1.2 times as fast by the model was 1.1 times as slow when measured. Of those that are within
a tenth of the fastest, the one that loses least is chosen; one with which replicas differ for some steps only if it halves the
time, with more steps for the same loss.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from gradwire.errors import UsageError
from gradwire.observe.report.render import WIDTH
from gradwire.observe.report.report_model import RunReport
from gradwire.observe.units import bit_rate, duration, plural, size

_LEAST_STEPS = 10
_GAIN, _GAIN_ON_ONE_HOST, _LARGE_GAIN = 0.1, 1 / 3, 0.5
"""The share of a step that a hook must save; the same if all ranks are on one host; and of a hook after which replicas differ."""
_SMALL = 128 * 1024
"""Collectives of fewer bytes take about as long with fewer."""
_DENSE = "mean()"
_ITEMSIZES = {"float64": 8, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A hook of docs/hook-catalog.md, with constants of benchmarks/RESULTS.md: `hooks` on a CPU (x86) and on a GPU (H200), at
    25 MiB, the cost of `mean` subtracted; `slowlink` for the steps. bfloat16 on a CPU includes what gloo takes longer to add it
    up, from `suggestion` over 1 Gbit/s."""

    name: str
    """In `hooks.named`."""
    words: str
    line: str
    bits: float
    """On the wire, per element, with scales."""
    cpu: float
    gpu: float
    """Nanoseconds of computing per byte of gradients in float32."""
    every: int = 1
    steps: float = 1.0
    """How many times as many are needed for the same loss."""


_FEEDBACK = "hooks.chain(hooks.error_feedback(), hooks.quantize(bits={}))"
_LOCAL = f"hooks.diloco(every=10, outer_lr=1.0, outer_momentum=0.0, hook={_FEEDBACK.format(4)})"
CANDIDATES = (
    Candidate("bf16", "bfloat16", "hooks.chain(hooks.cast(torch.bfloat16), hooks.mean())", 16, cpu=4.5, gpu=0.002),
    Candidate("quantize8", "8 bits", _FEEDBACK.format(8), 8 + 32 / 256, cpu=0.8, gpu=0.043),
    Candidate("quantize4", "4 bits", _FEEDBACK.format(4), 4 + 32 / 256, cpu=0.8, gpu=0.043),
    Candidate("local4", "4 bits every 10 steps", _LOCAL, 4 + 32 / 256, cpu=0.8, gpu=0.043, every=10, steps=1.2),
)
"""From the one that loses least. power_sgd is not among them: what it sends depends on the shapes of matrices."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step of a run without compression: see Note [The model]. Times are in seconds."""

    seconds: float
    exposed: float
    wire: float
    nbytes: float
    """Of gradients."""
    buckets: float
    itemsize: int = 4
    on_gpu: bool = False
    on_one_host: bool = False

    def predict(self, hook: Candidate) -> float:
        """What a step takes with `hook`.

        >>> slow = MeasuredStep(seconds=4.0, exposed=3.7, wire=3.8, nbytes=43e6, buckets=3)
        >>> [round(slow.predict(hook), 2) for hook in CANDIDATES]
        [2.29, 1.2, 0.72, 0.35]
        """
        ratio = min(1.0, hook.bits / 8 / self.itemsize)
        wire, last = ratio * self.wire, ratio * min(self.exposed, self.wire / self.buckets)
        computing = (hook.gpu if self.on_gpu else hook.cpu) * 1e-9 * self.nbytes * 4 / self.itemsize
        rest = self.seconds - self.exposed
        if hook.every > 1:
            return rest + (computing + wire) / hook.every
        return rest + computing + max(wire - (self.wire - self.exposed), last)


def suggest(step: MeasuredStep) -> Candidate | None:
    """The hook to use in a run with such steps, if any."""
    chosen, best = None, step.seconds
    usual = [hook for hook in CANDIDATES if hook.every == 1]
    needed = _GAIN_ON_ONE_HOST if step.on_one_host else _GAIN
    if (least := min(map(step.predict, usual))) < (1 - needed) * best:
        chosen = next(hook for hook in usual if (1 - _GAIN) * step.predict(hook) <= least)
        best = step.predict(chosen)
    for hook in CANDIDATES:
        if hook.every > 1 and step.predict(hook) * hook.steps < (1 - _LARGE_GAIN) * best:
            chosen = hook
    return chosen


def suggest_text(report: RunReport) -> str:
    """The suggestion for a run and its reasons, in a few lines. A run from which nothing can be predicted is refused."""
    lines = (part for line in _lines(report) for part in _wrapped(line))
    return "\n".join(lines) + "\n"


def _wrapped(line: str) -> list[str]:
    """In 80 columns; a call of Python remains one."""
    indent = "      " if line.startswith(" ") else ""
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _lines(report: RunReport) -> Iterator[str]:
    ranks = int(report.ranks[0].header["size"])
    if ranks == 1:
        yield "Do not compress: the run has one rank, which sends nothing."
        return
    step = measure(report)
    share = f"{report.exposed_share:.1%}"
    yield f"A step takes {duration(step.seconds)} (median); {share} of it is exposed communication."
    yield f"On the rank that is ready last, which waits only for the link, that is {duration(step.exposed)}."
    yield f"{_link(step, ranks)}; backward hides {duration(max(0.0, step.wire - step.exposed))}."
    if step.on_one_host:
        yield f"All ranks are on one host, {report.ranks[0].header['host']}."
    total = sum(row.middle for row in report.steps)
    if slow := [one for one in report.stragglers if one.extra * one.steps >= _GAIN * total]:
        yield f"First fix this: {slow[0]}."
        yield "The others wait for it, which no hook changes. `gradwire report` has more."
        return
    if step.nbytes / step.buckets < _SMALL:
        yield f"Do not compress: a collective has {size(step.nbytes / step.buckets)}, and takes as long with less."
        yield "Larger buckets (bucket_cap_mb), or fewer steps that communicate (no_sync), save time."
        return
    found = suggest(step)
    if found is None and step.on_one_host:
        yield "Do not compress: there, hooks compute on the cores that ranks train with,"
        yield "and none is predicted to save a third of a step."
        return
    shown = (hook for hook in CANDIDATES if hook.every == 1 or hook is found)
    yield f"Predicted: {', '.join(f'{hook.name} {duration(step.predict(hook))}' for hook in shown)}."
    if found is None:
        yield f"Do not compress: no hook is predicted to save {_GAIN:.0%} of a step."
        return
    yield from _paste(found, step.seconds / step.predict(found))


def _paste(hook: Candidate, times: float) -> Iterator[str]:
    yield f"Use {hook.words}, predicted to be {times:.2g} times as fast per step:"
    yield f"  model.set_hook({hook.line})"
    if hook.every > 1:
        yield "  model.attach_optimizer(optimizer)"
        yield f"It took {hook.steps:g} times as many steps to the same loss where we measured it, and ranks differ in between."
    else:
        yield f"or, in a script for torch's DDP: gradwire run --replace-ddp --hook {hook.name}"
    yield "Compare the loss of a few hundred steps with and without it."


def _link(step: MeasuredStep, ranks: int) -> str:
    sent = 2 * (ranks - 1) / ranks * step.nbytes
    return f"A rank sends {sent / 1e6:.3g} MB a step in {duration(step.wire)} ({bit_rate(sent / max(step.wire, 1e-9))})"


def measure(report: RunReport) -> MeasuredStep:
    """What the model needs of a run, as medians over its steps: see Note [The model]."""
    who = f"gradwire suggest {report.directory}"
    again = "Record a run of gradwire's DistributedDataParallel, e.g. with `gradwire run --replace-ddp`"
    if others := [hook for hook in report.hooks if hook != _DENSE]:
        raise UsageError(
            f"{who}: the run uses {others[0]}; what it takes without is not known. {again}, without a hook."
        )
    steps = [{one.step: one for one in rank.steps} for rank in report.ranks]
    common = [n for n in steps[0] if all(n in rank for rank in steps) and all(n in rank.wire for rank in report.ranks)]
    if report.steps and not report.has_exposed:
        raise UsageError(f"{who}: torch's DDP waits inside its backward, and for how long is not recorded. {again}.")
    if len(common) < _LEAST_STEPS:
        found = f"all ranks have recorded {plural(len(common), 'step')} with averages"
        raise UsageError(f"{who}: {found}, and {_LEAST_STEPS} are needed. {again}, for longer.")
    wires = [min((rank.wire[n] for rank in report.ranks), key=lambda one: one.busy) for n in common]
    buckets = [one for part in report.described("buckets") for one in part["buckets"]]
    return MeasuredStep(
        seconds=report.step_seconds,
        exposed=median(min(rank[n].exposed for rank in steps) for n in common),
        wire=median(one.busy for one in wires) / 1e9,
        nbytes=median(one.nbytes for one in wires),
        buckets=median(one.calls for one in wires),
        itemsize=_ITEMSIZES.get(buckets[0]["dtype"], 4) if buckets else 4,
        on_gpu=bool(buckets) and not buckets[0]["device"].startswith("cpu"),
        on_one_host=len({rank.header["clock"] for rank in report.ranks}) == 1,
    )
