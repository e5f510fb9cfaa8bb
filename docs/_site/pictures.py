"""Makes pictures of the documentation from runs of gradwire: `.venv/bin/python docs/_site/pictures.py [NAME ...]`.

hang and watch are what a terminal shows; slow-rank (trace.svg and report-step.svg) and overlap are drawn from the records of a run.
They depend on the machine: after making one again, compare the text of the page around it. Pictures follow the light or dark mode
of the reader and have a background of their own, so that they are readable on any page.
"""

from __future__ import annotations

import argparse
import html
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

import gradwire as gw
from gradwire.cli.live_view import picture
from gradwire.cli.terminal_svg import terminal_svg
from gradwire.lab import Throttled
from gradwire.observe.report.render import render_page
from gradwire.observe.report.report_model import load_report
from gradwire.observe.rings.intervals import operations
from gradwire.observe.rings.run_follower import RunFollower
from gradwire.observe.run_status import RunMonitor
from gradwire.observe.trace import TraceSlice, Track, tracks
from gradwire.testing import run_ranks

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
LEFT, RIGHT, WIDTH = 96, 16, 900
ROW, BAR, TITLE = 22, 17, 30
LETTER = 6.1
STYLE = """\
:root { --card: #fff; --text: #1c2330; --dim: #5d6778; --line: #dde2ea; --data: #e2a33b; --forward: #6fb7e6; --backward: #2b6cb0;
  --exposed: #d1495b; --optimizer: #3a9d78; --buckets: #d8dee8; --hook: #c9b6d8; --wire: #8fbaa9; --dark: #1c2330; --light: #fff }
@media (prefers-color-scheme: dark) { :root { --card: #1a2029; --text: #e4e8ee; --dim: #98a3b3; --line: #2d3642; --data: #d9a441;
  --forward: #74bdea; --backward: #3f7fc4; --exposed: #e0606f; --optimizer: #45ab86; --buckets: #aeb9c9; --hook: #b79fcb;
  --wire: #7fb09d } }
text { font: 12px DejaVu Sans, Helvetica, Arial, sans-serif; fill: var(--text) }
.title { font-weight: bold; font-size: 14px } .axis { fill: var(--dim) }
.in { font-size: 10.5px; fill: var(--dark) } .on { fill: var(--light) }
.card { fill: var(--card); stroke: var(--line) } .grid { stroke: var(--line) }
"""
COLORS = {"exposed communication": "exposed"}
DARK = {"backward", "exposed"}


# -- what a terminal shows ---------------------------------------------------------------------------------------------


