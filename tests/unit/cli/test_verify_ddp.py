"""`gradwire run --verify-ddp`: what is compared and concluded, with runs that are made up."""

import json
from pathlib import Path

import pytest

from gradwire.cli.verify_ddp import verify_ddp
from gradwire.errors import UsageError
from gradwire.launch.environment import VERIFY
from gradwire.observe.step_digests import digest_file

MODEL = {"model": "Net"}


def step(gradient, parameter=7):
    norm = float("nan") if gradient == 99 else 2.0
    digest = None if gradient is None else [gradient, norm, -norm if gradient == 97 else norm]
    return {"gradients": {"w": digest, "b": [1, 1.0]}, "parameters": {"w": [parameter, 1.0], "b": [2, 1.0]}}


class Launcher:
    """Ranks that write these rows, run by run; `codes` are the exit codes."""

    def __init__(self, *runs, codes=(0, 0, 0)):
        self.runs, self.codes = list(runs), list(codes)
        self.classes = []

    def __call__(self, name, variables):
        which, _, folder = variables[VERIFY].split(":", 2)
        self.classes.append(which)
        for rank, rows in enumerate(self.runs.pop(0)):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            digest_file(Path(folder), rank).write_text(text + '{"gradients": {"cut off')
        return self.codes.pop(0)

    def verify(self):
        return verify_ddp(self, steps=3, ranks=2)


SAME = [[MODEL, step(1), step(99), step(None)]] * 2
"""Also with NaN, and without a gradient."""


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (
            [SAME[0], [MODEL, step(1), step(99), step(4)]],
            "the gradient of w in step 3 on rank 1 (none with torch's class, in",
        ),
        (
            [SAME[0], [MODEL, step(1), step(99, 8), step(4)]],
            "the parameter w after step 2 on rank 1 (norm 1 with torch's",
        ),
        ([[MODEL, step(1), step(98), step(None)]] * 2, "the gradient of w in step 2 on rank 0 (norm nan with"),
        (
            [[MODEL, step(97), step(99), step(None)]] * 2,
            "the gradient of w in step 1 on rank 0 (norm 2 with torch's class, 2 with gradwire's, about 4 of the difference)",
        ),
        ([SAME[0], SAME[0][:-1]], "rank 1 makes 3 steps with torch's class and 2 steps with gradwire's"),
    ],
)
def test_the_first_difference(other, expected, capsys):
    launcher = Launcher(SAME, other, SAME)
    assert launcher.verify() == 1
    assert launcher.classes == ["torch", "gradwire", "torch"]
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"gradwire run: different: {expected}")
    assert last.endswith("Two runs with torch's class are equal.")


def test_three_ranks_round_differently(capsys):
    runs = [[[MODEL, step(digest)]] * 3 for digest in (1, 2, 1)]
    assert verify_ddp(Launcher(*runs), steps=1, ranks=3) == 1
    assert capsys.readouterr().err.endswith("averages are rounded differently: try with 2.\n")


def test_equal_runs_need_no_third(capsys):
    launcher = Launcher(SAME, SAME)
    assert launcher.verify() == 0
    assert launcher.classes == ["torch", "gradwire"]
    assert capsys.readouterr().err.splitlines() == [
        "gradwire run: 3 steps with torch's class",
        "gradwire run: 3 steps with gradwire's",
        "gradwire run: bitwise equal: 2 parameters and their gradients in 3 steps on 2 ranks",
    ]


def test_a_script_that_ends_early(capsys):
    short = [rows[:-1] for rows in SAME]
    assert Launcher(short, short).verify() == 0
    assert "in 2 steps (the script ended before step 3) on 2 ranks" in capsys.readouterr().err


def test_a_script_that_is_not_deterministic():
    with pytest.raises(UsageError, match=r"not deterministic.*the gradient of w in step 1 on rank 0.*Set the seeds"):
        Launcher(SAME, [[MODEL, step(5)]] * 2, [[MODEL, step(6)]] * 2).verify()


@pytest.mark.parametrize(("rows", "wrong"), [([], "has wrapped no model"), ([MODEL], "no optimizer")])
def test_a_script_with_nothing_to_compare(rows, wrong):
    launcher = Launcher([rows] * 2)
    with pytest.raises(UsageError, match=wrong):
        launcher.verify()
    assert launcher.classes == ["torch"]


@pytest.mark.parametrize(
    ("runs", "codes", "last"),
    [
        ([[[]] * 2], [7], "with torch's class the script ended with code 7 after 0 steps"),
        ([SAME, [SAME[0][:2]] * 2], [0, 5], "until then it was bitwise equal"),
        ([SAME, [[MODEL, step(3)]] * 2], [0, 5], "before that it differs in the gradient of w in step 1 on rank 0"),
        ([SAME, [[MODEL, step(3)]] * 2, SAME], [0, 0, 6], "with torch's class again the script ended with code 6"),
    ],
)
def test_a_script_that_fails(runs, codes, last, capsys):
    assert Launcher(*runs, codes=codes).verify() == codes[-1]
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"gradwire run: {last}")
