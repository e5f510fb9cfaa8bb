"""Scripts on the ranks of a world that torch's `init_process_group()` finds, in warm processes."""

import tempfile
from pathlib import Path

import torch.distributed as dist

from helpers.torch_world import PATIENCE
from helpers.warm_python import WarmPython

FORKS = """
import ctypes, os, sys
for rank in range({ranks}):
    if os.fork() == 0:  # nothing has started a thread
        ctypes.CDLL(None).prctl(1, 9)  # it does not outlive the other
        os.environ |= {{"RANK": str(rank), "LOCAL_RANK": str(rank)}}
        os.dup2(os.open(f"{folder}/{{rank}}", os.O_WRONLY | os.O_CREAT, 0o600), 1)
        break
else:
    sys.exit(any([os.wait()[1] for rank in range({ranks})]))
"""
"""The process becomes the ranks, which write to files in `folder`."""

PROGRAM = """
import atexit, os, runpy, sys, threading
sys.argv = {argv!r}
runpy.run_path(sys.argv[0], run_name="__main__")
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
"""
"""Runs the script and exit handlers, but does not finalize the interpreter.

A thread of gloo's may still release the last operation then, whose tensors are Python objects: it waits for the GIL, is ended by
Python, and C++ aborts the process, "terminate called without an active exception" (pytorch#190489).
"""


def run_script(
    warm_python: WarmPython,
    path: Path,
    *args: str,
    ranks: int = 2,
    env: dict[str, str] | None = None,
    before: str = "",
    imports: str = "",
) -> list[str]:
    """Run the script as torchrun would, and return what each rank wrote to stdout; a rank that fails is an error.

    `before` is code that runs first. `imports` is a large module, which is imported once for all ranks.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    common = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    envs = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    code = before + PROGRAM.format(argv=[str(path), *args])
    if imports:
        with tempfile.TemporaryDirectory() as folder:
            forks = f"import {imports}\n" + FORKS.format(ranks=ranks, folder=folder)
            [both] = warm_python.run_all([(forks + code,)], envs=[common], timeout=300)
            assert both.returncode == 0, both.stderr
            return [Path(folder, str(rank)).read_text() for rank in range(ranks)]
    done = warm_python.run_all([(code,)] * ranks, envs=envs, timeout=300)
    for rank, process in enumerate(done):
        assert process.returncode == 0, f"rank {rank} ended with {process.returncode}:\n{process.stderr}"
    return [process.stdout for process in done]
