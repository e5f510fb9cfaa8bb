"""Worlds of torch.distributed over gloo and over gradwire: in the warm processes of `run_ranks`, or in fresh ones."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.testing import run_ranks

Scenario = Callable[[int, int], Any]
"""What each rank does, given its rank and the size of the world."""

PATIENCE = timedelta(seconds=120)


@contextmanager
def initialised(backend: str, store: dist.Store, rank: int, size: int) -> Iterator[None]:
    """`dist` over `store`, until the end of the block."""
    torch.set_num_threads(1)
    gw.register_backend()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def torch_world(group: gw.Group, backend: str) -> Iterator[None]:
    """`dist` initialised on every rank of `group`, with a store of its own; everything is gone afterwards."""
    importlib.import_module("torch.distributed.nn.functional")  # its defaults keep the WORLD of the first import alive
    port = torch.zeros(1, dtype=torch.int64)
    store = None
    if group.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
        port[0] = store.port
    group.broadcast(port, 0)
    store = store or dist.TCPStore("127.0.0.1", int(port), is_master=False, timeout=PATIENCE)
    with initialised(backend, store, group.rank, group.size):
        yield
    group.barrier()  # rank 0 holds the store's server; it stays until all have gone


@pytest.fixture
def world_of_torch() -> Callable[..., Any]:
    """`torch_world`, for tests that choose the kind of ranks themselves."""
    return torch_world


@pytest.fixture
def stock() -> Callable[..., Any]:
    """Run a scenario in one world of warm processes; the results in rank order."""

    def run(scenario: Scenario, n: int = 2, backend: str = "gradwire") -> list[Any]:
        def rank_main(group: gw.Group) -> Any:
            with torch_world(group, backend):
                return scenario(group.rank, group.size)

        return run_ranks(rank_main, n, kind="gloo")

    return run


@pytest.fixture(scope="module")
def stock_both() -> Callable[..., Any]:
    """Run a scenario over gloo and then over gradwire: two lists of results in rank order."""

    def run(scenario: Scenario, n: int = 2) -> tuple[list[Any], list[Any]]:
        def rank_main(group: gw.Group) -> tuple[Any, ...]:
            results = []
            for backend in ("gloo", "gradwire"):
                with torch_world(group, backend):
                    results.append(scenario(group.rank, group.size))
            return tuple(results)

        both = run_ranks(rank_main, n, kind="gloo")
        return [result[0] for result in both], [result[1] for result in both]

    return run


_FRESH_MAIN = "import sys, cloudpickle; cloudpickle.load(open(sys.argv[1], 'rb'))(int(sys.argv[2]))"


@pytest.fixture(scope="module")
def fresh(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Run a scenario in processes of its own, once per backend, and let them end by themselves.

    For what of torch keeps process groups, files or caches for good, which the warm processes rightly object to.
    """

    def run(
        scenario: Scenario, backends: Sequence[str] = ("gradwire",), n: int = 2, *, devices: bool = False
    ) -> list[list[Any]]:
        with tempfile.TemporaryDirectory() as folder:

            def rank_main(rank: int) -> None:
                results = []
                for backend in backends:
                    with initialised(backend, dist.FileStore(f"{folder}/{backend}", n), rank, n):
                        results.append(scenario(rank, n))
                torch.save(results, f"{folder}/results-{rank}")

            modules = [sys.modules[__name__], request.module]
            for module in modules:
                cloudpickle.register_pickle_by_value(module)
            Path(folder, "job").write_bytes(cloudpickle.dumps(rank_main))
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)
            _run_processes(
                [[sys.executable, "-W", "ignore", "-c", _FRESH_MAIN, f"{folder}/job", str(r)] for r in range(n)],
                # The PowerSGD hook takes every model for one on the GPU.
                hidden={} if devices else {"CUDA_VISIBLE_DEVICES": ""},
            )
            per_rank = [torch.load(f"{folder}/results-{rank}", weights_only=False) for rank in range(n)]
        return [[results[i] for results in per_rank] for i in range(len(backends))]

    return run


def _run_processes(commands: Sequence[list[str]], *, hidden: Mapping[str, str], limit: float = 110.0) -> None:
    """Run them all at once; every one must end well."""
    deadline = time.monotonic() + limit
    settings = {**os.environ, **hidden}
    running = [
        subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    try:
        said = [process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    for rank, (process, words) in enumerate(zip(running, said, strict=True)):
        assert process.returncode == 0, f"rank {rank} ended with {process.returncode}:\n{words}"
