"""Where every rank of a run is now, as lines for people: what `gradwire inspect` prints. Without torch."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gradwire.observe.hangs.analysis import Cause, LongWait, Suspect
from gradwire.observe.hangs.hang_report import described, report_lines, saved_hangs
from gradwire.observe.hangs.hang_watch import HangWatch
from gradwire.observe.hangs.stacks import Stack, user_frames
from gradwire.observe.rings.rank_progress import RankProgress
from gradwire.observe.rings.ring import nothing_recorded
from gradwire.observe.rings.run_follower import RunFollower
from gradwire.observe.rings.run_outcome import RunOutcome
from gradwire.observe.run_warnings import fold_repeated, merge_warnings
from gradwire.observe.stragglers.detect import describe
from gradwire.observe.stragglers.straggler_watch import stragglers_over_time
from gradwire.runtime.host import ProcessState


def inspection(directory: Path, *, whole: bool) -> list[str]:
    """Look once at the ranks that are recorded in `directory`; with `whole`, show all of their stacks."""
    ranks = RunFollower(directory)
    watch = HangWatch(ranks, deadline=0.0)
    try:
        ranks.look()
        ranks.read_descriptions()
        if not ranks.ranks:
            raise nothing_recorded(directory, *ranks.damage.values())
        stacks = ranks.stacks(ranks.ranks.values())
        lines: list[str] = []
        for _, rank in sorted(ranks.ranks.items()):
            lines += _rank_lines(ranks, rank, stacks.get(rank.rank, ()), whole=whole)
        lines += [f"warning: {directory / name}: {what}" for name, what in ranks.damage.items()]
        merged = merge_warnings((r.rank, r.header, r.warnings) for r in ranks.ranks.values())
        lines += [f"warning: {warning}" for warning in fold_repeated(merged)]
        lines += describe(stragglers_over_time({rank.rank: rank.folder.steps for rank in ranks.local_ranks}))
        reports = saved_hangs(directory) if ranks.is_over else []
        waiting, outcome = watch.waiting, ranks.outcome
        if reports:
            saved = directory / reports[-1].file
            lines += ["", f"While it ran, this was reported, and saved in {saved}: see gradwire report {directory}"]
            lines += [f"  {text}" for _, _, text in reports[-1].suspects]
        # A report that was saved while the ranks ran contains more than one that is made now.
        reported = reports and reports[-1].is_about(None if waiting is None else waiting.record)
        if not reported and (outcome is None or outcome.text):
            lines += _hang_lines(watch, waiting, _stopped(ranks, outcome))
        if outcome is not None:
            lines += ["", f"The run has ended: {outcome.text or 'no rank has failed'}"]
        return lines
    finally:
        ranks.close()


def _stopped(ranks: RunFollower, outcome: RunOutcome | None) -> set[int]:
    """The processes of ranks that the launcher has ended."""
    ended = () if outcome is None else [one.rank for one in outcome.ranks if one.stopped]
    return {int(ranks.ranks[rank].header["pid"]) for rank in ended if rank in ranks.ranks}


def _hang_lines(watch: HangWatch, waiting: LongWait | None, stopped: Container[int]) -> list[str]:
    if waiting is not None:
        return ["", *report_lines(waiting, _as_it_ran(watch.suspects(waiting), stopped))]
    if (found := watch.stall()) is None:
        return []
    stall, suspects = found
    return ["", *report_lines(stall, _as_it_ran(suspects, stopped))]


def _as_it_ran(suspects: Sequence[Suspect], stopped: Container[int]) -> list[Suspect]:
    """A process that was ended when another rank had failed was not dead while others waited for it."""
    return [
        replace(one, cause=Cause.ENDED_SINCE) if one.cause is Cause.DEAD and one.pid in stopped else one
        for one in suspects
    ]


def _rank_lines(ranks: RunFollower, rank: RankProgress, stacks: Sequence[Stack], *, whole: bool) -> Iterator[str]:
    state = ranks.state(rank)
    waiting = rank.waiting_in()
    own = user_frames(stacks[0].frames, rank.header) if stacks else []
    here = rank in ranks.local_ranks
    where = "" if here else f" on {rank.header['host']}"
    ended = state is ProcessState.GONE and rank.descriptions.get("end")
    parts = [f"rank {rank.rank} (process {rank.header['pid']}{where}): {'ended' if ended else state.value}"]
    if rank.step >= 0:
        parts.append(f"step {rank.step}")
    if own:
        parts.append(f"at {own[0].relative_to(os.getcwd())}")
    yield ", ".join(parts)
    if waiting is not None:
        record, since = waiting
        how_long = f"for {(ranks.now - since) / 1e9:.1f} s in" if here else "in"
        yield f"    {'at its end in' if state is ProcessState.GONE else how_long} {described(record)}"
    for number, stack in enumerate(stacks if whole else []):
        yield f"    {'main thread' if number == 0 else 'another thread'}:"
        for frame in stack.frames:
            yield f"      {frame.relative_to(os.getcwd())}"
