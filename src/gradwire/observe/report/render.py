"""A report as a page, one file without references to others, laid out by `page.html`, which escapes all text; as lines; and two
reports side by side."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined

from gradwire.observe.report.charts import bin_steps, heat_map, history, phase_style, phases, timeline
from gradwire.observe.report.elastic_summary import ElasticSummary
from gradwire.observe.report.findings import Finding, find
from gradwire.observe.report.report_model import TRIMMED, RunReport
from gradwire.observe.stragglers.steps import Phase
from gradwire.observe.units import duration, plural, size

_T = TypeVar("_T")
MOST_RANKS = 64
_MOST_BARS = 32
_MOST_BUCKETS = 100
_MOST_TRAFFIC = 40
_MOST_VIEWS = 200


def render_page(report: RunReport) -> str:
    """The report as HTML."""
    loader = PackageLoader("gradwire.observe.report", "")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(duration=duration, size=size, phase_style=phase_style, clock=clock)
    return environment.get_template("page.html").render(facts(report))


def facts(report: RunReport) -> dict[str, Any]:
    """What the page lays out."""
    mean = report.mean_phases
    total = sum(mean.values())
    bars = _most_late(report.phases, report, _MOST_BARS)
    lateness: dict[int, Mapping[int, float]] = _most_late(report.lateness, report, MOST_RANKS)
    layouts = report.described("buckets")
    buckets = layouts[-1]["buckets"] if layouts else []
    traffic = sorted(report.traffic.items(), key=lambda item: -item[1].nbytes)
    return {
        "report": report,
        "header": report.ranks[0].header,
        "system": (report.described("system") or [{}])[-1],
        "hosts": _hosts(report),
        "findings": find(report),
        "phases": list(Phase),
        "mean": mean,
        "total": total,
        "history": history(report.steps) if report.steps else None,
        "bars": phases({rank: row for rank, row in bars.items() if row}) if mean else None,
        "bars_left_out": len(report.phases) - len(bars),
        "timelines": [(line, timeline(line)) for line in report.timelines],
        "heat": heat_map(lateness) if any(lateness.values()) else None,
        "heat_left_out": len(report.lateness) - len(lateness),
        "groups": _groups(report),
        "buckets": buckets[:_MOST_BUCKETS],
        "buckets_left_out": max(0, len(buckets) - _MOST_BUCKETS),
        "traffic": traffic[:_MOST_TRAFFIC],
        "traffic_left_out": max(0, len(traffic) - _MOST_TRAFFIC),
        "shown_ranks": report.ranks[:MOST_RANKS],
        "most_views": _MOST_VIEWS,
        "records": sum(rank.records for rank in report.ranks),
    }


def clock(seconds: float) -> str:
    """A time of day, on this machine's clock and in its time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds)).strip()


def _most_late(table: Mapping[int, _T], report: RunReport, most: int) -> dict[int, _T]:
    """The rows of at most `most` ranks: those that were ready last on average."""
    late = {rank: sum(report.lateness.get(rank, {}).values()) for rank in table}
    chosen = sorted(table, key=late.__getitem__, reverse=True)[:most]
    return {rank: table[rank] for rank in sorted(chosen)}


def _hosts(report: RunReport) -> dict[str, list[int]]:
    hosts: dict[str, list[int]] = {}
    for rank in report.ranks:
        hosts.setdefault(str(rank.header["host"]), []).append(rank.rank)
    return hosts


def _groups(report: RunReport) -> list[dict[str, Any]]:
    groups = [one for rank in report.ranks for one in rank.descriptions.get("group", [])]
    if report.elastic is not None:  # views have their own section
        groups = [one for one in groups if not one["name"].startswith("view ")]
    return list({(one["name"], one["kind"], one["size"]): one for one in groups}.values())[:MOST_RANKS]


WIDTH = 80
_BARS = "▁▂▃▄▅▆▇█"


