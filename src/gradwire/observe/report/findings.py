"""What a report warns of, each with advice. Pure."""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from gradwire.errors import CollectiveMismatch
from gradwire.observe.hangs.analysis import Cause
from gradwire.observe.hangs.hang_report import SavedHang
from gradwire.observe.report.rank_summary import error_name, find_failures
from gradwire.observe.report.report_model import RunReport
from gradwire.observe.rings.run_outcome import RankOutcome
from gradwire.observe.run_warnings import fold_repeated, merge_warnings
from gradwire.observe.stragglers.detect import of_same_steps
from gradwire.observe.stragglers.steps import Phase
from gradwire.observe.units import duration, ranks as ranks_text
from gradwire.recorder.format import RecordKind
from gradwire.runtime.host import ProcessState

_CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
_LARGE_SHARE = 0.2
"""Of a step, for communication that is exposed, or for data."""
_MOST_OF_A_KIND = 10
_SEVERITIES = ("error", "warning", "note")
_OF_SIGNALS = ("KeyboardInterrupt", "GroupAborted", "PeerLost")
"""Errors that a signal to the launcher causes on the ranks."""
_OF_VIEWS = ("GroupAborted", "PeerLost", "GroupError")
"""Errors that a rank of an elastic run survives."""
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
    rules = (_outcome, _hangs, _failures, _nonfinite, _endings, _warnings, _speed, _notes)
    found = [finding for rule in rules for finding in rule(report)]
    if report.succeeded:  # what has failed was caught
        found = [replace(one, severity="warning") if one.severity == "error" else one for one in found]
    return sorted(found, key=lambda finding: _SEVERITIES.index(finding.severity))


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _hangs(report: RunReport) -> Iterator[Finding]:
    over = [hang for hang in report.hangs if hang.ended or report.succeeded]
    for hang in [hang for hang in report.hangs if hang not in over][:_MOST_OF_A_KIND]:
        dead = [rank for rank, cause, _ in hang.suspects if cause is Cause.DEAD]
        title = f"{ranks_text(hang.waiting)} hung in {hang.what}, which was reported after {hang.seconds:.1f} s"
        if dead and len(dead) == len(hang.suspects):
            it = "them" if len(dead) > 1 else "it"
            waited = f", and {ranks_text(hang.waiting)} waited for {it} in {hang.what}" if hang.waiting else ""
            title = f"{ranks_text(dead)} ended during the run{waited}"
        advice = f"What was found of the ranks that are named is in {hang.file}, in the directory of the run."
        yield Finding("error", _capitalized(title), _causes(hang), advice if hang.suspects else "")
    for hang in over[:_MOST_OF_A_KIND]:
        times, total = f"{hang.count} times ", f", {duration(hang.total)} in all"
        if hang.count == 1:
            times, total = f"{duration(hang.total)} " if hang.total else "", ""
        title = _capitalized(f"{ranks_text(hang.waiting)} waited {times}in {hang.what}{total}, and continued")
        advice = "A rank that evaluates or saves alone keeps the others waiting in their next collective."
        yield Finding("note", title, _causes(hang), advice)


def _causes(hang: SavedHang) -> str:
    return _capitalized("; ".join(text for _, _, text in hang.suspects) or hang.why)


def _failures(report: RunReport) -> Iterator[Finding]:
    interrupted = report.outcome is not None and report.outcome.signal is not None  # which the outcome names
    left_out = _OF_SIGNALS if interrupted else () if report.elastic is None else _OF_VIEWS
    for failure in find_failures(report.ranks, left_out=left_out)[:_MOST_OF_A_KIND]:
        ranks, first, what = failure.ranks, failure.first.record, "A step failed"
        advice = f"Look at the traceback in the output of {'these ranks' if len(ranks) > 1 else 'that rank'}."
        if first.kind is RecordKind.COLLECTIVE_FAILED:
            what = "A collective failed"
            advice = (
                "A collective fails on all ranks when one of them stops: look for the first rank that failed or ended, here "
                "and in the output of the run."
            )
        if report.succeeded:
            advice = "The script has caught it: the run ended without an error."
        elif error_name(first) == CollectiveMismatch.__name__:
            advice = ""  # its text contains advice
        count = sum(place.record.kind is first.kind for place in failure.places)
        times = f", {count} times" if count > len(ranks) else ""
        title = f"{what} on {ranks_text(ranks)}{_in_steps(failure.steps)}{times}"
        yield Finding("error", title, failure.detail, advice)


