"""Detection of hangs: what counts as a right report, and a few real runs."""

from __future__ import annotations

import json
import subprocess

import pytest

from detection.hang_faults import Trial, judge
from helpers.forked_python import ForkedPython


def report(**changes):
    suspect = {"rank": 1, "cause": "USER_CODE", "bucket": 1, "where": "python_loop() at train.py:3"}
    suspect["parameters"] = ["hidden.weight"]
    return {"collective": {"bucket": 1}, "suspects": [suspect | changes]}


@pytest.mark.parametrize(
    ("changes", "late", "problem"),
    [
        ({}, 0.5, ""),
        ({}, 1.5, "after the soft deadline"),
        ({"rank": 2}, 0.0, "named ranks [2], not 1"),
        ({"cause": "HOOK"}, 0.0, "cause HOOK"),
        ({"bucket": 0}, 0.0, "bucket 0, not 1"),
        ({"parameters": []}, 0.0, "parameters []"),
        ({"where": "main() at train.py:9"}, 0.0, "not in python_loop()"),
        ({"where": None}, 0.0, "not in python_loop()"),
    ],
)
def test_what_is_wrong_with_a_report(changes, late, problem):
    trial = Trial("gloo", "python", 1, report=report(**changes), late=late)
    assert problem in "; ".join(judge(trial, py_spy=True, compares=False))
    assert bool(judge(trial, py_spy=True, compares=False)) == bool(problem)


def test_no_report_is_wrong():
    assert judge(Trial("gloo", "python", 1), py_spy=True, compares=False) == ["no report"]


@pytest.mark.parametrize(
    ("output", "right"),
    [
        ("CollectiveMismatch: ranks differ in nbytes: rank 1 has 12, the others have 8", True),
        ("CollectiveMismatch: ranks differ in nbytes: rank 2 has 12, the others have 8", False),
        ("CollectiveTimeout", False),
    ],
)
def test_a_group_that_compares_collectives_names_the_rank_in_its_error(output, right):
    trial = Trial("shared_memory", "shape", 1, output=output)
    assert (judge(trial, py_spy=False, compares=True) == []) == right


HANGS = "import sys; from detection.hangs import main; sys.exit(main(sys.argv[1:]))"


def test_jobs_that_hang_and_one_that_does_not(tmp_path, warm_python):
    """Real jobs: the command in a process of its own, because ranks are forks of it."""
    options = ["--ranks", "2", "--repeat", "1", "--healthy", "1", "--hang-after", "2", "--at-once", "2"]
    options += [
        "--kinds",
        "shared_memory",
        "--faults",
        "loader",
        "killed",
        "stopped",
        "--json",
        str(tmp_path / "runs.json"),
    ]
    done = warm_python.run(HANGS, *options, timeout=300)
    saved = json.loads((tmp_path / "runs.json").read_text())
    # Not whether each was in time: that depends on the load of this machine.
    problems = {run["fault"]: [one for one in run["problems"] if "deadline" not in one] for run in saved}
    assert problems == {"loader": [], "killed": [], "stopped": [], "slow": []}, done


FORKS = """
import os, subprocess, sys
from helpers.forked_python import ForkedPython
code = "import os, sys; print(os.environ['WORD'], sys.argv[1:], sys.stdin.read()); sys.exit(int(sys.argv[1]))"
command = [sys.executable, "-I", "-c", code, "3"]
process = ForkedPython(command, env={"WORD": "here"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
print(process.communicate(b"in")[0], process.returncode, len(os.listdir("/proc/self/fd")))
error = ForkedPython([sys.executable, "-c", "1 / 0"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
print(b"ZeroDivisionError" in error.communicate()[1], error.returncode, len(os.listdir("/proc/self/fd")))
"""


def test_a_fork_runs_a_program_as_an_interpreter_does(warm_python):
    done = warm_python.run(FORKS, timeout=120)
    assert issubclass(ForkedPython, subprocess.Popen)
    first, second = done.stdout.splitlines()
    assert first.startswith("""b"here ['3'] in\\n" 3 """), done.stderr
    assert second == "True 1 " + first.split()[-1]  # no descriptor is left open
