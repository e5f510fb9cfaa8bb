"""What a report shows of an elastic run: its views, its faults, and the share of time that was spent on committed steps. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gradwire.observe.report.rank_summary import RankSummary
from gradwire.observe.rings.views import ENDS, ProcessFault, RunView, changed, read_views
from gradwire.observe.stragglers.steps import covered
from gradwire.observe.units import plural
from gradwire.recorder.format import RecordKind


@dataclass(frozen=True, slots=True)
class ElasticSummary:
    """An elastic run. Ranks in the report are its processes, by the number at the end of their ids; a second launcher's follow."""

    views: list[tuple[RunView, str]]
    """And who came and went with each."""
    faults: Sequence[ProcessFault]
    committed: int
    """How many steps were committed."""
    retried: int
    """How many steps were begun, dropped, and computed again."""
    goodput: float
    """The share of time, as far as it is recorded, that ranks were in steps that were committed."""
    ended: frozenset[str]
    """Processes whose end the launcher has recorded: others went on without them."""

    def __str__(self) -> str:
        again = f"{plural(self.retried, 'step')} computed again"
        return f"{plural(self.committed, 'step')} committed, {again}, goodput {self.goodput:.1%}"


def summarize_views(ranks: Sequence[RankSummary], faults: Sequence[ProcessFault]) -> ElasticSummary | None:
    """The views of these ranks, whose times are on one clock; None if the run was not elastic."""
    views = read_views(one for rank in ranks for one in rank.descriptions.get("view", []))
    if not views:
        return None
    rows = [(view, changed(before, view, faults)) for before, view in zip([None, *views], views)]
    committed = RecordKind.STEP_COMMITTED
    last = max([views[-1].step, *(mark.step + (mark.kind is committed) for rank in ranks for mark in rank.marks)])
    ended = frozenset(fault.member for fault in faults if fault.kind in ENDS)
    return ElasticSummary(
        rows, faults, last - views[0].step, sum(view.retried for view in views), _goodput(ranks), ended
    )


def _goodput(ranks: Sequence[RankSummary]) -> float:
    """Of the time since which the records of all ranks are complete. A step began when the one before was committed, or with the
    view; where the next mark is that of a view, the time until then was lost."""
    marked = [rank for rank in ranks if rank.marks]
    begin = max((rank.marks[0].time for rank in marked if rank.lost), default=0)
    begin = max(begin, min((rank.marks[0].time for rank in marked), default=0))
    good = [
        (max(begin, before.time), after.time)
        for rank in marked
        for before, after in pairwise(rank.marks)
        if after.kind is RecordKind.STEP_COMMITTED and after.time > begin
    ]
    end = max((rank.marks[-1].time for rank in marked), default=0)
    return covered(good) / (end - begin) if end > begin else 0.0
