"""The model of a report: everything that it shows, calculated from the files of a run. Pages and texts lay it out.

Note [Steps that are shown]
A ring holds the last records of its rank, so ranks may have recorded different steps. What is compared between ranks (readiness) is
taken from steps that all of them have; what is shown per step from every rank that has it. Where a step's time goes is the
mean over a rank's complete steps without the slowest and the fastest 5 %, so that a checkpoint or a warm-up does not hide the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from gradwire.observe.hangs.hang_report import SavedHang, saved_hangs
from gradwire.observe.report.elastic_summary import summarize_views
from gradwire.observe.report.rank_summary import RankSummary, total_traffic
from gradwire.observe.rings.clocks import Alignment, align, on_one_clock
from gradwire.observe.rings.intervals import BucketSpan, Operation, bucket_spans, operations, ranks_apart
from gradwire.observe.rings.ring import Ring, StoredRings, ranks_of_launchers, read_headers
from gradwire.observe.rings.run_outcome import RunOutcome, load as load_outcome
from gradwire.observe.rings.views import read_faults
from gradwire.observe.run_warnings import FirstNonFinite, find_nonfinite
from gradwire.observe.stragglers.detect import ready_times, stragglers_over_time
from gradwire.observe.stragglers.steps import Phase, Span, StepTimes, spans
from gradwire.runtime.rank_error import RankError

TRIMMED = 0.05
_TIMELINE_RANKS = 4
_MOST_SHOWN = 100


class StepRow(NamedTuple):
    """One step over all ranks that have recorded it; seconds."""

    step: int
    low: float
    middle: float
    high: float


class TimelineRow(NamedTuple):
    """What one rank did in one step. Times are in nanoseconds."""

    rank: int
    phases: list[Span]
    buckets: list[BucketSpan]
    operations: list[Operation]
    left_out: int = 0
    """How many buckets and operations are not shown, because there are too many."""


class Timeline(NamedTuple):
    """One step on some ranks."""

    title: str
    step: int
    seconds: float
    """What it took: the slowest on the rank on which it took longest, a typical one in the median of the ranks."""
    start: int
    """On the first of these ranks, in nanoseconds."""
    end: int
    """On the last of them."""
    rows: list[TimelineRow]
    ranks: int
    """How many ranks have recorded the step."""


class RunReport:
    """What a report shows of these rings, which may be read from disk each time that they are gone through."""

    def __init__(
        self,
        rings: Iterable[Ring],
        *,
        directory: str | Path = "",
        hangs: Sequence[SavedHang] = (),
        damaged: Mapping[str, str] | None = None,
        outcome: RunOutcome | None = None,
        errors: Mapping[int, RankError] | None = None,
    ) -> None:
        self.directory = str(directory)
        self.hangs = hangs
        """Reports that were saved during the run."""
        self.damaged = damaged or {}
        """By name: files that cannot be read as a whole, and why."""
        self.outcome = outcome
        """How the run has ended, if its launcher has saved it."""
        self.errors = errors or {}
        """By rank: the exception that has ended it."""
        self.ranks = [RankSummary(ring) for ring in rings]
        self.clocks = {rank.header["clock"]: Alignment(0, 0) for rank in self.ranks}
        if len(self.clocks) > 1:
            self.clocks = align(rings)
            self.ranks = [RankSummary(ring) for ring in on_one_clock(rings, self.clocks)]
        self.elastic = summarize_views(self.ranks, read_faults(Path(directory)) if directory else [])
        """The views of an elastic run."""
        times = {rank.rank: rank.steps for rank in self.ranks}
        self.steps = _step_rows(times)
        self.phases = {rank: _mean_phases(steps) for rank, steps in times.items()}
        """By rank: seconds per step."""
        self.timelines = _timelines(on_one_clock(rings, self.clocks), self.steps, times)
        self.traffic = total_traffic(self.ranks)
        members = () if self.elastic is None else self.elastic.views[-1][0].members
        self.lateness = _lateness({r.rank: r.steps for r in self.ranks if not members or r.member in members})
        """By rank and step: how long after the first rank it was ready, in seconds."""
        self.stragglers = stragglers_over_time(times)

    @property
    def first_nonfinite(self) -> FirstNonFinite | None:
        """What ranks have recorded of gradients that were not finite, without a policy for them."""
        return find_nonfinite(rank.descriptions for rank in self.ranks)

    @property
    def mean_phases(self) -> dict[Phase, float]:
        """Seconds per step, over all ranks."""
        rows = [row for row in self.phases.values() if row]
        return {phase: sum(row[phase] for row in rows) / len(rows) for phase in Phase} if rows else {}

    @property
    def exposed_share(self) -> float:
        """The share of a step in which nothing but communication happens."""
        mean = self.mean_phases
        total = sum(mean.values())
        return mean[Phase.EXPOSED] / total if total else 0.0

    @property
    def has_exposed(self) -> bool:
        """Whether it is recorded when ranks only wait, and what they send."""
        return not any(step.backward_waits for rank in self.ranks for step in rank.steps)

    @property
    def step_seconds(self) -> float:
        """The median step time."""
        return median(row.middle for row in self.steps) if self.steps else 0.0

    @property
    def hooks(self) -> list[str]:
        """The hooks that have reduced buckets."""
        return list(dict.fromkeys(key.hook for key in self.traffic if key.hook))

    @property
    def bytes_per_step(self) -> float:
        """Bytes that a rank sends in a step by the best algorithms, on average; not known of torch's DDP: see `has_exposed`."""
        steps = sum(len(rank.steps) for rank in self.ranks)
        return sum(rank.sent for rank in self.ranks) / steps if steps else 0.0

    @property
    def begin(self) -> float:
        """When the first rank began to record, in seconds since 1970."""
        return min(int(rank.header["started_wall"]) for rank in self.ranks) / 1e9

    @property
    def end(self) -> float:
        """When the last record was written, in seconds since 1970."""
        return max([rank.wall_time(rank.last) for rank in self.ranks if rank.records] or [self.begin])

    @property
    def succeeded(self) -> bool:
        """Whether it is known that the run has ended and that no rank has failed."""
        return self.outcome is not None and not self.outcome.text

    def described(self, subject: str) -> list[dict[str, Any]]:
        """What the first rank that has written anything has written about `subject`, the latest last."""
        return next((rank.descriptions[subject] for rank in self.ranks if rank.descriptions.get(subject)), [])


