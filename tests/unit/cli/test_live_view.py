"""The live view at every size."""

import re
from dataclasses import replace

import pytest
from rich.console import Console

from gradwire.cli.live_view import chosen, picture
from gradwire.observe.run_status import Condition, RankStatus, RunStatus


def render(status, columns, lines, *, color):
    console = Console(width=columns, force_terminal=color, highlight=False, color_system="standard" if color else None)
    with console.capture() as capture:
        console.print(picture(status, columns, lines))
    return capture.get()


WARNING = "rank 3 is slow in data (60.1 ms, the others take 30): last in 19 of 20 steps (41215-41234)"


def rank(number, **facts):
    figures = {"seconds": 0.2384, "compute": 0.181, "exposed": 0.0574, "nbytes": 43.2e6, "doing": "backward"}
    return RankStatus(number, **{"condition": Condition.RUNS, "step": 41234, **figures, **facts})


def run(ranks, **facts):
    figures = {"step": 41234, "seconds": 0.2384, "compute": 0.181, "exposed": 0.0574, "samples_per_second": 1074.0}
    return RunStatus(tuple(ranks), **{**figures, **facts})


SLOW = rank(3, compute=0.217, exposed=0.0214, late=0.0361, is_slow=True, doing="data")
EIGHT = [SLOW if number == 3 else rank(number) for number in range(8)]
MANY = [SLOW if number == 3 else rank(number) for number in range(64)]
MANY[40] = rank(40, condition=Condition.STOPPED)
STATES = {
    "one": run([rank(0)]),
    "eight": run(EIGHT, slowest=SLOW, warning=WARNING),
    "many": run(MANY, slowest=SLOW, warning=WARNING, idle=40.0),
    "dead": run(
        [*EIGHT[:5], rank(5, condition=Condition.ENDED, doing=""), RankStatus(6), RankStatus(7, Condition.STARTING)]
    ),
    "hangs": run([*MANY[:39], rank(39, doing="data")], idle=40.0, missing=(39,)),
    "over": run([rank(number, condition=Condition.ENDED, doing="") for number in range(2)], idle=3600.0),
    "failed": run(
        [rank(0, condition=Condition.ENDED, doing="gone")], ending="rank 0 failed (exit code 1, after 2.0 s)"
    ),
    "failed early": replace(RunStatus((RankStatus(0, Condition.ENDED), RankStatus(1))), ending="rank 1 failed"),
    "none": RunStatus(tuple(RankStatus(number) for number in range(2))),
    "no step": RunStatus((RankStatus(0, Condition.STARTING),)),
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize(("columns", "lines"), [(79, 15), (79, 24), (119, 40), (200, 60), (40, 10), (20, 5)])
def test_it_fits(name, columns, lines):
    shown = render(STATES[name], columns, lines, color=False).splitlines()
    assert max(map(len, shown)) <= columns
    if columns >= 79:
        assert len(shown) <= lines


@pytest.mark.parametrize(("columns", "bar"), [(79, ""), (119, "███████████████████████░░░░░░░  ")])
def test_what_is_shown_of_a_rank(columns, bar):
    text = render(STATES["eight"], columns, 24, color=False)
    assert f"   0     41234      238      181     57.4  41.2 MiB        0  {bar}backward" in text
    assert re.search(r"^   3 .* \+36\.1 .*data slow *$", text, re.M)
    assert "step 41234 · 4.19 steps/s · 1,074 samples/s · 238 ms: compute 181, exposed 57.4" in text
    assert "slowest rank 3" in text
    assert "last warning: rank 3 is slow in data" in text


def test_ranks_that_do_not_train():
    text = render(STATES["dead"], 79, 24, color=False)
    assert re.search(r"^   5 .* ended *$", text, re.M)
    assert re.search(r"^   6 +not recorded yet *$", text, re.M)
    assert re.search(r"^   7 +no step yet *$", text, re.M)
    assert "0 of 2 ranks recorded so far" in render(STATES["none"], 79, 24, color=False)
    assert "no step for 40 s" in render(STATES["many"], 79, 24, color=False)
    hangs = render(STATES["hangs"], 79, 24, color=False)
    assert "step 41234, no step for 40 s, waiting for rank 39\n" in hangs
    assert "steps/s" not in hangs  # those of its last steps
    failed = render(STATES["failed"], 79, 24, color=False)
    assert "· rank 0 failed (exit code 1, after 2.0 s)" in failed
    assert re.search(r"^   0 .* gone *$", failed, re.M)
    assert "1 of 2 ranks recorded · rank 1 failed\n" in render(STATES["failed early"], 79, 24, color=False)
    assert "\x1b[31m" in render(STATES["dead"], 79, 24, color=True)
    assert "\x1b[31m" not in render(STATES["over"], 79, 24, color=True)
    over = render(STATES["over"], 79, 24, color=False).split("\n")
    assert [line.strip() for line in over[-3:]] == [
        "step 41234 · 4.19 steps/s · 1,074 samples/s · 238 ms: compute 181, exposed 57.4",
        "· ended",
        "",
    ]


def test_of_many_ranks_the_interesting_ones_are_shown():
    text = render(STATES["many"], 79, 15, color=False)
    assert re.search(r"^   3 .*data slow", text, re.M)
    assert re.search(r"^  40 .*stopped", text, re.M)
    assert "more ranks" in text
    assert [one.rank for one in chosen(MANY, 2)] == [3, 40]
    assert [one.rank for one in chosen(MANY, 1)] == [40]
