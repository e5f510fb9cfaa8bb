"""What a report warns of, each with advice. Pure."""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from gradwire.errors import CollectiveMismatch
from gradwire.observe.hangs.analysis import Cause
from gradwire.observe.hangs.hang_report import SavedHang
from gradwire.observe.report.failures import RunFailure, error_name, find_failures
from gradwire.observe.report.report_model import RunReport
from gradwire.observe.rings.run_outcome import RankOutcome, RunOutcome
from gradwire.observe.run_warnings import fold_repeated, merge_warnings
from gradwire.observe.stragglers.detect import of_same_steps
from gradwire.observe.stragglers.steps import Phase
from gradwire.observe.units import duration
from gradwire.observe.units import ranks as ranks_text
from gradwire.runtime.host import ProcessState

_CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
_EXPOSED = 0.2
_DATA = 0.2
_MOST_OF_A_KIND = 10
_SEVERITIES = ("error", "warning", "note")
_OF_SIGNALS = ("KeyboardInterrupt", "GroupAborted", "PeerLost")
"""Errors that a signal to the launcher causes on the ranks."""
_LONGEST = 500


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to look at."""

    severity: str
    """error, warning or note."""
    title: str
    detail: str = ""
    advice: str = ""


def find(report: RunReport) -> list[Finding]:
    """Everything to look at, what matters most first."""
    found = [
        *_outcome(report),
        *_hangs(report),
        *_failures(report),
        *_nonfinite(report),
        *_endings(report),
        *_warnings(report),
        *_speed(report),
        *_notes(report),
    ]
    if report.succeeded:  # what has failed was caught
        found = [replace(one, severity="warning") if one.severity == "error" else one for one in found]
    return sorted(found, key=lambda finding: _SEVERITIES.index(finding.severity))


def _hangs(report: RunReport) -> Iterator[Finding]:
    over = [hang for hang in report.hangs if hang.ended or report.succeeded]
    for hang in [hang for hang in report.hangs if hang not in over][:_MOST_OF_A_KIND]:
        dead = [rank for rank, cause, _ in hang.suspects if cause is Cause.DEAD]
        if dead and len(dead) == len(hang.suspects):
            it = "them" if len(dead) > 1 else "it"
            waited = f", and {ranks_text(hang.waiting)} waited for {it} in {hang.what}" if hang.waiting else ""
            title = f"{ranks_text(dead)} ended during the run{waited}"
        else:
            title = f"{ranks_text(hang.waiting)} hung in {hang.what}, which was reported after {hang.seconds:.1f} s"
        advice = f"What was found of the ranks that are named is in {hang.file}, in the directory of the run."
        yield Finding("error", _capitalized(title), _causes(hang), advice if hang.suspects else "")
    for hang in over[:_MOST_OF_A_KIND]:
        times, total = f"{hang.count} times ", f", {duration(hang.total)} in all"
        if hang.count == 1:
            times, total = f"{duration(hang.total)} " if hang.total else "", ""
        yield Finding(
            "note",
            _capitalized(f"{ranks_text(hang.waiting)} waited {times}in {hang.what}{total}, and continued"),
            _causes(hang),
            "A rank that evaluates or saves alone keeps the others waiting in their next collective.",
        )


def _causes(hang: SavedHang) -> str:
    return _capitalized("; ".join(text for _, _, text in hang.suspects) or hang.why)


def _failures(report: RunReport) -> Iterator[Finding]:
    interrupted = report.outcome is not None and report.outcome.signal is not None  # which the outcome names
    for failure in find_failures(report.ranks, left_out=_OF_SIGNALS if interrupted else ())[:_MOST_OF_A_KIND]:
        ranks = failure.ranks
        what = "A collective failed" if failure.is_collective else "A step failed"
        count = sum(place.record.kind is failure.first.record.kind for place in failure.places)
        times = f", {count} times" if count > len(ranks) else ""
        yield Finding(
            "error",
            f"{what} on {ranks_text(ranks)}{_in_steps(failure.steps)}{times}",
            failure.detail,
            _advice_on_failure(report.outcome, failure),
        )


def _in_steps(steps: Iterable[int]) -> str:
    """Where, to be added to a title; empty without steps."""
    known = sorted(set(steps))
    if len(known) > 1:
        return f" in steps {known[0]} to {known[-1]}"
    return f" in step {known[0]}" if known else ""


def _advice_on_failure(outcome: RunOutcome | None, failure: RunFailure) -> str:
    if outcome is not None and not outcome.text:
        return "The script has caught it: the run ended without an error."
    if error_name(failure.first.record) == CollectiveMismatch.__name__:  # its text contains advice
        return ""
    if failure.is_collective:
        return (
            "A collective fails on all ranks when one of them stops: look for the first rank that failed or ended, here and in the "
            "output of the run."
        )
    return f"Look at the traceback in the output of {'these ranks' if len(failure.ranks) > 1 else 'that rank'}."


def _nonfinite(report: RunReport) -> Iterator[Finding]:
    """The first gradient that was not finite, in a run without a policy for them."""
    first = report.first_nonfinite
    if first is not None:
        also = first.ranks[1:]
        yield Finding(
            "warning",
            f"{first}",
            f"So it was on {ranks_text(also)} in the same step." if also else "",
            "Look at that rank's batch, loss and learning rate. `gradwire run --nonfinite raise` ends the run there, `skip` omits "
            "such steps. With a GradScaler, which skips them, it is no error.",
        )


def _endings(report: RunReport) -> Iterator[Finding]:
    ranks = report.ranks
    size = max(int(rank.header["size"]) for rank in ranks)
    missing = sorted(set(range(size)) - {rank.rank for rank in ranks})
    if missing:
        yield Finding(
            "warning",
            f"{ranks_text(missing)} of {size} left no record here".capitalize(),
            advice="If they ran on another host, copy their files into this directory.",
        )
    known = _outcome_of_each(report)  # which explains the others
    gone = [rank for rank in ranks if not rank.ended and rank.state is ProcessState.GONE and rank.rank not in known]
    if gone:
        at = _in_steps(rank.last_step for rank in gone if rank.last_step >= 0)
        yield Finding(
            "error",
            f"{ranks_text([rank.rank for rank in gone])} ended{at} without stopping the recorder".capitalize(),
            "They were killed, crashed, or left by os._exit.",
            "Look at the last output of these ranks, and in the system's log (dmesg) for the OOM killer.",
        )
    last = max(rank.last_step for rank in ranks)
    early = [rank for rank in ranks if rank.ended and 0 <= rank.last_step < last - 1]
    for rank in early[:_MOST_OF_A_KIND]:
        yield Finding(
            "warning",
            f"Rank {rank.rank} stopped recording in step {rank.last_step}; others went on to step {last}",
            advice="Ranks that get fewer batches than others end early: see `join()` for uneven inputs.",
        )
    for rank in ranks:
        if rank.rank in known and known[rank.rank].stopped:
            continue
        if rank.pending and (rank.ended or rank.state is ProcessState.GONE):
            one = rank.pending[0].record
            yield Finding(
                "warning",
                f"Rank {rank.rank} ended while {one.op} {one.label!r} was under way",
                f"Operation #{one.seq} of {one.group}, {len(rank.pending)} in all.",
                "Other ranks may have been waiting for the same operation: compare their last records with `gradwire trace`.",
            )


def _outcome_of_each(report: RunReport) -> dict[int, RankOutcome]:
    """How ranks have ended, as far as the launcher knows; threads of one process together."""
    if report.outcome is None:
        return {}
    process = {rank.rank: (rank.header["host"], rank.header["pid"]) for rank in report.ranks}
    ended = {process[one.rank]: one for one in report.outcome.ranks if one.rank in process}
    return {rank: report.outcome.of(rank) or ended[place] for rank, place in process.items() if place in ended}


def _outcome(report: RunReport) -> Iterator[Finding]:
    outcome = report.outcome
    if outcome is None or not outcome.text:
        return
    if outcome.failed is not None:
        first, error = outcome.of(outcome.failed), report.errors.get(outcome.failed)
        detail = "" if error is None else textwrap.shorten(f"{error.name}: {error.text}", _LONGEST)
        yield Finding("error", _capitalized(outcome.text), detail, "" if first is None else _advice(first))
    elif outcome.signal is not None:
        yield Finding(
            "warning",
            f"The run was {outcome.text}",
            advice="The reader of the launcher's output had closed it, as `| head` does."
            if outcome.signal == signal.SIGPIPE.name
            else "The launcher received it: from Ctrl-C, `kill`, a scheduler at its time limit, or a host that is shut down.",
        )
    else:
        yield Finding("error", _capitalized(outcome.text))


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _advice(first: RankOutcome) -> str:
    """What to do about the rank that failed first."""
    if first.status == -signal.SIGKILL:
        return "Unless it was killed on purpose, look in the system's log (dmesg) for the OOM killer."
    if -first.status in _CRASHES:
        return f"It crashed in compiled code: look at the stack of rank {first.rank} in the output of the run."
    if first.raised is not None:
        return f"Look at the traceback of rank {first.rank} in the output of the run."
    return f"Rank {first.rank} has left no traceback: look at its last output."


def _warnings(report: RunReport) -> Iterator[Finding]:
    merged = merge_warnings((rank.rank, rank.header, rank.warnings) for rank in report.ranks)
    raised = tuple(record.label.partition(": ")[2] for rank in report.ranks for record in rank.failures)
    merged = fold_repeated(one for one in merged if one.text not in raised)  # what has raised is shown already
    for warning in merged[-_MOST_OF_A_KIND:]:
        step = f"in step {warning.step} {warning.repeats}".rstrip() if warning.step >= 0 else ""
        yield Finding("warning", warning.text, f"Recorded by {ranks_text(warning.ranks)}{step and ' ' + step}.")
    if len(merged) > _MOST_OF_A_KIND:
        yield Finding("note", f"{len(merged) - _MOST_OF_A_KIND} earlier warnings are not shown.")


def _speed(report: RunReport) -> Iterator[Finding]:
    slow = {
        id(one): ranks_text(sorted(other.rank for other in together))
        for together in of_same_steps(report.stragglers)
        for one in together
    }
    costly = sorted(report.stragglers, key=lambda one: -one.extra * one.steps)[:_MOST_OF_A_KIND]
    last = report.steps[-1].step if report.steps else -1
    for straggler in costly:
        verb = "is slow: the others wait" if straggler.last_step == last else "was slow: the others waited"
        yield Finding(
            "warning",
            f"Rank {straggler.rank} {verb} for it",
            f"{_capitalized(str(straggler))}. Without {slow[id(straggler)]} a step takes {duration(straggler.without)} instead of "
            f"{duration(straggler.step_seconds)}.",
            _STRAGGLER_ADVICE[straggler.phase],
        )
    mean = report.mean_phases
    total = sum(mean.values())
    if total and len(report.ranks) > 1 and mean[Phase.EXPOSED] > _EXPOSED * total and not report.stragglers:
        yield Finding(
            "warning",
            f"{mean[Phase.EXPOSED] / total:.0%} of a step is exposed communication",
            f"{duration(mean[Phase.EXPOSED])} of {duration(total)} pass after the last gradient, when ranks only wait.",
            "If one rank is ready last in most steps, it is the one to look at. Otherwise send fewer bytes with a hook (cast, "
            "quantize, power_sgd), start earlier with smaller buckets (bucket_cap_mb), or average less often (no_sync, diloco).",
        )
    if total and mean[Phase.DATA] > _DATA * total:
        yield Finding(
            "warning",
            f"{mean[Phase.DATA] / total:.0%} of a step is spent on data, logging and the rest of the loop",
            f"{duration(mean[Phase.DATA])} of {duration(total)} pass outside of forward, backward and optimizer.",
            "Give the data loader more workers and pin_memory, prefetch, and look for .item(), prints and checkpoints in the loop.",
        )


_STRAGGLER_ADVICE = {
    Phase.DATA: "Look at that rank's data loader, disk and CPU: its batches arrive late.",
    Phase.FORWARD: "Look at that rank's device (clocks, temperature, other processes) and at the sizes of its batches.",
    Phase.BACKWARD: "Look at that rank's device (clocks, temperature, other processes) and at the sizes of its batches.",
    Phase.OPTIMIZER: "Look at that rank's device and memory: its optimizer does the same work as the others'.",
    Phase.EXPOSED: "Look at that rank's network.",
}


def _notes(report: RunReport) -> Iterator[Finding]:
    running = [r.rank for r in report.ranks if not r.ended and r.state not in (ProcessState.GONE, ProcessState.UNKNOWN)]
    if running:
        yield Finding("note", f"The run is in progress: {ranks_text(running)} had not ended when this report was made.")
    lost = [rank for rank in report.ranks if rank.lost]
    if lost:
        yield Finding(
            "note",
            f"{ranks_text([rank.rank for rank in lost])}: earlier records were overwritten".capitalize(),
            f"A ring holds the last 65,536 records of a rank; up to {max(rank.lost for rank in lost):,} were lost. What is shown "
            "covers the end of the run.",
        )
    if not report.has_exposed:
        yield Finding(
            "note",
            "Backward includes the wait for averages",
            "Nothing records when the last gradient of torch's DDP is there, unless its buckets go through a hook of gradwire.",
        )
    if not report.steps and any(rank.records for rank in report.ranks):
        yield Finding(
            "note",
            "No complete steps were recorded",
            "The run ended before."
            if report.outcome is not None and report.outcome.text
            else "Steps are recorded of models of gradwire (DistributedDataParallel, replicate), and with `gradwire run --observe` "
            "of torch's DDP.",
        )
    if not any(rank.records for rank in report.ranks):
        yield Finding("note", "Nothing was recorded", "Recording had begun, but no collective or step was.")
    for clock, alignment in report.clocks.items():
        host = next(rank.header["host"] for rank in report.ranks if rank.header["clock"] == clock)
        if alignment.error < 0:
            yield Finding(
                "note", f"The clock of {host} is taken from its wall clock: comparisons with other hosts are rough."
            )
        elif alignment.error:
            yield Finding("note", f"The clock of {host} was aligned to within {duration(alignment.error / 1e9)}.")
    for name, why in report.damaged.items():
        yield Finding("warning", f"{name} cannot be read as a whole", _capitalized(why))
