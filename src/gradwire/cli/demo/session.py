"""What `gradwire demo` does: it starts the ranks, shows their progress, and prints what they found."""

from __future__ import annotations

import functools
import os
import platform
import re
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import mean

import torch
from rich import console as rich_console
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

import gradwire
from gradwire import observe
from gradwire.cli.demo.compare import compare
from gradwire.cli.demo.model import DemoJob
from gradwire.cli.demo.train import Trained, Watch, train
from gradwire.cli.terminal_svg import terminal_svg
from gradwire.errors import UsageError
from gradwire.groups import Deadline, Group
from gradwire.groups.kinds import Ranks, find_kind
from gradwire.observe.report.render import render_page
from gradwire.observe.report.report_model import load_report
from gradwire.observe.rings.runs import new_run, runs_directory
from gradwire.observe.units import plural
from gradwire.runtime.host import usable_cores
from gradwire.testing import run_ranks

_OPERATION_LIMIT = 120.0
"""Seconds that one collective may take before it times out and names the missing ranks."""
_END_LIMIT = 5.0
"""Seconds that ranks that are threads get to end after Ctrl-C."""
_LINES, _BARS = 10, 16
"""The number of lines of progress, and the most ranks that have a bar."""


def run(args: Namespace) -> int:
    """Train, compare, show the results, and return the exit code."""
    if args.svg is not None and (args.svg.is_dir() or not os.access(args.svg.absolute().parent, os.W_OK)):
        raise UsageError(f"gradwire demo --svg {args.svg}: no file can be written there. Name another.")
    ranks = args.ranks or usable_cores()
    job = DemoJob(size=args.size, steps=args.steps, batch_size=args.batch_size, seed=args.seed)
    directory = None
    if find_kind(args.kind, who=f"gradwire demo --kind {args.kind}").ranks is not Ranks.THREADS:
        with suppress(OSError):  # the demo does not depend on being recorded
            directory = new_run(runs_directory(os.environ), "demo")
    # Rank processes take seconds to import torch; show what is happening.
    print(f"starting {plural(ranks, 'rank')} ({args.kind}): {job.size} model, {plural(job.steps, 'step')}", flush=True)
    trained = _run_world(job, ranks, kind=args.kind, timeout=args.timeout, directory=directory)
    console = Console(highlight=False)
    shown: list[RenderableType] = [summary(job, trained, kind=args.kind)]
    console.print(shown[-1])
    if args.compare:
        with console.status("comparing with torch's DDP"):
            shown.append(compare(job, args.mbit, max(2, ranks), timeout=args.timeout))
        console.print(shown[-1])
    lines = [conclusion(trained)]
    if directory is not None:
        lines.insert(0, _write_report(directory))
    if args.svg is not None:
        args.svg.write_text(terminal_svg(*shown, *lines, title="gradwire demo"), encoding="utf-8")
    for line in lines:
        console.print(line, soft_wrap=True)  # one line, whatever the width: scripts parse it
    return 0 if trained[0].replicas_equal else 1


def _write_report(directory: Path) -> Text:
    page = directory / "report.html"
    page.write_text(render_page(load_report(directory)), encoding="utf-8")
    home = os.path.expanduser("~")
    shown = f"~/{page.relative_to(home)}" if page.is_relative_to(home) else str(page)
    return Text(f"A page about this run, where its time went and what to look at: {shown}")


