"""What the demo prints at the end: a few facts, a sample, and one line on whether all replicas are equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group
from rich.text import Text

from gradwire.cli.demo.train import Job, Report
from gradwire.cli.experiment.machine import describe


def summary(job: Job, reports: Sequence[Report], *, kind: str) -> Group:
    """The reports of all ranks."""
    named = [Text.assemble((f"{name:<16}", "dim"), value) for name, value in facts(job, reports, kind=kind)]
    sample = [Text(f"  {line}", no_wrap=True, overflow="ellipsis") for line in reports[0].sample.rstrip().splitlines()]
    return Group("", *named, "", Text("A sample of the model's output:", style="dim"), *sample, "")


def facts(job: Job, reports: Sequence[Report], *, kind: str) -> Iterator[tuple[str, str]]:
    """What was run and its results, as (name, value) pairs."""
    report, machine = reports[0], describe()
    yield "machine", machine["cpu"]
    yield "software", machine["software"]
    yield "ranks", f"{len(reports)}, group kind {kind}"
    yield "model", f"{job.size}, {report.parameters:,} parameters"
    yield "steps", f"{job.steps}, {report.tokens:,} tokens in {report.seconds:.1f} s"
    yield "loss", f"{report.first_loss:.3f} at the first step, {report.last_loss:.3f} at the last"
    yield "validation loss", f"{report.held_out_loss:.3f} on held-out modules"
    yield "for comparison", f"{report.unigram_entropy:.3f} for a model of character frequencies alone"


def verdict(reports: Sequence[Report]) -> Text:
    """The final line."""
    prints, n = reports[0].fingerprints, len(reports)
    if not reports[0].replicas_equal:
        odd = [rank for rank, p in enumerate(prints) if p != prints[0]]
        return Text(f"The replicas are NOT bitwise equal: ranks {odd} differ from rank 0.", style="bold red")
    who = f"All {n} replicas are bitwise equal" if n > 1 else "The only replica is bitwise equal to itself"
    return Text(f"{who} (digest {prints[0]}).", style="bold green")
