"""Every test is checked for leftovers: threads, processes, sockets, descriptors and shared memory that it did not end."""

import gc
import importlib
import importlib.util
import io
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from _pytest.doctest import DoctestModule

from gradwire import observe
from gradwire.lab import Host
from gradwire.testing import LeftBehind, Leftovers, RankPool, default_pool, ranks
from gradwire.testing.leftovers import prime
from gradwire.testing.mpi import default_worlds
from gradwire.testing.pool.process import LocalWorker, WorkerHandle
from helpers import torch_world as worlds
from helpers.fork_client import WHOLE_EXIT
from helpers.warm_python import WarmPython, on_host

# torch's TCPStore asks for the name of every peer that connects, 127.0.0.1 included. A name server that loses one question in
# twenty then holds up every twentieth connection for the resolver's 5 seconds; nothing here needs a name that is not in a file.
# Processes that tests start inherit it.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:4")

# Several tests run at once, and OpenMP's threads, which wait for work by spinning, would take the cores from each other.
# Processes that tests start read the variable; this one has read it when it imported torch.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where Triton is installed, the first torch.compile of any kind starts a process that compiles for the rest, and stays.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# oneDNN writes every kernel that it makes to /tmp/perf-PID.map, keeps the file open and leaves it there.
os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")

# A busy machine takes longer for an example than any limit that would be of use.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

gc.disable()  # until tests are collected: nothing of what is imported is garbage
WARM = WarmPython()


def pytest_sessionstart(session: pytest.Session) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.setpgid(0, 0)  # shared memory that processes of another worker hold is then no leftover of a test here
    # What tests run is recorded here, and not among the user's runs.
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="gradwire-tests-")
    # Where pytest was started in the background, tests of Ctrl-C would wait in vain.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    ranks.DEFAULT_LEFTOVERS = LeftBehind.RAISE
    ranks.DEFAULT_TIMEOUT = 300.0  # only ends a hang: no busy machine is that slow
    if importlib.util.find_spec("tqdm"):  # Dynamo's progress bars; the first starts a thread
        importlib.import_module("tqdm").tqdm.monitor_interval = 0
    WARM.open_door()
    prime()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Docstrings of tests have no examples, and to look for some every worker would import all helpers."""
    return [file for file in (yield) if not isinstance(file, DoctestModule)]


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.enable()
    freeze_modules()


_frozen_modules = 0


def freeze_modules() -> None:
    """Torch and the tests themselves stay: a collection, of which tests ask for many, then looks at what is new.

    Again when many modules were imported since: an optimizer imports Dynamo, and a collection then takes a tenth of a second.
    """
    global _frozen_modules
    if len(sys.modules) - _frozen_modules > 100:
        _frozen_modules = len(sys.modules)
        gc.collect()
        gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    default_worlds().close()  # first: its ranks are forks of the server that ends with the pool
    default_pool().close()
    WARM.close()
    shutil.rmtree(os.environ["XDG_STATE_HOME"], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def cuda_is_awake() -> None:
    """CUDA, NCCL and torch's optimizers open files, pipes and sockets for the life of the process: here, before any is counted."""
    import torch.distributed as dist

    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(3, device="cuda"))
    dist.all_reduce(torch.ones(3))  # gloo makes its device with the first operation
    (torch.ones(4, 4, device="cuda") @ torch.ones(4, 4, device="cuda")).sum().item()
    weight = torch.zeros(1, device="cuda", requires_grad=True)
    torch.optim.SGD([weight], lr=0.1).step()  # imports what keeps a port open
    torch.cuda.synchronize()
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves something behind. What the warm pools keep is their own affair."""
    if request.node.get_closest_marker("gpu"):
        request.getfixturevalue("cuda_is_awake")
    freeze_modules()
    before = Leftovers.snapshot(default_pool(), default_worlds())
    yield
    left = before.compare()
    if left:
        pytest.fail("the test left behind: " + "; ".join(left), pytrace=False)


@pytest.fixture(scope="session")
def warm_python() -> WarmPython:
    """Starts processes that have torch imported already."""
    return WARM


@pytest.fixture
def whole_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm processes end as any process does, for tests of that."""
    monkeypatch.setenv(WHOLE_EXIT, "1")


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch, warm_python: WarmPython) -> None:
    """Ranks of `run_world` that need not import torch, also on hosts of their own."""

    from benchmarks import world

    class ForkedPool(RankPool):
        def _start(self, count: int, store: str) -> Iterator[WorkerHandle]:
            for spawn in map(self._spawn, range(count)):
                host = getattr(spawn.command, "__self__", None)
                program = f"import sys; sys.path.append({str(world._ROOT)!r}); import benchmarks.world; {spawn.program}"
                program = on_host(host, program) if isinstance(host, Host) else program
                yield LocalWorker(store, replace(spawn, program=program), warm_python.server)

    monkeypatch.setattr(world, "RankPool", ForkedPool)


@pytest.fixture(scope="session")
def fonts() -> None:
    """Draw once: matplotlib opens its fonts then, and keeps them open for the life of the process."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure()
    FigureCanvasAgg(figure)
    figure.suptitle("a, … µ", weight="bold")
    figure.subplots().set_title("a", style="italic")
    figure.savefig(io.BytesIO())


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Path]:
    """The directory in which this process is recorded, as rank 0 of 1."""
    observe.start(tmp_path / "run", rank=0, size=1)
    yield tmp_path / "run"
    observe.stop()


@pytest.fixture
def no_gc() -> Iterator[None]:
    """What a test drops must go by counting references alone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture(scope="session")
def torch_world() -> Callable[..., Any]:
    """`dist` initialised on the ranks of a group."""
    return worlds.torch_world
