"""Real launchers: `gradwire run`, torchrun and mpirun start ranks that call gw.init(). Each is started once or twice: ranks take
seconds to import torch.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.observe.rings.run_outcome import load
from gradwire.testing import mpi as mpirun
from helpers.fork_client import ADDRESS
from helpers.warm_python import FORK_CLIENT, GRADWIRE_RUN

CLEAN = {
    name: value
    for name, value in os.environ.items()
    if name not in ("RANK", "WORLD_SIZE")
    and not name.startswith(("GRADWIRE_", "TORCHELASTIC", "OMPI_COMM", "PMI_", "SLURM_"))
}
LIMIT = 100

# One write, so that lines of different ranks are not mixed where the launcher does not see to it.
TRAIN = """
import os, sys
import torch
import gradwire as gw

group = gw.init(timeout=60)
world = gw.launch.find_world(os.environ)
t = torch.tensor([group.rank + 1.0])
group.all_reduce(t)
ddp = gw.DistributedDataParallel(torch.nn.Linear(1, 1))
ddp(torch.full((1, 1), 2.0 * group.rank)).sum().backward()
sys.stdout.write(f"<{group.rank}/{group.size} {world.launcher.value} {t.item()} {ddp.module.weight.grad.item()}>\\n")
assert gw.init() is group
if "fail" in sys.argv and group.rank == 1:
    raise ValueError("rank 1 is tired")
if "fail" in sys.argv:
    group.all_reduce(t)
"""

TORCH = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
t = torch.ones(1)
dist.all_reduce(t)
print("sum", t.item())
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def run(*command: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        env={**CLEAN, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def lines(launcher: str) -> list[str]:
    return [f"<{rank}/2 {launcher} 3.0 1.0>" for rank in (0, 1)]


def test_gradwire_run(script):
    """A script for torchrun, which then calls gw.init()."""
    script.write_text(TORCH + TRAIN)
    done = run(sys.executable, "-m", "gradwire", "run", "--nproc", "2", "--run-dir", script.parent / "run", script)
    outcome = load(script.parent / "run")
    assert outcome is not None
    assert outcome.cold == ""  # ranks are forks
    assert (done.returncode, done.stderr) == (0, "")
    expected = [f"[{r}] {line}" for r, one in enumerate(lines("gradwire run")) for line in (one, "sum 2.0")]
    assert sorted(done.stdout.splitlines()) == expected


FORKS = """
import os, random, sys
import numpy, torch

if __name__ == "__main__":
    first = torch.rand(1, dtype=torch.float64).item()
    a = torch.ones(500, 500, requires_grad=True)
    (a @ a).sum().backward()  # threads of OpenMP, of OpenBLAS and of autograd
    b = numpy.ones((500, 500))
    words = torch.get_num_threads(), a.grad[0, 0].item(), (b @ b)[0, 0].item()
    sys.stdout.write(f"{words}\\n{random.random()}\\n{numpy.random.rand()}\\n{first}\\n{torch.initial_seed() / 2**64}\\n")
"""


def test_forks_compute_with_threads_and_random_numbers_of_their_own(script):
    script.write_text(FORKS)
    options = ["--no-prefix", "--run-dir", script.parent / "run"]
    done = run(sys.executable, "-m", "gradwire", "run", "-n", "2", *options, script, OMP_NUM_THREADS="2")
    assert (done.returncode, done.stderr) == (0, "")
    outcome = load(script.parent / "run")
    assert outcome is not None
    assert outcome.cold == ""
    words = sorted(done.stdout.splitlines())
    assert words[:2] == ["(2, 1000.0, 500.0)"] * 2
    assert len(set(words)) == len(words) - 1 == 9


def test_gradwire_run_shows_the_cause_and_not_its_consequences(script, warm_python):
    done = warm_python.run(GRADWIRE_RUN, "--nproc", "2", str(script), "fail", timeout=LIMIT)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-3:]
    assert last[:2] == ["ValueError: rank 1 is tired", ""]
    assert last[2].startswith("gradwire run: rank 1 failed first (exit code 1, after ")


def test_the_page_on_launchers_matches_the_code(monkeypatch, warm_python):
    page = (Path(__file__).parents[3] / "docs" / "launch.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    for name in os.environ.keys() - CLEAN.keys():
        monkeypatch.delenv(name)
    done = warm_python.run(code, timeout=LIMIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "rank 0 of 1\n", "")
    options = run(sys.executable, "-m", "gradwire", "run", "--help").stdout
    for option in re.findall(r"^\| `(?:-\w \w`, `)?(--?[\w-]+)", page, re.M):
        assert option in options


@pytest.mark.acceptance
def test_torchrun_from_a_shell(script):
    done = run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == lines("torchrun")


@pytest.mark.parametrize("own_store", ["0", "1"])
def test_torchrun(own_store, monkeypatch, warm_python):
    """Without the agent's store, rank 0 hosts the store itself, as under an etcd rendezvous. Agent and ranks are forks."""
    for name in os.environ.keys() - CLEAN.keys() - {ADDRESS}:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", own_store)
    agent = "from torch.distributed.run import main; main()"
    ranks = ["--nproc-per-node", "2", "--no-python", *FORK_CLIENT, "python", "-c", TRAIN]
    done = warm_python.run(agent, "--standalone", *ranks, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == lines("torchrun")


@pytest.mark.skipif(mpirun.missing() is not None, reason=str(mpirun.missing()))
def test_mpirun():
    """Its ranks are forks: see `tests/helpers/fork_client.py`."""
    command = mpirun.command(str(mpirun.find_mpirun()), 2)
    done = run(*command, sys.executable, "-c", TRAIN, **mpirun.settings(2), **{ADDRESS: os.environ[ADDRESS]})
    assert done.returncode == 0, done.stderr
    said = done.stdout.replace("\x1b[0m", "")  # the end of colors, of which mpirun has used none
    assert sorted(said.split("\n")) == ["", *lines("mpirun")]


def test_slurms_variables(monkeypatch, warm_python):
    """srun is not here; what it sets is."""
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "node[1]",
        "OMP_NUM_THREADS": "1",
    }
    for name in os.environ.keys() - CLEAN.keys():
        monkeypatch.delenv(name)
    envs = [{**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in (0, 1)]
    done = warm_python.run_all([(TRAIN,)] * 2, timeout=LIMIT, envs=envs)
    assert [(one.returncode, one.stdout.strip(), one.stderr) for one in done] == [
        (0, line, "") for line in lines("SLURM")
    ]
