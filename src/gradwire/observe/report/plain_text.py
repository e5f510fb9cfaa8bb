"""The report as lines for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from gradwire.observe.report.charts import bin_steps
from gradwire.observe.report.findings import find
from gradwire.observe.report.render import clock, facts
from gradwire.observe.report.report_model import PHASES, RunReport
from gradwire.observe.units import duration, size

_WIDTH = 80
_BARS = "▁▂▃▄▅▆▇█"


def render_text(report: RunReport) -> str:
    """The report in at most 80 columns, except where a name is longer."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: RunReport) -> Iterator[str]:
    page = facts(report)
    header = page["header"]
    yield header["command"] or "run"
    yield f"{clock(report.begin)}, {duration(report.end - report.begin)} recorded, {page['records']:,} records"
    if report.succeeded:
        yield f"ended, but: {report.first_nonfinite}" if report.first_nonfinite else "ended without an error"
    yield f"{_count(len(report.ranks), 'rank')} on {_count(len(page['hosts']), 'host')}"
    yield f"gradwire {header['gradwire']}, torch {header['torch']}, Python {header['python']}"
    for group in page["groups"]:
        yield f"group {group['name']}: {group['kind']}, {_count(group['size'], 'rank')}"
    for hook in report.hooks:
        yield f"hook {hook}"
    if page["buckets"]:
        yield f"{_count(len(page['buckets']), 'bucket')}, {size(sum(one['bytes'] for one in page['buckets']))} in total"
    found = find(report)
    if found:
        yield from ("", "What to look at")
    for finding in found:
        for mark, text in (
            (f"  {finding.severity}: ", finding.title),
            ("    ", finding.detail),
            ("    ", finding.advice),
        ):
            if text:
                yield from textwrap.wrap(text, _WIDTH, initial_indent=mark, subsequent_indent="    ")
    if report.steps:
        yield from _steps(report)
    if report.lateness:
        yield from ("", "When ranks were ready: mean time after the first rank")
        for rank, row in report.lateness.items():
            if row:
                yield f"  rank {rank:<5} {duration(sum(row.values()) / len(row)):>10}"
    if report.traffic:
        yield from ("", "Bytes by hook and collective, all ranks")
        rows = [
            (key.hook or "no hook", key.op, key.group, f"{one.calls:,}", size(one.nbytes), duration(one.usual))
            for key, one in page["traffic"]
        ]
        yield from table([("hook", "collective", "group", "calls", "bytes", "median time"), *rows], right=3)
    yield from ("", "Ranks")
    ranks = [
        (
            str(rank.rank),
            str(rank.header["host"]),
            str(rank.header["pid"]),
            "ended" if rank.ended else rank.state.value,
            f"{rank.records:,}",
            f"{rank.steps[0].step}-{rank.steps[-1].step}" if rank.steps else "none",
        )
        for rank in report.ranks
    ]
    yield from table([("rank", "host", "process", "state", "records", "steps"), *ranks], right=4)


def _steps(report: RunReport) -> Iterator[str]:
    rows, per_bin = bin_steps(report.steps, 64)
    top = max(row.middle for row in rows) or 1.0
    bars = "".join(_BARS[max(0, min(7, int(row.middle / top * 8)))] for row in rows)
    yield from (
        "",
        f"Step time: median {duration(report.step_seconds)}, longest {duration(max(row.high for row in rows))}",
    )
    each = f", {per_bin} steps each" if per_bin > 1 else ""
    yield f"  {bars}  steps {report.steps[0].step}-{report.steps[-1].step}{each}"
    mean = report.mean_phases
    total = sum(mean.values()) or 1.0
    yield from ("", "Where a step's time goes")
    for phase in PHASES:
        share = mean[phase] / total
        yield f"  {phase.value:<22} {duration(mean[phase]):>10} {share:>6.1%}  {'#' * round(30 * share)}".rstrip()
    for line in report.timelines:
        yield from ("", f"{line.title}: step {line.step}, {duration(line.seconds)}")
        for row in line.rows:
            spent = {phase: sum(span.seconds for span in row.phases if span.phase is phase) for phase in PHASES}
            parts = ", ".join(f"{phase.value} {duration(seconds)}" for phase, seconds in spent.items() if seconds)
            yield from textwrap.wrap(parts, _WIDTH, initial_indent=f"  rank {row.rank}: ", subsequent_indent="    ")


def table(rows: Sequence[Sequence[str]], *, right: int) -> Iterator[str]:
    """Rows in columns; those from number `right` on are aligned to the right.

    >>> list(table([("op", "calls"), ("all_reduce", "7")], right=1))
    ['  op          calls', '  all_reduce      7']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(w) if i >= right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