def _step_rows(times: Mapping[int, Sequence[StepTimes]]) -> list[StepRow]:
    seconds: dict[int, list[float]] = {}
    for steps in times.values():
        for one in steps:
            seconds.setdefault(one.step, []).append(one.seconds)
    return [StepRow(step, min(row), median(row), max(row)) for step, row in sorted(seconds.items())]


def _mean_phases(steps: Sequence[StepTimes]) -> dict[Phase, float]:
    """See Note [Steps that are shown]."""
    cut = int(len(steps) * TRIMMED)
    kept = sorted(steps, key=lambda one: one.end - one.start)[cut : len(steps) - cut]
    totals = dict.fromkeys(Phase, 0)
    for one in kept:
        for phase, nanoseconds in one.phases.items():
            totals[phase] += nanoseconds
    return {phase: total / len(kept) / 1e9 for phase, total in totals.items()} if kept else {}


def _lateness(times: Mapping[int, Sequence[StepTimes]]) -> dict[int, dict[int, float]]:
    ready = ready_times({rank: steps for rank, steps in times.items() if any(one.ready for one in steps)})
    if len(ready) < 2:
        return {}
    first = {step: min(row[step] for row in ready.values()) for step in next(iter(ready.values()))}
    return {rank: {step: (at - first[step]) / 1e9 for step, at in row.items()} for rank, row in ready.items()}


def _timelines(
    rings: Iterable[Ring], rows: Sequence[StepRow], times: Mapping[int, Sequence[StepTimes]]
) -> list[Timeline]:
    by_step: dict[int, dict[int, StepTimes]] = {}
    for rank, steps in times.items():
        for one in steps:
            by_step.setdefault(one.step, {})[rank] = one
    most = max(map(len, by_step.values()), default=0)
    candidates = [row for row in rows if len(by_step[row.step]) == most]  # the steps that most ranks have recorded
    if not candidates:
        return []
    middle = median(row.middle for row in candidates)
    typical = min(candidates, key=lambda row: (abs(row.middle - middle), row.step))
    chosen = [("A typical step", typical.step, typical.middle)]
    slowest = max(candidates, key=lambda row: row.high)
    if slowest.step != typical.step:
        chosen.append(("The slowest step", slowest.step, slowest.high))
    shown = {step: _shown_ranks(by_step[step]) for _, step, _ in chosen}
    wanted = {rank for ranks in shown.values() for rank in ranks}
    found = {ring.rank: ring for ring in rings if ring.rank in wanted}
    return [_timeline(title, step, took, by_step[step], found, shown[step]) for title, step, took in chosen]


def _shown_ranks(steps: Mapping[int, StepTimes]) -> list[int]:
    """The last rank to be ready, the first, and others as far as there is room."""
    order = sorted(steps, key=lambda rank: steps[rank].last_ready)
    chosen = dict.fromkeys([order[-1], order[0], *sorted(steps)])
    return sorted(list(chosen)[:_TIMELINE_RANKS])


def _timeline(
    title: str, step: int, took: float, times: Mapping[int, StepTimes], rings: Mapping[int, Ring], ranks: Sequence[int]
) -> Timeline:
    start = min(times[rank].start for rank in ranks)
    end = max(times[rank].end for rank in ranks)
    rows = []
    for rank in ranks:
        low, high = times[rank].start, times[rank].end
        records = [r for r in rings[rank].records if low - (high - low) <= r.time <= high + (high - low)]
        phases = [
            Span(s.phase, s.step, max(s.start, low), min(s.end, high))
            for s in spans(records)
            if s.end > low and s.start < high
        ]
        buckets = [b for b in bucket_spans(records) if b.record.step == step and low <= b.record.time <= high]
        inside = [o for o in operations(records) if low <= o.submitted <= high]
        too_many = max(0, len(buckets) - _MOST_SHOWN) + max(0, len(inside) - _MOST_SHOWN)
        rows.append(TimelineRow(rank, phases, buckets[:_MOST_SHOWN], inside[:_MOST_SHOWN], too_many))
    return Timeline(title, step, took, start, end, rows, len(times))


def load_report(directory: Path) -> RunReport:
    """The report of the run that was recorded in `directory`, in whatever state its ranks are."""
    headers, damaged = read_headers(directory)
    outcome = load_outcome(directory, started=max(header["started_wall"] for header in headers.values()) / 1e9)
    ranks = ranks_of_launchers(headers, "" if outcome is None else outcome.launcher)
    rings: Iterable[Ring] = StoredRings(ranks)
    if len(ranks) == 1:
        rings = ranks_apart(list(rings))
    errors = {
        number: error
        for path, number in ranks.items()
        if (error := RankError.load(directory, headers[path]["rank"], name=str(headers[path].get("member", ""))))
    }
    hangs = saved_hangs(directory)
    return RunReport(rings, directory=directory, hangs=hangs, damaged=damaged, outcome=outcome, errors=errors)
