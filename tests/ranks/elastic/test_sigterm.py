"""SIGTERM in a process of an elastic run: it leaves, but not as the last; when training has ended, it ends."""

from __future__ import annotations

import signal

import pytest

from helpers.warm_python import WarmPython

PROGRAM = """
import os, signal, torch, gradwire as gw
model = torch.nn.Linear(2, 1)
data = gw.Deal(torch.utils.data.TensorDataset(torch.ones(8, 2)), global_batch=4, slots=2)
run = gw.elastic(model, torch.optim.SGD(model.parameters(), lr=0.1), data=data, steps=3)
for step in run:
    for x, in step:
        model(x).sum().backward()
    if {when}:
        os.kill(os.getpid(), signal.SIGTERM)
    step.commit()
print(run.committed, run.left, flush=True)
{after}
os.kill(os.getpid(), signal.SIGTERM)
print("goes on", flush=True)
"""


@pytest.mark.parametrize(
    ("when", "after", "output", "status"),
    [
        ("step.number == 1", "", "", 1),
        ("False", "", "3 False\n", -signal.SIGTERM),
        ("False", "run.close()", "3 False\n", -signal.SIGTERM),
    ],
)
def test_sigterm_leaves_and_after_training_ends_the_process(
    when: str, after: str, output: str, status: int, warm_python: WarmPython
) -> None:
    done = warm_python.run(PROGRAM.format(when=when, after=after), timeout=100)
    assert (done.stdout, done.returncode) == (output, status), done.stderr
    assert ("TooFewMembers: alone leaves after step 2" in done.stderr) == (status == 1)
