"""The live view: the status of a run as a table, for a terminal of any size. For `gradwire run --watch` and `gradwire top`."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from gradwire.observe.run_status import Condition, RankStatus, RunStatus, without_figures
from gradwire.observe.units import milliseconds, plural, signed_milliseconds, size

_BAR = 30
_WIDE = 80 + _BAR
"""Columns from which on a bar shows how a step is divided."""
_COLUMNS = {"rank": 4, "step": 8, "step ms": 7, "compute": 7, "exposed": 7, "bytes": 8, "late ms": 7}
"""Widths that do not change, so that the view does not jump."""
_STYLES = {Condition.ENDED: "red", Condition.STOPPED: "red", Condition.ABSENT: "dim", Condition.STARTING: "dim"}


def picture(status: RunStatus, columns: int, lines: int) -> Group:
    """The view, at most `columns` wide and `lines` high; of many ranks, those that are worth a look."""
    console = Console(width=columns, file=io.StringIO())
    below = [_summary(status)]
    below += [Text(text) for text in (status.view, status.members) if text]
    if status.warning:
        below.append(Text(f"last warning: {status.warning}", style="yellow"))
    room = lines - 2 - sum(len(part.wrap(console, columns)) for part in below)
    shown = chosen(status.ranks, max(1, room))
    if len(shown) < len(status.ranks):
        shown = chosen(status.ranks, max(1, room - 1))
        below.insert(0, Text(f"and {plural(len(status.ranks) - len(shown), 'more rank')}", style="dim"))
    return Group(_table(status, shown, wide=columns >= _WIDE), *below)


def chosen(ranks: Sequence[RankStatus], most: int) -> list[RankStatus]:
    """At most `most` ranks, in order of rank: those that ended, then stragglers, then late ones."""

    def interest(rank: RankStatus) -> tuple[bool, bool, float]:
        return rank.condition in (Condition.ENDED, Condition.STOPPED), rank.is_slow, rank.late

    return sorted(sorted(ranks, key=interest, reverse=True)[:most], key=lambda rank: rank.rank)


def _table(status: RunStatus, ranks: Sequence[RankStatus], *, wide: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), expand=True)
    for head, width in _COLUMNS.items():
        table.add_column(head, justify="right", no_wrap=True, width=width)
    if wide:
        table.add_column("compute, exposed", width=_BAR, no_wrap=True)
    table.add_column("now", no_wrap=True, overflow="ellipsis", ratio=1)
    longest = max((rank.seconds for rank in status.ranks), default=0.0)
    for rank in ranks:
        style = "" if status.is_over else _STYLES.get(rank.condition, "")  # red: it has ended while others run
        table.add_row(*_cells(rank), *([_bar(rank, longest)] if wide else []), _now(rank), style=style)
    return table


def _cells(rank: RankStatus) -> list[str | Text]:
    step = str(rank.step) if rank.step >= 0 else ""
    if not rank.seconds:
        return [str(rank.rank), step, "", "", "", "", ""]
    known = ["", "", ""]
    if rank.has_communication:
        known = [milliseconds(rank.compute), milliseconds(rank.exposed), size(rank.nbytes)]
    late = Text(signed_milliseconds(rank.late), style="bold yellow" if rank.is_slow else "")
    return [str(rank.rank), step, milliseconds(rank.seconds), *known, late]


def _now(rank: RankStatus) -> Text:
    if rank.condition is not Condition.RUNS:
        known = rank.condition in (Condition.STARTING, Condition.ENDED) and rank.doing
        return Text(known or rank.condition.value)
    if rank.is_slow:
        return Text.assemble((rank.doing, ""), (" slow", "bold yellow"))
    return Text(rank.doing)


def _bar(rank: RankStatus, longest: float) -> Text:
    if not rank.seconds or not longest:
        return Text()
    whole, waits = round(_BAR * rank.seconds / longest), round(_BAR * rank.exposed / longest)
    return Text.assemble(("█" * max(0, whole - waits), "green"), ("░" * waits, "yellow"))


def _summary(status: RunStatus) -> Text:
    parts = [without_figures(status)] if not status.seconds or status.is_idle else _figures(status)
    if status.ending or status.is_over:
        parts.append(status.ending or "ended")
    return Text(" · ".join(parts), style="bold")


def _figures(status: RunStatus) -> list[str]:
    parts = [f"step {status.step}", f"{status.steps_per_second:.3g} steps/s"]
    if status.samples_per_second:
        parts.append(f"{status.samples_per_second:,.0f} samples/s")
    parts.append(f"{milliseconds(status.seconds)} ms")
    if status.has_communication:
        parts[-1] += f": compute {milliseconds(status.compute)}, exposed {milliseconds(status.exposed)}"
    if status.slowest is not None:
        parts.append(f"slowest rank {status.slowest.rank}")
    return parts