@contextmanager
def gradwire_run(*words: str) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A run of `gradwire run` with these arguments, in the directory of the examples, and where it is recorded."""
    with tempfile.TemporaryDirectory() as state:
        environ = {**os.environ, "XDG_STATE_HOME": state}
        command = [sys.executable, "-m", "gradwire", "run", *words]
        started = subprocess.Popen(command, cwd=ROOT / "examples", env=environ, stderr=subprocess.PIPE, text=True)
        try:
            yield Path(state, "gradwire", "runs", "latest"), started
        finally:
            started.send_signal(signal.SIGTERM)
            started.communicate(timeout=60)


def lines_until(run: subprocess.Popen[str], words: str) -> list[str]:
    """What the launcher writes up to the line with `words`."""
    found: list[str] = []
    assert run.stderr is not None
    for line in run.stderr:
        found.append(line.rstrip("\n"))
        if words in line:
            return found
    raise SystemExit(f"the run has ended without {words!r}: {found}")


def hang() -> dict[str, str]:
    """The report of a hang, with the rank, its line and its parameters in color."""
    with gradwire_run("-n", "3", "hang.py", "loop") as (recorded, run):
        lines = lines_until(run, "saved as")
        text = "\n".join(lines).replace(str(recorded.parents[2]), "~/.local/state").replace(f"{ROOT}/examples/", "")
    shown = Text(f"$ gradwire run -n 3 hang.py loop\n{text}")
    shown.highlight_regex(r"(?m)^\$ .*", "bold")
    shown.highlight_regex(r"gradwire run:", "dim")
    shown.highlight_regex(r"ranks 0, 2 have waited for [\d.]+ s", "bold yellow")
    shown.highlight_regex(r"rank 1 \(process \d+, \w+\)", "bold red")
    shown.highlight_regex(r"search\(\) at hang.py:\d+", "bold cyan")
    shown.highlight_regex(r"no gradient yet of .*", "bold magenta")
    return {"hang": terminal_svg(shown, title="a hang: rank 1 is in an endless loop", columns=94)}


def watch() -> dict[str, str]:
    """The live view of a run with a slow rank."""
    with gradwire_run("-n", "4", "slow_rank.py", "--steps", "1000") as (recorded, run):
        lines_until(run, "without rank 2")
        monitor = RunMonitor(RunFollower(recorded.resolve(), tail=16384))
        try:
            monitor.look_back()
            console = Console(width=112, force_terminal=True)
            with console.capture() as view:
                console.print(picture(monitor.status(), 112, 40))
        finally:
            monitor.run.close()
    return {
        "watch": terminal_svg(Text.from_ansi(view.get()), title="gradwire run -n 4 --watch slow_rank.py", columns=112)
    }


# -- drawn from the records of a run -----------------------------------------------------------------------------------


Rank = tuple[int, list[Track]]
"""Its number, and its tracks; the first is that of the steps."""


def tracks_of(directory: str | Path) -> list[Rank]:
    """The tracks of all ranks of a run on this host."""
    rings = gw.observe.read_rings(directory)
    return [(ring.rank, list(tracks(ring, operations(ring.records)))) for ring in rings]


def window(ranks: Sequence[Rank], step: int) -> tuple[int, int]:
    """When the first of these ranks begins a step, and when the last one ends it."""
    found = [one for _, own in ranks for one in own[0][1] if one.arguments.get("step") == step]
    return min(one.start for one in found), max(one.end for one in found)


def fastest(ranks: Sequence[Rank]) -> tuple[int, int]:
    """The window of the fastest step: what else runs on this machine makes others longer."""
    steps = [one.arguments["step"] for one in ranks[0][1][0][1] if "step" in one.arguments]
    return min((window(ranks, step) for step in set(steps[50:-10])), key=lambda found: found[1] - found[0])


def rows_of(rank: Rank, begin: int, end: int, names: Sequence[str]) -> list[Track]:
    """The tracks of a rank whose names begin with one of `names`, and what is on them in the window."""
    rows = [(name, [one for one in slices if one.end > begin and one.start < end]) for name, slices in rank[1]]
    return [(name, slices) for name, slices in rows if slices and name.startswith(tuple(names))]


class Drawing:
    """Rows of bars, panel below panel, on one scale of time."""

    def __init__(self, nanoseconds: int) -> None:
        self.scale = (WIDTH - LEFT - RIGHT) / nanoseconds
        self.shapes: list[str] = []
        self.y = 12

    def text(self, x: float, y: float, words: str, style: str = "", anchor: str = "start") -> None:
        """Words at a place."""
        named = f' class="{style}"' if style else ""
        self.shapes.append(f'<text x="{x:.1f}" y="{y:.1f}"{named} text-anchor="{anchor}">{html.escape(words)}</text>')

    def title(self, words: str) -> None:
        """The title of the rows that follow."""
        self.text(12, self.y + 16, words, "title")
        self.y += TITLE

    def rows(self, rows: Sequence[Track], begin: int, end: int) -> None:
        """A row for each track; tracks of the same name have one label."""
        before = ""
        for name, slices in rows:
            if name != before:
                self.text(LEFT - 8, self.y + 13, name.partition(":")[0], "axis", "end")
            before = name
            for one in slices:
                self._bar(one, name, max(one.start, begin) - begin, min(one.end, end) - begin)
            self.y += ROW

    def _bar(self, one: TraceSlice, track: str, start: int, stop: int) -> None:
        kind = track.partition(":")[0]
        color = COLORS.get(one.name, one.name.partition(" ")[0]) if kind == "step" else kind
        x, width = LEFT + start * self.scale, max(1.0, (stop - start) * self.scale - 0.6)
        shape = (
            f'<rect x="{x:.1f}" y="{self.y}" width="{width:.1f}" height="{BAR}" rx="2" style="fill: var(--{color})"/>'
        )
        self.shapes.append(shape)
        words = next((words for words in (one.name, one.name.split()[-1]) if len(words) * LETTER + 8 < width), "")
        if words:
            self.text(x + 5, self.y + 12.5, words, f"in{' on' if color in DARK else ''}")

    def picture(self, label: str) -> str:
        """The picture, with the axis of time."""
        top, bottom = 8, self.y + 4
        milliseconds = (WIDTH - LEFT - RIGHT) / self.scale / 1e6
        step = next(one for one in (1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 1000) if milliseconds / one <= 10)
        grid = []
        for value in range(0, int(milliseconds) + 1, step):
            x = LEFT + value * 1e6 * self.scale
            grid.append(f'<path class="grid" d="M{x:.1f} {top}V{bottom}"/>')
            self.text(x, bottom + 16, f"{value} ms" if value else "0", "axis", "end" if x > WIDTH - 30 else "middle")
        height = bottom + 28
        card = f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>'
        label = html.escape(label)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">'
        )
        return "\n".join([head, f"<style>\n{STYLE}</style>", card, *grid, *self.shapes, "</svg>", ""])


def slow_rank() -> dict[str, str]:
    """A step of a run with a slow rank: on ranks 0 and 2 as in a trace, and on all ranks as in a report."""
    with gradwire_run("-n", "4", "slow_rank.py") as (recorded, run):
        print("\n".join(lines_until(run, "without rank 2")))
        run.wait(timeout=300)
        directory = recorded.resolve()
        for command in (["trace", "-o", os.devnull], ["report", "--text"]):
            print(f"$ gradwire {' '.join(command)}", flush=True)
            subprocess.run([sys.executable, "-m", "gradwire", *command, str(directory)], check=True)
        ranks = tracks_of(directory)
        page = render_page(load_report(directory))
    return {"trace": trace([ranks[0], ranks[2]]), "report-step": report_step(page)}


def trace(ranks: Sequence[Rank]) -> str:
    """Steps, buckets, hooks and collectives of some ranks."""
    begin, end = fastest(ranks)
    drawing = Drawing(end - begin)
    for rank in ranks:
        drawing.title(f"rank {rank[0]}")
        drawing.rows(rows_of(rank, begin, end, ("step", "buckets", "hook", "wire")), begin, end)
        drawing.y += 6
    return drawing.picture("A step of ranks 0 and 2")


def report_step(page: str) -> str:
    """The typical step of a report, as its page draws it."""
    [style] = re.findall(r"<style>(.*?)</style>", page, re.S)
    drawn = next(one for one in re.findall(r"<svg.*?</svg>", page, re.S) if "A typical step" in one)
    width, height = (float(one) for one in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn)[0])
    inner = re.sub(r"^<svg[^>]*>|</svg>$", "", drawn)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-16 -16 {width + 32:g} {height + 32:g}" role="img">'
    place = f'x="-15.5" y="-15.5" width="{width + 31:g}" height="{height + 31:g}" rx="8"'
    card = f'<rect {place} style="fill: var(--card); stroke: var(--line)"/>'
    return f"{head}\n<style>{style}</style>\n{card}{inner}</svg>\n"


MBIT, STEPS = 400, 150


def rank_of_overlap(where: str, bucket_cap_mb: float, group: gw.Group) -> None:
    """Train over a simulated link, in buckets of this size."""
    torch.set_num_threads(1)
    gw.observe.start(where, rank=group.rank, size=group.size)
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    link = Throttled(group, mbit=MBIT, latency_ms=0.5)
    model = gw.DistributedDataParallel(torch.nn.Sequential(*layers), process_group=link, bucket_cap_mb=bucket_cap_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(1024, 256)).square().mean().backward()
        optimizer.step()
    gw.observe.stop()


def overlap() -> dict[str, str]:
    """A step of rank 0 with one bucket for all gradients, and with one for each layer."""
    panels = []
    for title, megabytes in (("One bucket for all gradients", 1000.0), ("One bucket for each layer", 0.2)):
        with tempfile.TemporaryDirectory() as directory:
            run_ranks(_Task(directory, megabytes), 2, kind="shared_memory", timeout=300)
            ranks = tracks_of(directory)
        begin, end = fastest(ranks[:1])
        steps, *wires = rows_of(ranks[0], begin, end, ("step", "wire"))
        [exposed] = [one for one in steps[1] if one.name.startswith("exposed") and begin <= one.start < end]
        for one in (one for _, slices in wires for one in slices):
            one.name = one.arguments["label"]
        waits = (exposed.end - exposed.start) / 1e6
        title = f"{title}: {(end - begin) / 1e6:.0f} ms, of which {waits:.0f} ms are exposed communication"
        link = [row for row in wires if row[0] == wires[0][0]]  # not the group inside, which carries the operations out
        panels.append((title, [steps, *link], begin, end))
    drawing = Drawing(max(end - begin for *_, begin, end in panels))
    for title, rows, begin, end in panels:
        drawing.title(title)
        drawing.rows(rows, begin, end)
        drawing.y += 6
    return {"overlap-buckets": drawing.picture("The same step with one bucket and with eight")}


class _Task:
    """What a rank of `overlap` does; a class, because rank processes get it by pickle."""

    def __init__(self, where: str, bucket_cap_mb: float) -> None:
        self.where, self.bucket_cap_mb = where, bucket_cap_mb

    def __call__(self, group: gw.Group) -> None:
        rank_of_overlap(self.where, self.bucket_cap_mb, group)


PICTURES: dict[str, Callable[[], dict[str, str]]] = {
    "hang": hang,
    "watch": watch,
    "slow-rank": slow_rank,
    "overlap": overlap,
}


def main() -> None:
    """Make the pictures that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)}")
    for name in parser.parse_args().names or PICTURES:
        for file, drawn in PICTURES[name]().items():
            (IMAGES / f"{file}.svg").write_text(drawn, encoding="utf-8")
            print(f"docs/images/{file}.svg: {len(drawn):,} bytes")


if __name__ == "__main__":
    main()