def render_text(report: RunReport) -> str:
    """The report in at most 80 columns, except where a name is longer."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: RunReport) -> Iterator[str]:
    page = facts(report)
    header = page["header"]
    yield header["command"] or "run"
    yield f"{clock(report.begin)}, {duration(report.end - report.begin)} recorded, {plural(page['records'], 'record')}"
    if report.succeeded:
        yield f"ended, but: {report.first_nonfinite}" if report.first_nonfinite else "ended without an error"
    yield f"{plural(len(report.ranks), 'rank')} on {plural(len(page['hosts']), 'host')}"
    yield f"gradwire {header['gradwire']}, torch {header['torch']}, Python {header['python']}"
    for group in page["groups"]:
        yield f"group {group['name']}: {group['kind']}, {plural(group['size'], 'rank')}"
    for hook in report.hooks:
        yield f"hook {hook}"
    if page["buckets"]:
        yield f"{plural(len(page['buckets']), 'bucket')}, {size(sum(one['bytes'] for one in page['buckets']))} in total"
    if page["findings"]:
        yield from ("", "What to look at")
    for finding in page["findings"]:
        yield from wrapped(f"  {finding.severity}: ", finding.title)
        yield from wrapped("    ", finding.detail)
        yield from wrapped("    ", finding.advice)
    if report.elastic is not None:
        yield from _elastic(report.elastic)
    if report.steps:
        yield from _steps(report)
    if report.lateness:
        yield from ("", "When ranks were ready: mean time after the first rank")
        for rank, row in report.lateness.items():
            if row:
                yield f"  rank {rank:<5} {duration(sum(row.values()) / len(row)):>10}"
    if report.traffic:
        yield from ("", "Collectives by hook, all ranks; bytes are those of their inputs")
        rows = [
            (key.hook or "no hook", key.op, key.group, f"{one.calls:,}", size(one.nbytes), duration(one.usual))
            for key, one in page["traffic"]
        ]
        yield from table([("hook", "collective", "group", "calls", "bytes", "median time"), *rows], right=3)
    yield from ("", "Ranks")
    ranks = [
        (
            rank.member or str(rank.rank),
            str(rank.header["host"]),
            str(rank.header["pid"]),
            "ended" if rank.ended else rank.state.value,
            f"{rank.records:,}",
            f"{rank.steps[0].step}-{rank.steps[-1].step}" if rank.steps else "none",
        )
        for rank in report.ranks
    ]
    yield from table([("rank", "host", "process", "state", "records", "steps"), *ranks], right=4)


def _elastic(run: ElasticSummary) -> Iterator[str]:
    yield from ("", f"Views: {run}")
    rows = [
        (str(view.epoch), clock(view.time), str(view.step), str(len(view.members)), text) for view, text in run.views
    ]
    yield from table([("view", "began", "after step", "ranks", "what has changed"), *rows[-_MOST_VIEWS:]], right=5)
    for number, member in enumerate(run.views[-1][0].members):
        yield f"  rank {number} is {member}"
    if run.faults:
        yield from ("", f"Faults, and what followed: {len(run.faults)}")
    for fault in run.faults[-_MOST_VIEWS:]:
        yield from wrapped(f"  {clock(fault.time)}  ", fault.text)


def _steps(report: RunReport) -> Iterator[str]:
    rows, per_bin = bin_steps(report.steps, 64)
    top = max(row.middle for row in rows) or 1.0
    bars = "".join(_BARS[max(0, min(7, int(row.middle / top * 8)))] for row in rows)
    longest = max(row.high for row in rows)
    yield from ("", f"Step time: median {duration(report.step_seconds)}, longest {duration(longest)}")
    each = f", {per_bin} steps each" if per_bin > 1 else ""
    yield f"  {bars}  steps {report.steps[0].step}-{report.steps[-1].step}{each}"
    mean = report.mean_phases
    total = sum(mean.values()) or 1.0
    yield from ("", f"Where a step's time goes: mean {duration(total)}, without the slowest and fastest {TRIMMED:.0%}")
    for phase in Phase:
        if phase is Phase.EXPOSED and not report.has_exposed:
            yield f"  {phase.value:<22} {'-':>10} {'-':>6}"
            continue
        share = mean[phase] / total
        yield f"  {phase.value:<22} {duration(mean[phase]):>10} {share:>6.1%}  {'#' * round(30 * share)}".rstrip()
    for line in report.timelines:
        yield from ("", f"{line.title}: step {line.step}, {duration(line.seconds)}")
        for row in line.rows:
            spent = {phase: sum(span.seconds for span in row.phases if span.phase is phase) for phase in Phase}
            parts = ", ".join(f"{phase.value} {duration(seconds)}" for phase, seconds in spent.items() if seconds)
            yield from wrapped(f"  rank {row.rank}: ", parts)


def wrapped(mark: str, text: str) -> list[str]:
    """The lines of a text that begins with `mark`; none of an empty text."""
    return textwrap.wrap(text, WIDTH, initial_indent=mark, subsequent_indent="    ")


def table(rows: Sequence[Sequence[str]], *, right: int) -> Iterator[str]:
    """Rows in columns; those from number `right` on are aligned to the right.

    >>> list(table([("op", "calls"), ("all_reduce", "7")], right=1))
    ['  op          calls', '  all_reduce      7']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:right], widths)]
        numbers = [cell.rjust(width) for cell, width in zip(row[right:], widths[right:])]
        yield "  " + "  ".join(left + numbers).rstrip()


def compare_text(a: RunReport, b: RunReport) -> str:
    """What was measured of two runs, and what there is to look at in only one of them, in at most 80 columns."""
    return "\n".join(_comparison(a, b)) + "\n"


def _comparison(a: RunReport, b: RunReport) -> Iterator[str]:
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
