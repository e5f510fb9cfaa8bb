"""Two runs side by side: what was measured of each, and what there is to look at in only one of them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator

from gradwire.observe.report.findings import Finding, find
from gradwire.observe.report.render import WIDTH, table, wrapped
from gradwire.observe.report.report_model import TRIMMED, RunReport
from gradwire.observe.stragglers.steps import Phase
from gradwire.observe.units import duration, plural, size


def compare_text(a: RunReport, b: RunReport) -> str:
    """In at most 80 columns, except where a name is longer."""
    return "\n".join(_lines(a, b)) + "\n"


def _lines(a: RunReport, b: RunReport) -> Iterator[str]:
    for letter, report in (("A", a), ("B", b)):
        yield f"{letter}  {report.directory}"
        yield f"   {report.ranks[0].header['command'] or 'run'}"
        steps = f"steps {report.steps[0].step}-{report.steps[-1].step}" if report.steps else "no step"
        hooks = ", ".join(report.hooks) or "no hook"
        text = f"{plural(len(report.ranks), 'rank')}, {steps}, {hooks}"
        yield from textwrap.wrap(text, WIDTH, initial_indent="   ", subsequent_indent="   ")
    yield ""
    rows = [("", "A", "B", "B / A"), _row("step, median", a.step_seconds, b.step_seconds, duration)]
    first, second = a.mean_phases, b.mean_phases
    known = a.has_exposed, b.has_exposed
    if first and second:
        rows.append(_row("step, trimmed mean", sum(first.values()), sum(second.values()), duration))
        for phase in Phase:
            where = known if phase is Phase.EXPOSED else (True, True)
            rows.append(_row(f"  {phase.value}", first[phase], second[phase], duration, where))
        rows.append(_row("exposed share of it", a.exposed_share, b.exposed_share, "{:.1%}".format, known))
    rows.append(_row("bytes sent per step", a.bytes_per_step, b.bytes_per_step, size, known))
    yield from table(rows, right=1)
    if first and second:
        yield f"  Trimmed mean: without the slowest and the fastest {TRIMMED:.0%} of steps."
    if not all(known):
        yield "  -: not known of torch's own DDP, whose waits are inside its backward."
    found = {letter: find(report) for letter, report in (("A", a), ("B", b))}
    for letter, other in (("A", "B"), ("B", "A")):
        others = {_kind(one) for one in found[other]}
        alone = [one for one in found[letter] if _kind(one) not in others]
        if alone:
            yield from ("", f"Only in {letter}")
        for one in alone:
            yield from wrapped(f"  {one.severity}: ", one.title)


def _kind(finding: Finding) -> str:
    """The same finding with other numbers is the same."""
    return re.sub(r"\d[\d.,]*", "", finding.title)


def _row(
    name: str, a: float, b: float, shown: Callable[[float], str], known: tuple[bool, bool] = (True, True)
) -> tuple[str, str, str, str]:
    first, second = shown(a) if known[0] else "-", shown(b) if known[1] else "-"
    return name, first, second, f"{b / a:.2f}" if a and all(known) else "-"
