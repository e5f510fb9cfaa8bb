"""Programs that end with operations in flight or with hooks registered end well, and print nothing."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from helpers.warm_python import WarmPython

pytestmark = pytest.mark.usefixtures("whole_exit")

PROGRAM = """
import sys, torch, torch.distributed as dist, gradwire as gw
from datetime import timedelta

rank, folder, what = int(sys.argv[1]), sys.argv[2], sys.argv[3].split("+")
gw.register_backend()
dist.init_process_group("gradwire", init_method=f"file://{folder}/store", rank=rank, world_size=2)
store = dist.FileStore(f"{folder}/talk", 2)
t = torch.ones(1000)
dist.all_reduce(t)
if rank == 1:
    store.wait(["started"], timedelta(seconds=30))
    sys.exit()
if "hook" in what:
    gw.from_process_group().on_completion(lambda info: None)
if "reduce" in what:
    work = dist.all_reduce(t, async_op=True)
if "future" in what:
    future = dist.all_reduce(t, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
if "recv" in what:
    receive = dist.irecv(t, 1)
if "ddp" in what:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), init_sync=False)
store.set("started", "yes")
if "raise" in what:
    raise SystemExit(0)
if "destroy" in what:
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("what", ["nothing", "hook+reduce+recv+future", "reduce+recv+destroy", "ddp+reduce+raise"])
def test_exit_is_clean(what: str, tmp_path: Path, warm_python: WarmPython) -> None:
    done = warm_python.run_all([(PROGRAM, str(rank), str(tmp_path), what) for rank in range(2)], timeout=90)
    assert [(one.returncode, one.stdout, one.stderr) for one in done] == [(0, "", "")] * 2


EXIT = """
    import atexit, torch
    from gradwire.autograd import GradHooks, attach, after_node, on_grad
    class Noisy:
        def __call__(self, *args): return None
        def __del__(self): print("freed")
    model = torch.nn.Linear(2, 2)
    for kind in ("on_grad", "before_node", "after_node", "after_accumulate"):
        attach(model, "*", kind, Noisy())
    class Listener:
        def ready(self): pass
    listener = Listener()
    hooks = GradHooks(list(model.parameters()), listener.ready)
    loss = model(torch.ones(1, 2)).sum()
    kept = on_grad(loss, Noisy()), after_node(loss.grad_fn, Noisy())
    loss.backward(retain_graph=True)
    if {raising}:
        on_grad(loss, lambda grad: 1 / 0)
        loss.backward()
    print("end")
"""


@pytest.mark.parametrize("raising", [False, True])
def test_exit_with_hooks_registered_is_clean(raising: bool, warm_python: WarmPython) -> None:
    script = textwrap.dedent(EXIT.format(raising=raising))
    if raising:
        done = warm_python.run(script, timeout=300)
        assert done.returncode == 1
        assert done.stderr.rstrip().splitlines()[-1].startswith("raised in on_grad hook __main__.<lambda>")
        assert "ZeroDivisionError" in done.stderr
    else:
        done = subprocess.run([sys.executable, "-X", "dev", "-c", script], capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("end")