def _run_world(job: DemoJob, ranks: int, *, kind: str, timeout: float, directory: Path | None) -> list[Trained]:
    others, threads = set(threading.enumerate()), torch.get_num_threads()
    share = max(1, usable_cores() // ranks)
    rank_main = functools.update_wrapper(functools.partial(_rank_main, job, share, directory), train)  # errors name it
    torch.set_num_threads(share)  # for ranks that are threads of this process
    limit = functools.partial(Deadline, seconds=min(_OPERATION_LIMIT, timeout))
    try:
        return run_ranks(rank_main, ranks, kind=kind, timeout=timeout, wrap=limit)
    except KeyboardInterrupt:
        # A thread that is inside torch when the interpreter shuts down can crash the process.
        for thread in set(threading.enumerate()) - others:
            thread.join(_END_LIMIT)
        raise
    finally:
        torch.set_num_threads(threads)


def _rank_main(job: DemoJob, threads: int, directory: Path | None, group: Group) -> Trained:
    # oneDNN writes every kernel that it makes to /tmp/perf-PID.map, for profilers, and leaves the file there.
    os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")
    with progress(group.rank, group.size, job.steps) as watch, ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads)  # ranks share the cores; torch would use all of them in each
        if directory is not None:
            observe.start(directory, rank=group.rank, size=group.size)
            stack.callback(observe.stop)
        return train(job, group, watch)


@contextmanager
def progress(rank: int, ranks: int, steps: int) -> Iterator[Watch]:
    """A progress display of all ranks, drawn by rank 0, which has all losses; its standard output is the caller's."""
    console = Console()
    if rank != 0:
        yield lambda done, losses, rate: None
    elif not console.is_terminal:
        yield functools.partial(_print_line, steps)
    else:
        bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]:>7} tok/s"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
            refresh_per_second=5,
        )
        with bars:
            shown = range(min(ranks, _BARS))
            tasks = [bars.add_task(f"rank {one}", total=steps, loss="-.---", rate="-") for one in shown]

            def move(done: int, losses: Sequence[float], rate: float) -> None:
                for task, loss in zip(tasks, losses):
                    bars.update(task, completed=done, loss=f"{loss:.3f}", rate=f"{rate / len(losses):,.0f}")

            yield move


def _print_line(steps: int, done: int, losses: Sequence[float], rate: float) -> None:
    if done in (1, steps) or done % max(1, steps // _LINES) == 0:
        print(f"step {done:>{len(str(steps))}}/{steps}  loss {mean(losses):.3f}  {rate:,.0f} tokens/s")
        sys.stdout.flush()


def summary(job: DemoJob, trained: Sequence[Trained], *, kind: str) -> rich_console.Group:
    """A few facts, and a sample of the model's text."""
    first, versions = trained[0], f"torch {torch.__version__}, Python {platform.python_version()}"
    processors = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M) or [platform.machine()]
    facts = {
        "machine": f"{processors[0]}, {usable_cores()} usable of {os.cpu_count()} cores",
        "software": f"gradwire {gradwire.__version__}, {versions}",
        "ranks": f"{len(trained)}, group kind {kind}",
        "model": f"{job.size}, {first.parameters:,} parameters",
        "steps": f"{job.steps}, {first.tokens:,} tokens in {first.seconds:.1f} s",
        "loss": f"{first.first_loss:.3f} at the first step, {first.last_loss:.3f} at the last",
        "validation loss": f"{first.held_out_loss:.3f} on held-out modules",
        "for comparison": f"{first.unigram_entropy:.3f} for a model of character frequencies alone",
    }
    named = [Text.assemble((f"{name:<16}", "dim"), value) for name, value in facts.items()]
    sample = [Text(f"  {line}", no_wrap=True, overflow="ellipsis") for line in first.sample.rstrip().splitlines()]
    return rich_console.Group("", *named, "", Text("A sample of the model's output:", style="dim"), *sample, "")


def conclusion(trained: Sequence[Trained]) -> Text:
    """The final line: whether all replicas are equal."""
    digests, n = trained[0].fingerprints, len(trained)
    if not trained[0].replicas_equal:
        odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        return Text(f"The replicas are NOT bitwise equal: ranks {odd} differ from rank 0.", style="bold red")
    who = f"All {n} replicas are bitwise equal" if n > 1 else "The only replica is bitwise equal to itself"
    return Text(f"{who} (digest {digests[0]}).", style="bold green")
