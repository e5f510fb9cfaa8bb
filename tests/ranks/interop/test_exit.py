"""Programs that end with the backend initialised and operations in flight: exit code 0, and nothing is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.warm_python import WarmPython

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


@pytest.mark.parametrize(
    "what",
    ["nothing", "reduce", "future", "recv", "hook+reduce+recv+future", "reduce+recv+destroy", "ddp+reduce+raise"],
)
def test_exit_is_clean(what: str, tmp_path: Path, warm_python: WarmPython) -> None:
    done = warm_python.run_all([(PROGRAM, str(rank), str(tmp_path), what) for rank in range(2)], timeout=90)
    assert [(one.returncode, one.stdout, one.stderr) for one in done] == [(0, "", "")] * 2
