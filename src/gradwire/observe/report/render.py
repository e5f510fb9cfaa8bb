"""The page of a report: one file without references to others, laid out by `page.html`, which escapes all text."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined

from gradwire.observe.report.charts import heat_map, history, phase_style, phases, timeline
from gradwire.observe.report.findings import find
from gradwire.observe.report.report_model import PHASES, RunReport
from gradwire.observe.units import duration, size

_T = TypeVar("_T")
MOST_RANKS = 64
_MOST_BARS = 32
_MOST_BUCKETS = 100
_MOST_TRAFFIC = 40


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
        "phases": PHASES,
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
        "records": sum(rank.records for rank in report.ranks),
    }


def clock(seconds: float) -> str:
    """A time of day, on this machine's clock and in its time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds)).strip()


def _most_late(table: Mapping[int, _T], report: RunReport, most: int) -> dict[int, _T]:
    """The rows of at most `most` ranks: those that were ready last on average."""
    if len(table) <= most:
        return dict(table)

    def late(rank: int) -> float:
        return sum(report.lateness.get(rank, {}).values())

    chosen = sorted(sorted(table, key=late, reverse=True)[:most])
    return {rank: table[rank] for rank in chosen}


def _hosts(report: RunReport) -> dict[str, list[int]]:
    hosts: dict[str, list[int]] = {}
    for rank in report.ranks:
        hosts.setdefault(str(rank.header["host"]), []).append(rank.rank)
    return hosts


def _groups(report: RunReport) -> list[dict[str, Any]]:
    """The groups of all ranks: their names, kinds and sizes."""
    groups = [one for rank in report.ranks for one in rank.descriptions.get("group", [])]
    return list({(one["name"], one["kind"], one["size"]): one for one in groups}.values())[:MOST_RANKS]
