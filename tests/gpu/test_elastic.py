"""Elastic runs on a GPU: the device votes, a closed gate changes nothing, and what has died leaves nothing behind.

NCCL allows one rank per device, so its world is of one here: how it behaves when a peer dies, no test of one GPU can show.
"""

from __future__ import annotations

import gc
import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire.elasticity.device_vote import DeviceVote
from gradwire.elasticity.run import ElasticRun
from gradwire.elasticity.training import Training

pytestmark = pytest.mark.gpu

SLOTS, FAULTS, KILLS = 4, 100, 50
DATA = [
    (torch.randn(32, generator=torch.Generator().manual_seed(i)).double(), torch.tensor(i % 3.0)) for i in range(64)
]
MEMBER = """
import os, signal, json, sys
sys.path.insert(0, sys.argv[1])
import torch
from test_elastic import KILLS, deal, digest_of, loss, make_model
import gradwire as gw

model, optimizer = make_model()
me, seen = os.environ["GRADWIRE_MEMBER"], []
with gw.elastic(model, optimizer, data=deal(), kind="gloo", check_every=1) as run:
    for step in run:
        view = run.view
        dies = me == view.members[-1] != view.members[0] and step.number > view.step and view.epoch < 2 * KILLS
        if not seen or seen[-1][0] != view.epoch:
            free, _ = torch.cuda.mem_get_info()
            resident = int(open("/proc/self/statm").read().split()[1]) * 4096
            seen.append((view.epoch, len(view.members), torch.cuda.memory_allocated(), resident))
        for x, y in step:
            value = loss(model, x, y)
            if dies:
                model[1].weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
            value.backward()
        step.commit()
        if run.view.epoch >= 2 * KILLS and step.number > run.view.step + 2:
            break
if me == view.members[0]:
    print("RESULT", json.dumps({"steps": run.committed, "digest": digest_of(model), "seen": seen}), flush=True)
"""


@pytest.fixture(autouse=True)
def _sigterm() -> Iterator[None]:
    """The handler that a run leaves references it."""
    yield
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.collect()


def deal() -> gw.Deal:
    return gw.Deal(DATA, global_batch=8, slots=SLOTS, seed=3)


def make_model() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Gradients lie on a grid, so that their sums are exact, in any order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to("cuda", torch.float64)
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: (grad * 2**30).round() / 2**30)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    value: Tensor = (model(x.cuda(non_blocking=True)).squeeze(1) - y.cuda(non_blocking=True)).square().mean()
    return value


def alone(steps: int) -> nn.Module:
    """The same training without gradwire."""
    model, optimizer = make_model()
    for step in range(steps):
        for slot in range(SLOTS):
            loss(model, *deal().batch(step, slot)).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= SLOTS
        optimizer.step()
        optimizer.zero_grad()
    return model


def digest_of(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())).hexdigest()


@contextmanager
def running(steps: int) -> Iterator[tuple[ElasticRun, nn.Module, torch.optim.Optimizer]]:
    model, optimizer = make_model()
    with gw.elastic(model, optimizer, data=deal(), steps=steps, kind="nccl", check_every=0) as run:
        yield run, model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [value for one in optimizer.state.values() for _, value in sorted(one.items())]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *states)]


def test_no_step_synchronizes_and_the_bits_are_those_of_training_without(monkeypatch: pytest.MonkeyPatch) -> None:
    votes: list[DeviceVote] = []
    cast = DeviceVote.cast
    monkeypatch.setattr(DeviceVote, "cast", lambda vote: (votes.append(vote), cast(vote))[1])
    with running(20) as (run, model, _):
        pinned = [
            [tuple(t.pin_memory() for t in deal().batch(step, slot)) for slot in range(SLOTS)] for step in range(20)
        ]
        for step in run:
            gated = 2 <= step.number < 19  # the first vote of a view and the last are of hosts
            torch.cuda.set_sync_debug_mode("error" if gated else "default")
            try:
                for slot, _ in enumerate(step):
                    loss(model, *pinned[step.number][slot]).backward()
                assert step.commit()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert len(votes) == 18
    assert all(vote.passed for vote in votes)
    assert digest_of(model) == digest_of(alone(20))


def test_votes_that_fail_change_nothing_and_the_group_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every other step the row is cleared before the device comes to it, as by a member that freezes: nothing changes, bit for
    bit, the communicator is aborted, another one made, and the step computed again. Memory stays flat."""
    before: list[Tensor] = []
    unchanged, memory = [], []
    behind, reopen = Training.commit_behind, Training.reopen

    def commit_behind(training: Training, closed: Tensor) -> None:
        before[:] = state_of(training.model, training.optimizer)
        behind(training, closed)

    def reopened(training: Training) -> None:
        after = state_of(training.model, training.optimizer)
        unchanged.append(all(map(torch.equal, before, after)))
        reopen(training)
        memory.append((torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]))

    fails: set[int] = set()
    arm = DeviceVote.arm

    def arms(vote: DeviceVote) -> None:
        number = run.training.committed
        if number % 2 and number not in fails and len(fails) < FAULTS:
            fails.add(number)
        else:
            arm(vote)

    monkeypatch.setattr(Training, "commit_behind", commit_behind)
    monkeypatch.setattr(Training, "reopen", reopened)
    monkeypatch.setattr(DeviceVote, "arm", arms)
    steps = 2 * FAULTS + 10
    with running(steps) as (run, model, _):
        for step in run:
            for x, y in step:
                loss(model, x, y).backward()
            step.commit()
        assert run.view.epoch == FAULTS
    assert unchanged == [True] * FAULTS
    assert digest_of(model) == digest_of(alone(steps))
    third = len(memory) // 3
    assert memory[third][0] == memory[-1][0]
    assert memory[third][1] - memory[-1][1] < 2**25, "the device's memory shrinks with every group"


def test_a_member_killed_in_backward_costs_the_other_nothing(tmp_path: Path) -> None:
    """Two processes over gloo share the GPU. One is killed in backward, and replaced, again and again."""
    script = tmp_path / "member.py"
    script.write_text(MEMBER)
    command = [
        sys.executable,
        "-m",
        "gradwire",
        "run",
        "--nproc",
        "2",
        "--elastic",
        "1:2",
        str(script),
        str(Path(__file__).parent),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    line = next((line for line in done.stdout.splitlines() if "RESULT" in line), None)
    assert line is not None, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(line.split("RESULT", 1)[1])
    views = [view for view in result["seen"] if view[1] == 2]
    assert len(views) >= KILLS
    assert result["digest"] == digest_of(alone(result["steps"]))
    third = len(views) // 3
    assert {view[2] for view in views[third:]} == {views[-1][2]}
    assert views[-1][3] - views[third][3] < 2**25, "the survivor's memory grows with every view"
    print(f"{len(views)} views of two, {result['steps']} steps; memory {views[third]} to {views[-1]}")