def _in_steps(steps: Iterable[int]) -> str:
    """Where, to be added to a title; empty without steps."""
    known = sorted(set(steps))
    if len(known) > 1:
        return f" in steps {known[0]} to {known[-1]}"
    return f" in step {known[0]}" if known else ""


def _nonfinite(report: RunReport) -> Iterator[Finding]:
    """The first gradient that was not finite, in a run without a policy for them."""
    if (first := report.first_nonfinite) is not None:
        also = f"So it was on {ranks_text(first.ranks[1:])} in the same step." if first.ranks[1:] else ""
        advice = (
            "Look at that rank's batch, loss and learning rate. `gradwire run --nonfinite raise` ends the run there, `skip` omits "
            "such steps. With a GradScaler, which skips them, it is no error."
        )
        yield Finding("warning", str(first), also, advice)


def _endings(report: RunReport) -> Iterator[Finding]:
    ranks = report.ranks
    size = max(int(rank.header["size"]) for rank in ranks)
    if report.elastic is not None:  # ranks come and go, which its launcher records
        known_ends = report.elastic.ended
        ranks, size = [rank for rank in ranks if report.outcome is None and rank.member not in known_ends], 0
    if missing := sorted(set(range(size)) - {rank.rank for rank in ranks}):
        advice = "If they ran on another host, copy their files into this directory."
        yield Finding("warning", f"{_capitalized(ranks_text(missing))} of {size} left no record here", advice=advice)
    known = _outcome_of_each(report)  # which explains the others
    gone = [rank for rank in ranks if not rank.ended and rank.state is ProcessState.GONE and rank.rank not in known]
    if gone:
        at = _in_steps(rank.last_step for rank in gone if rank.last_step >= 0)
        title = f"{_capitalized(ranks_text([rank.rank for rank in gone]))} ended{at} without stopping the recorder"
        advice = "Look at the last output of these ranks, and in the system's log (dmesg) for the OOM killer."
        yield Finding("error", title, "They were killed, crashed, or left by os._exit.", advice)
    last = max((rank.last_step for rank in ranks if size), default=0)
    early = [rank for rank in ranks if rank.ended and 0 <= rank.last_step < last - 1]
    for rank in early[:_MOST_OF_A_KIND]:
        title = f"Rank {rank.rank} stopped recording in step {rank.last_step}; others went on to step {last}"
        advice = "Ranks that get fewer batches than others end early: see `join()` for uneven inputs."
        yield Finding("warning", title, advice=advice)
    for rank in ranks:
        stopped = rank.rank in known and known[rank.rank].stopped
        if rank.pending and not stopped and (rank.ended or rank.state is ProcessState.GONE):
            one = rank.pending[0].record
            title = f"Rank {rank.rank} ended while {one.op} {one.label!r} was under way"
            detail = f"Operation #{one.seq} of {one.group}, {len(rank.pending)} in all."
            advice = "Other ranks may have been waiting for it: compare their last records with `gradwire trace`."
            yield Finding("warning", title, detail, advice)


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
    if outcome.signal is not None and outcome.failed is None:
        advice = (
            "The launcher received it: from Ctrl-C, `kill`, a scheduler at its time limit, or a host that is shut down."
        )
        if outcome.signal == signal.SIGPIPE.name:
            advice = "The reader of the launcher's output had closed it, as `| head` does."
        yield Finding("warning", f"The run was {outcome.text}", advice=advice)
        return
    detail = advice = ""
    if outcome.failed is not None:
        first, error = outcome.of(outcome.failed), report.errors.get(outcome.failed)
        detail = "" if error is None else textwrap.shorten(f"{error.name}: {error.text}", _LONGEST)
        advice = "" if first is None else _advice(first)
    yield Finding("error", _capitalized(outcome.text), detail, advice)


def _advice(first: RankOutcome) -> str:
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
        step = f" in step {warning.step} {warning.repeats}".rstrip() if warning.step >= 0 else ""
        yield Finding("warning", warning.text, f"Recorded by {ranks_text(warning.ranks)}{step}.")
    if len(merged) > _MOST_OF_A_KIND:
        yield Finding("note", f"{len(merged) - _MOST_OF_A_KIND} earlier warnings are not shown.")


