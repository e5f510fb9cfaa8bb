"""`gradwire run --nonfinite`, `--check-divergence`, and what a report shows of a run whose gradients became NaN."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradwire import observe, policies
from gradwire.cli import main
from gradwire.errors import NonFiniteGradient, ReplicasDiverged, UsageError
from gradwire.groups import Group, ThreadGroup
from gradwire.hooks import diloco
from gradwire.launch.environment import CHECK_DIVERGENCE, NONFINITE, read_checks
from gradwire.parallel import DistributedDataParallel as DDP, replicate
from gradwire.policies import DefaultChecks, NonFinite
from gradwire.testing import run_ranks
from helpers.poisoned_model import Model, inputs
from helpers.warm_python import GRADWIRE_RUN

STEPS = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    optimizer.zero_grad()
    loss = model(torch.ones(1, 4)).sum()
    (loss * float("nan") if step == 3 and rank == 1 else loss).backward()
    optimizer.step()
print("skipped", getattr(model, "skipped_steps", "?"), "finite", all(bool(p.isfinite().all()) for p in model.parameters()))
"""
SCRIPTS = {
    "gw.DistributedDataParallel": """
import torch, gradwire as gw
rank = gw.init().rank
model = gw.DistributedDataParallel(torch.nn.Linear(4, 2))
""",
    "gw.replicate": """
import torch, gradwire as gw
group = gw.init()
rank, model = group.rank, torch.nn.Linear(4, 2)
gw.replicate(model, group=group)
""",
    "torch's DDP": """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
""",
    "explicit": """
import torch, gradwire as gw
rank = gw.init().rank
model = gw.DistributedDataParallel(torch.nn.Linear(4, 2), nonfinite=gw.policies.NonFinite.SKIP)
""",
}


@pytest.fixture
def launch(tmp_path: Path, warm_python: Any) -> Any:
    def start(script: str, *options: str) -> Any:
        (tmp_path / "train.py").write_text(SCRIPTS[script] + STEPS)
        words = ["-n", "2", "--run-dir", str(tmp_path / "run"), *options, str(tmp_path / "train.py")]
        return warm_python.run(GRADWIRE_RUN, *words, timeout=300)

    return start


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "explicit"])
def test_the_launcher_chooses_the_policy(script: str, launch: Any) -> None:
    options = ["--replace-ddp"] if script == "torch's DDP" else []
    done = launch(script, "--nonfinite", "raise", "--check-divergence", "2", *options)
    assert done.returncode == 1
    assert "NonFiniteGradient: averaging gradients in step 3: on rank 1 the gradient of bias is NaN" in done.stderr


def test_what_the_script_chooses_wins(launch: Any) -> None:
    done = launch("explicit", "--nonfinite", "raise")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("skipped 1 finite True") == 2


def test_without_a_policy_the_report_names_the_first_gradient(launch: Any, tmp_path: Path, capsys: Any) -> None:
    done = launch("gw.DistributedDataParallel")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finite False") == 2
    assert main(["report", str(tmp_path / "run"), "--text"]) == 0
    text = capsys.readouterr().out
    assert "ended, but: In step 3 the gradient of bias was NaN on rank 1" in text
    assert "ended without an error" not in text
    first = text.partition("What to look at\n")[2].splitlines()[0]
    assert first.strip() == "warning: In step 3 the gradient of bias was NaN on rank 1"


def test_the_environment_is_checked() -> None:
    assert read_checks({}) == DefaultChecks()
    assert read_checks({NONFINITE: "", CHECK_DIVERGENCE: ""}) == DefaultChecks()
    for name, value in ((NONFINITE, "ignore"), (CHECK_DIVERGENCE, "0"), (CHECK_DIVERGENCE, "often")):
        with pytest.raises(UsageError, match=f"{name}={value}"):
            read_checks({name: value})


@pytest.fixture
def defaults(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda **checks: monkeypatch.setattr(policies, "_default_checks", DefaultChecks(**checks))


def test_an_explicit_policy_wins_over_the_default(defaults: Any) -> None:
    defaults(nonfinite=NonFinite.RAISE)
    (group,) = ThreadGroup.world(1)
    for policy in (None, NonFinite.PASS):
        ddp = DDP(Model(), process_group=group, nonfinite=policy)
        loss = ddp(inputs(0), math.nan).sum()
        if policy is None:
            with pytest.raises(NonFiniteGradient):
                loss.backward()
        else:
            loss.backward()
    group.close()


@pytest.mark.parametrize("form", ["class", "function"])
def test_replicas_that_differ_are_found_within_the_interval(defaults: Any, form: str) -> None:
    defaults(check_divergence=3)

    def rank_main(group: Group) -> object:
        model: nn.Module = nn.Linear(4, 2)
        replicate(model, group=group) if form == "function" else None
        model = DDP(model, process_group=group) if form == "class" else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(20):
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.ones(1, 4))  # an evaluation is no place for a collective
            try:
                loss = model(torch.ones(1, 4)).sum()
            except ReplicasDiverged as error:
                return step, error.parameters
            loss.backward()
            optimizer.step()
            if step == 4 and group.rank == 1:
                with torch.no_grad():
                    next(iter(model.parameters()))[0, 0] += 1
        return None

    assert run_ranks(rank_main, 2) == [(6, ("weight",))] * 2


def test_replicas_are_not_compared_while_they_may_differ(defaults: Any) -> None:
    defaults(check_divergence=1)

    def rank_main(group: Group) -> None:
        model = nn.Linear(4, 2)
        replica = replicate(model, group=group, hook=diloco(every=2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        replica.attach_optimizer(optimizer)
        for step in range(5):
            optimizer.zero_grad()
            model(torch.full((1, 4), float(group.rank + step))).sum().backward()
            optimizer.step()
        replica.detach()

    run_ranks(rank_main, 2)


def test_only_the_first_is_recorded_and_only_with_a_recorder(tmp_path: Path) -> None:
    (group,) = ThreadGroup.world(1)
    ddp = DDP(Model(), process_group=group)
    ddp(inputs(0), math.nan).sum().backward()
    observe.start(tmp_path, rank=0, size=1)
    try:
        for step in range(3):
            ddp.zero_grad()
            ddp(inputs(0, step), (1.0, math.inf, math.nan)[step]).sum().backward()
    finally:
        observe.stop()
    (ring,) = observe.read_rings(tmp_path)
    facts = {"rank": 0, "step": 2, "parameter": "first.bias", "nan": False}
    assert ring.descriptions["nonfinite"] == [facts]
    group.close()
