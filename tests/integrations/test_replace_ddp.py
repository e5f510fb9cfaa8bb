"""Scripts that were written for torch's DDP, on ours, unchanged."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import observe
from gradwire.cli import main, run
from gradwire.hooks.named import NAMED_HOOKS
from gradwire.integrations.verified_script import _digest
from gradwire.launch.environment import VERIFY
from gradwire.launch.run_script import python_command
from gradwire.launch.supervise import Supervisor
from gradwire.observe.step_digests import first_difference, read_digests
from gradwire.recorder.format import RecordKind
from helpers.warm_python import GRADWIRE_RUN, WarmPython
from helpers.warm_ranks import run_script

SCRIPT = """
import copy, functools, io, json, sys
import torch
import torch.distributed as dist
import torch.nn.parallel.distributed as module
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
start = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
said = {"argv": sys.argv[1:], "name": __name__}


class Scaled(DDP):
    def forward(self, x):
        return 2 * super().forward(x)


def train(model, optimizer=None, steps=range(4)):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in steps:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = (model(x) - x[:, :4]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def fresh(cls=DDP, **flags):
    return cls(copy.deepcopy(start), **flags)


ddp = fresh()
said["plain"] = train(ddp)
said["class"] = type(ddp).__module__
classes = [DDP, torch.nn.parallel.DistributedDataParallel, module.DistributedDataParallel]
said["isinstance"] = [isinstance(ddp, cls) for cls in classes]
said["keys"] = [list(ddp.state_dict())[0], list(get_model_state_dict(ddp))[0]]
said["flags"] = train(fresh(torch.nn.parallel.DistributedDataParallel, find_unused_parameters=True, bucket_cap_mb=0.001))
said["views"] = train(fresh(static_graph=True, gradient_as_bucket_view=True))
said["mesh"] = train(fresh(device_mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),))))
delayed = copy.deepcopy(start)
said["delayed"] = train(
    DDP(
        delayed,
        delay_all_reduce_named_params=[("0.weight", delayed[0].weight)],
        param_to_hook_all_reduce=delayed[3].weight,
    )
)
said["subclass"] = train(fresh(Scaled))
for name, state, hook in [
    ("allreduce", None, default_hooks.allreduce_hook),
    ("fp16", None, default_hooks.fp16_compress_hook),
    ("powerSGD", powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook),
]:
    hooked = fresh()
    hooked.register_comm_hook(state, hook)
    said[name] = train(hooked)