def _speed(report: RunReport) -> Iterator[Finding]:
    last = report.steps[-1].step if report.steps else -1
    costly = sorted(report.stragglers, key=lambda one: -one.extra * one.steps)[:_MOST_OF_A_KIND]
    together = {id(one): same for same in of_same_steps(report.stragglers) for one in same}
    for one in costly:
        verb = "is slow: the others wait" if one.last_step == last else "was slow: the others waited"
        who = ranks_text(sorted(other.rank for other in together[id(one)]))
        times = f"{duration(one.without)} instead of {duration(one.step_seconds)}"
        detail = f"{_capitalized(str(one))}." + (f" Without {who} a step takes {times}." if one.without > 0 else "")
        yield Finding("warning", f"Rank {one.rank} {verb} for it", detail, _STRAGGLER_ADVICE[one.phase])
    mean = report.mean_phases
    total = sum(mean.values())
    if total and len(report.ranks) > 1 and report.exposed_share > _LARGE_SHARE and not report.stragglers:
        title = f"{report.exposed_share:.0%} of a step is exposed communication"
        passes = f"{duration(mean[Phase.EXPOSED])} of {duration(total)} pass"
        advice = (
            "If one rank is ready last in most steps, it is the one to look at. Otherwise send fewer bytes with a hook (cast, "
            "quantize, power_sgd), start earlier with smaller buckets (bucket_cap_mb), or average less often (no_sync, diloco)."
        )
        yield Finding("warning", title, f"{passes} after the last gradient, when ranks only wait.", advice)
    if total and mean[Phase.DATA] > _LARGE_SHARE * total:
        title = f"{mean[Phase.DATA] / total:.0%} of a step is spent on data, logging and the rest of the loop"
        detail = f"{duration(mean[Phase.DATA])} of {duration(total)} pass outside of forward, backward and optimizer."
        advice = "Give the data loader more workers and pin_memory, prefetch, look for .item(), prints and checkpoints in the loop."
        yield Finding("warning", title, detail, advice)


_OF_DEVICE = "Look at that rank's device (clocks, temperature, other processes) and at the sizes of its batches."
_STRAGGLER_ADVICE = {
    Phase.DATA: "Look at that rank's data loader, disk and CPU: its batches arrive late.",
    Phase.FORWARD: _OF_DEVICE,
    Phase.BACKWARD: _OF_DEVICE,
    Phase.OPTIMIZER: "Look at that rank's device and memory: its optimizer does the same work as the others'.",
}


def _notes(report: RunReport) -> Iterator[Finding]:
    over = (ProcessState.GONE, ProcessState.UNKNOWN)
    if running := [rank.rank for rank in report.ranks if not rank.ended and rank.state not in over]:
        yield Finding("note", f"The run is in progress: {ranks_text(running)} had not ended when this report was made.")
    if lost := [rank for rank in report.ranks if rank.lost]:
        title = f"{_capitalized(ranks_text([rank.rank for rank in lost]))}: earlier records were overwritten"
        most = max(rank.lost for rank in lost)
        detail = (
            f"A ring holds the last 65,536 records of a rank; up to {most:,} were lost. The end of the run is shown."
        )
        yield Finding("note", title, detail)
    if not report.has_exposed:
        why = "Nothing records when the last gradient of torch's DDP is there, unless its buckets go through a hook of gradwire."
        yield Finding("note", "Backward includes the wait for averages", why)
    if not any(rank.records for rank in report.ranks):
        yield Finding("note", "Nothing was recorded", "Recording had begun, but no collective or step was.")
    elif not report.steps:
        why = "Steps are recorded of models of gradwire, and with `gradwire run --observe` of torch's DDP."
        if report.outcome is not None and report.outcome.text:
            why = "The run ended before."
        yield Finding("note", "No complete steps were recorded", why)
    for clock, alignment in report.clocks.items():
        host = next(rank.header["host"] for rank in report.ranks if rank.header["clock"] == clock)
        if alignment.error < 0:
            rough = "is taken from its wall clock: comparisons with other hosts are rough."
            yield Finding("note", f"The clock of {host} {rough}")
        elif alignment.error:
            yield Finding("note", f"The clock of {host} was aligned to within {duration(alignment.error / 1e9)}.")
    for name, why in report.damaged.items():
        yield Finding("warning", f"{name} cannot be read as a whole", _capitalized(why))
