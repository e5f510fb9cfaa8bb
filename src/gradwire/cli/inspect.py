"""`gradwire inspect`: where every rank of a job is now, whatever has started it.

Show where every rank of a job is: the state of its process, its step, the collective that it waits in, and the line of its
code. If ranks wait for others, these are named, with their stacks. The job goes on (a signal asks each rank for its stacks,
which ends a sleep() in C code), and need not have been started by gradwire run: its ranks must be recorded, on this host.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from gradwire.cli.arguments import run_directory
from gradwire.errors import UsageError
from gradwire.observe.hangs.analysis import Cause, LongWait
from gradwire.observe.hangs.hang_report import described, report_lines, saved_hangs
from gradwire.observe.hangs.hang_watch import HangWatch
from gradwire.observe.hangs.stacks import Stack, user_line
from gradwire.observe.rings.rank_progress import RankProgress
from gradwire.observe.rings.ring import nothing_recorded
from gradwire.observe.rings.run_follower import RunFollower
from gradwire.observe.rings.run_outcome import RunOutcome
from gradwire.observe.run_warnings import fold_repeated, merge_warnings
from gradwire.observe.stragglers.detect import describe, stragglers_over_time
from gradwire.observe.units import elapsed
from gradwire.runtime.host import ProcessState


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    which = "the directory of a run, or the process id of a rank (default: the latest run)"
    add("run", nargs="?", metavar="RUN", help=which)
    add("--stacks", action="store_true", help="show the whole stack of every rank")


def run(args: argparse.Namespace) -> int:
    print("\n".join(inspection(_directory(args.run), whole=args.stacks)))
    return 0


def _directory(given: str | None) -> Path:
    if given is None or not given.isdigit() or Path(given).is_dir():
        return run_directory(given)
    try:
        maps = Path(f"/proc/{given}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        raise UsageError(f"gradwire inspect {given}: there is no process {given}, and no such directory.") from None
    except OSError as error:
        raise UsageError(f"gradwire inspect {given}: process {given}: {error.strerror}.") from None
    rings = [line.split(maxsplit=5)[-1] for line in maps.splitlines() if line.endswith(".ring")]
    if not rings:
        raise UsageError(f"gradwire inspect {given}: process {given} is not recorded.")
    return Path(rings[0]).parent


def inspection(directory: Path, *, whole: bool) -> list[str]:
    """Look once at the ranks that are recorded in `directory`; with `whole`, show all of their stacks."""
    with closing(RunFollower(directory)) as ranks:
        watch = HangWatch(ranks, deadline=0.0)
        ranks.look()
        if not ranks.ranks:
            raise nothing_recorded(directory, *ranks.damage.values())
        stacks = ranks.stacks(ranks.ranks.values())
        lines: list[str] = []
        for _, rank in sorted(ranks.ranks.items()):
            lines += _rank_lines(ranks, rank, stacks.get(rank.rank, ()), whole=whole)
        lines += [f"warning: {directory / name}: {what}" for name, what in ranks.damage.items()]
        merged = merge_warnings((r.rank, r.header, r.warnings) for r in ranks.ranks.values())
        lines += [f"warning: {warning}" for warning in fold_repeated(merged)]
        lines += describe(stragglers_over_time(ranks.steps))
        reports = saved_hangs(directory) if ranks.is_over else []
        waiting, outcome = watch.waiting, ranks.outcome
        if reports:
            saved = directory / reports[-1].file
            lines += ["", f"While it ran, this was reported, and saved in {saved}: see gradwire report {directory}"]
            lines += [f"  {text}" for _, _, text in reports[-1].suspects]
        # A report that was saved while the ranks ran contains more than one that is made now.
        reported = reports and reports[-1].is_about(None if waiting is None else waiting.record)
        if not reported and (outcome is None or outcome.text):
            lines += _hang_lines(watch, waiting, outcome)
        if outcome is not None:
            lines += ["", f"The run has ended: {outcome.text or 'no rank has failed'}"]
        return lines


def _hang_lines(watch: HangWatch, waiting: LongWait | None, outcome: RunOutcome | None) -> list[str]:
    found = watch.stall() if waiting is None else (waiting, watch.suspects(waiting))
    if found is None:
        return []
    wait, suspects = found
    # A process that the launcher ended when another rank had failed was not dead while others waited for it.
    ended = () if outcome is None else [one.rank for one in outcome.ranks if one.stopped]
    stopped = {int(watch.run.ranks[rank].header["pid"]) for rank in ended if rank in watch.run.ranks}
    for i, one in enumerate(suspects):
        if one.cause is Cause.DEAD and one.pid in stopped:
            suspects[i] = replace(one, cause=Cause.ENDED_SINCE)
    return ["", *report_lines(wait, suspects)]


def _rank_lines(ranks: RunFollower, rank: RankProgress, stacks: Sequence[Stack], *, whole: bool) -> Iterator[str]:
    state = ranks.state(rank)
    waiting = rank.waiting_in()
    own = user_line(stacks[0], rank.header) if stacks else None
    here = rank in ranks.local_ranks
    where = "" if here else f" on {rank.header['host']}"
    ended = state is ProcessState.GONE and rank.ended
    parts = [f"rank {rank.rank} (process {rank.header['pid']}{where}): {'ended' if ended else state.value}"]
    if rank.step >= 0:
        parts.append(f"step {rank.step}")
    if own is not None:
        parts.append(f"at {own.short}")
    yield ", ".join(parts)
    if waiting is not None:
        record, since = waiting
        how_long = f"for {elapsed((ranks.now - since) / 1e9)} in" if here else "in"
        yield f"    {'at its end in' if state is ProcessState.GONE else how_long} {described(record)}"
    for number, stack in enumerate(stacks if whole else []):
        yield f"    {'main thread' if number == 0 else 'another thread'}:"
        for frame in stack:
            yield f"      {frame.short}"