model = fresh()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train(model, optimizer, range(2))
file = io.BytesIO()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
file.seek(0)
saved = torch.load(file)
model = fresh()
model.load_state_dict(saved["model"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer.load_state_dict(saved["optimizer"])
said["resumed"] = train(model, optimizer, range(2, 4))
with model.no_sync():
    model(torch.ones(2, 8)).sum().backward()
said["compiled"] = train(torch.compile(fresh(), backend="eager"))
print(json.dumps(said))
dist.destroy_process_group()
"""
REPLACED = "from gradwire.integrations import replace_ddp; replace_ddp()"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_has_the_same_losses_as_with_torchs_ddp(script: Path, warm_python: WarmPython) -> None:
    torchs = [json.loads(text) for text in run_script(warm_python, script, "--lr", "1")]
    ours = [json.loads(text) for text in run_script(warm_python, script, "--lr", "1", before=REPLACED)]
    assert [one.pop("class") for one in torchs] == ["torch.nn.parallel.distributed"] * 2
    assert [one.pop("class") for one in ours] == ["gradwire.parallel.ddp"] * 2
    assert ours == torchs
    assert ours[0]["resumed"] == ours[0]["plain"][2:]
    assert ours[0]["plain"] != ours[1]["plain"]
    assert all(ours[0]["isinstance"])


CHAIN = """
import runpy, sys
sys.argv = ["ddp_script", "--observe", {script!r}, "--lr", "1"]
runpy.run_module("gradwire.integrations.ddp_script", run_name="__main__", alter_sys=True)
"""
OBSERVED = """
import sys
import torch
import torch.distributed as dist
import neighbor
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
DDP(torch.nn.Linear(1, 1))
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(3, 4)).sum().backward()
optimizer.step()
print(type(model).__module__, __name__, sys.argv, neighbor.__name__)
dist.destroy_process_group()
"""


def test_its_steps_are_recorded_once(tmp_path: Path, warm_python: WarmPython) -> None:
    script = tmp_path / "script.py"
    script.write_text(OBSERVED)
    (tmp_path / "neighbor.py").touch()
    env = {"GRADWIRE_RUN_DIR": str(tmp_path / "run"), "RANK": "0", "WORLD_SIZE": "1", "GRADWIRE_HOOK": "bf16"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "GLOO_SOCKET_IFNAME": "lo"}
    (done,) = warm_python.run_all([(CHAIN.format(script=str(script)),)], envs=[env], timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"gradwire.parallel.ddp __main__ {[str(script), '--lr', '1']} neighbor\n"
    assert (
        done.stderr.count("gradwire: DistributedDataParallel is gradwire's, with cast(torch.bfloat16) > mean()\n") == 1
    )
    (ring,) = observe.read_rings(tmp_path / "run")
    assert ring.header["command"] == f"{script} --lr 1"
    kinds = [record.kind for record in ring.records]
    assert [kinds.count(kind) for kind in (RecordKind.FORWARD_BEGAN, RecordKind.FORWARD_ENDED)] == [1, 1]


@pytest.mark.parametrize(("options", "words"), [([], ["x.py", "1"]), (["-m"], ["x", "1"])])
def test_the_command_of_a_rank_which_is_recorded_as_any_other(
    options: Any, words: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(Supervisor, "supervise", lambda supervisor: started.append(supervisor._run) or 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    common = ["run", "-n", "1", "--replace-ddp"]
    assert main([*common, "--no-record", *options, *words]) == 0
    assert main([*common, "--run-dir", str(tmp_path / "run"), *options, *words]) == 0
    for plan, observed in zip(started, (False, True), strict=True):
        replaced = python_command("gradwire.integrations.ddp_script", errors=str(plan.errors), observe=observed)
        assert plan.command == [sys.executable, *replaced, *options, *words]


def test_the_hook_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its name is in the environment of the ranks; names are those of hooks that need no optimizer."""
    assert sorted(run.HOOKS) == sorted(name for name, hook in NAMED_HOOKS.items() if not hook.needs_optimizer)
    started: list[Any] = []
    monkeypatch.setattr(Supervisor, "supervise", lambda supervisor: started.append(supervisor._run) or 0)
    (tmp_path / "x.py").touch()
    script = str(tmp_path / "x.py")
    assert main(["run", "-n", "1", "--no-record", "--replace-ddp", "--hook", "quantize8", script]) == 0
    assert started[0].environments[0]["GRADWIRE_HOOK"] == "quantize8"
    assert main(["run", "-n", "1", "--no-record", "--hook", "quantize8", script]) == 2
    assert "Add --replace-ddp" in capsys.readouterr().err


HOOKED = """
import sys, torch
from gradwire.integrations import replace_ddp
import gradwire as gw
for wrong in ("quantize9", "diloco", gw.hooks.local_sgd(every=2)):
    try:
        replace_ddp(hook=wrong)
    except gw.UsageError as error:
        print(str(error).partition(". ")[0], file=sys.stderr)
replace_ddp(hook="quantize8")
(group,) = gw.ThreadGroup.world(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=gw.as_process_group(group))
print(model.replica.runner.hook)
model(torch.ones(1, 2)).sum().backward()
model.register_comm_hook(None, gw.hooks.mean())
print(model.replica.runner.hook)
"""


def test_models_have_the_hook_until_the_script_registers_another(warm_python: WarmPython) -> None:
    done = warm_python.run(HOOKED, timeout=120)
    assert done.returncode == 0, done.stderr
    q8 = "error_feedback() > quantize(bits=8, block=256, rounding='nearest', seed=0)"
    assert done.stdout.splitlines() == [q8, "mean()"]
    wrong = [line for line in done.stderr.splitlines() if line.startswith("replace_ddp(")]
    assert [line.partition(": ")[2] for line in wrong] == [
        "there is no such hook for gradients",
        "there is no such hook for gradients",
        "it needs the optimizer, which this function does not know",
    ]


VERIFIED = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


net = Net()
early = torch.optim.SGD(net.parameters(), 0.1)
first, second = DDP(net, find_unused_parameters=True), DDP(nn.Embedding(4, 2, sparse=True))
sparse = torch.optim.SGD(second.parameters(), 0.1)
torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1).step()  # of no model that was wrapped
x = torch.rand(3, 2)
print(type(first).__module__, sys.argv[1:], x.sum().item())
with first.no_sync():
    first(x).sum().backward()
first(x).sum().backward()
early.step()
second(torch.tensor([1, 1])).sum().backward()
sparse.step()
if os.fork() == 0:
    sparse.step()
    os._exit(0)
os.wait()
closed = torch.optim.LBFGS(net.parameters(), max_iter=2)


def closure():
    closed.zero_grad()
    loss = first(x).pow(2).sum()
    loss.backward()
    return loss


net.zero_grad()
try:
    closed.step(closure)
finally:
    print("not reached")
"""


def test_what_is_written_of_a_script_that_is_verified(tmp_path: Path, warm_python: WarmPython) -> None:
    """Steps of optimizers of wrapped models only, with either class, and nothing after the last one."""
    path = tmp_path / "script.py"
    path.write_text(VERIFIED)
    code = f"import sys; sys.argv = ['x', {str(path)!r}, '--lr', '1']\n"
    code += "from gradwire.integrations.verified_script import main; main()"
    common = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    found, printed = [], []
    for which in ("torch", "gradwire"):
        (folder := tmp_path / which).mkdir()
        (done,) = warm_python.run_all([(code,)], envs=[{**common, VERIFY: f"{which}:3:{folder}"}], timeout=120)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.split(maxsplit=1))
        found += read_digests(folder, 1)
    assert [one[0] for one in printed] == ["torch.nn.parallel.distributed", "gradwire.parallel.ddp"]
    assert printed[0][1] == printed[1][1]  # torch's generator too
    assert "not reached" not in printed[0][1]
    assert first_difference(found[:1], found[1:], names=("A", "B")) is None
    linear, embedding, closed = found[0].steps
    names = ["used.weight", "used.bias", "unused.weight", "unused.bias"]
    assert [list(one["gradients"]) for one in found[0].steps] == [names, ["weight of model 1"], names]
    assert linear["gradients"]["unused.bias"] is None
    assert embedding["gradients"] != embedding["parameters"]
    assert closed["gradients"]["used.bias"] not in (None, linear["gradients"]["used.bias"])
    assert found[0].models == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (70, 90)])
def test_how_far_two_tensors_are_apart_is_seen_in_their_digests(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Also of one that is flipped, whose norm is the same."""
    t = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=dtype)
    state = torch.get_rng_state()
    for other in (-t, 1.25 * t, t.clone()):
        (_, norm, *mine), (_, _, *theirs) = _digest(t) or [], _digest(other) or []
        expected = float((t - other).abs().double().norm())
        assert math.dist(mine, theirs) == pytest.approx(expected, rel=0.5 if t.numel() > 16 else 0.01)
        assert norm == pytest.approx(float(t.abs().double().norm()), rel=1e-6)
    assert torch.equal(torch.get_rng_state(), state)


WHOLE = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(9):
    model((1 + dist.get_rank()) * torch.randn(8, 4)).pow(2).sum().backward()
    optimizer.step()
"""


def test_a_script_is_verified_on_two_ranks(tmp_path: Path, warm_python: WarmPython) -> None:
    (tmp_path / "script.py").write_text(WHOLE)
    options = ("-n", "2", "--verify-ddp", "4", "--no-record", str(tmp_path / "script.py"))
    done = warm_python.run(GRADWIRE_RUN, *options, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (
        done.stderr.splitlines()[-1]
        == "gradwire run: bitwise equal: 2 parameters and their gradients in 4 steps on 2 ranks"
    )


def test_how_a_script_that_is_verified_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each in directories of its own, with a hash seed unless there is one; a hook is refused."""
    started: list[Any] = []
    monkeypatch.setattr(Supervisor, "supervise", lambda supervisor: started.append(supervisor._run) or 9)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    script = tmp_path / "x.py"
    script.touch()
    places = ["--run-dir", str(tmp_path / "run"), "--log-dir", str(tmp_path / "log")]
    assert main(["run", "-n", "2", "--verify-ddp", "4", *places, str(script), "--lr", "1"]) == 9
    assert main(["run", "-n", "2", "--verify_ddp", "4", "--no-record", "--env", "PYTHONHASHSEED=5", str(script)]) == 9
    first, second = started
    assert first.command[-3:] == [str(script), "--lr", "1"]
    assert "verified_script" in first.command[2]
    assert (first.directory, first.log_dir) == (tmp_path / "run" / "torch", tmp_path / "log" / "torch")
    assert [plan.environments[1]["PYTHONHASHSEED"] for plan in started] == ["0", "5"]
    assert first.environments[1][VERIFY].startswith("torch:4:")
    assert second.directory is None
    capsys.readouterr()
    assert main(["run", "--verify-ddp", "4", "--hook", "quantize8", str(script)]) == 2
    assert "Omit --hook" in capsys.readouterr().err


PARENT = f"""
import multiprocessing.spawn, pickle, sys
{REPLACED}
{REPLACED}  # again: nothing happens
sys.modules["__main__"].__spec__ = None
data = multiprocessing.spawn.get_preparation_data("child")
data["authkey"] = bytes(data["authkey"])  # which is pickled for children only
open(sys.argv[1], "wb").write(pickle.dumps(data))
"""
CHILD = """
import pickle, sys
pickle.load(open(sys.argv[1], "rb"))
import torch
print(torch.nn.parallel.DistributedDataParallel.__module__, torch.nn.parallel.DistributedDataParallelCPU.__module__)
"""


def test_processes_that_the_script_spawns_have_it_before_they_import_anything(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """As `torch.multiprocessing.spawn` starts them; the preparations are what they read first."""
    done = warm_python.run(PARENT, str(tmp_path / "data"), timeout=120)
    assert done.returncode == 0, done.stderr
    done = warm_python.run(CHILD, str(tmp_path / "data"), timeout=120)
    assert done.stdout == "gradwire.parallel.ddp gradwire.parallel.ddp\n", done.stderr


TWICE = f"""
import multiprocessing.spawn, torch
{REPLACED}
replace_ddp(hook="bf16")
replace, _ = multiprocessing.spawn.get_preparation_data("child")["gradwire"].__reduce__()
print(replace.keywords["hook"])
replace_ddp()
print(torch.nn.parallel.DistributedDataParallel.default_hook)
"""


def test_a_second_call_sets_the_hook_of_spawned_processes_too(warm_python: WarmPython) -> None:
    done = warm_python.run(TWICE, timeout=120)
    assert done.stdout == "cast(torch.bfloat16) > mean()\n" * 2, done.stderr


LATE = f"""
import sys
from torch.nn.parallel import DistributedDataParallel as DDP
from gradwire.parallel import DistributedDataParallel
try:
    {REPLACED[:-1]}hook="quantize8")
finally:
    print(DistributedDataParallel.default_hook)
"""


def test_a_class_that_was_imported_before_is_an_error(warm_python: WarmPython) -> None:
    done = warm_python.run(LATE, timeout=120)
    assert done.returncode == 1
    assert "imported before, as __main__.DDP. Call replace_ddp() first" in done.stderr
    assert done.stdout == "None\n"  # nothing was changed


def test_without_a_script_it_shows_its_usage(warm_python: WarmPython) -> None:
    code = (
        "import runpy, sys; sys.argv = ['x']; runpy.run_module('gradwire.integrations.ddp_script', run_name='__main__')"
    )
    done = warm_python.run(code, timeout=120)
    assert (done.returncode, done.stderr[:6]) == (2, "usage:")


def test_the_integrations_are_part_of_gradwire() -> None:
    assert gw.integrations.replace_ddp.__module__ == "gradwire.integrations.ddp_replacement"
