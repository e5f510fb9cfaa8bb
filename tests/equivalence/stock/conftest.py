"""Worlds of torch.distributed over gloo and over gradwire: in the warm processes of `run_ranks`, or in fresh ones."""

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.testing import run_ranks
from helpers import torch_world as worlds
from helpers.torch_world import initialised, torch_world
from helpers.warm_python import WarmPython

Scenario = Callable[[int, int], Any]
"""What each rank does, given its rank and the size of the world."""


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


LIMIT = 110.0
"""Seconds for a scenario in processes of its own."""

_FRESH_MAIN = """
import sys, warnings, cloudpickle
warnings.simplefilter("ignore")
cloudpickle.load(open(sys.argv[1], "rb"))(int(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def fresh(request: pytest.FixtureRequest, warm_python: WarmPython) -> Callable[..., Any]:
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

            modules = [sys.modules[__name__], worlds, request.module]
            for module in modules:
                cloudpickle.register_pickle_by_value(module)
            Path(folder, "job").write_bytes(cloudpickle.dumps(rank_main))
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)
            # The PowerSGD hook takes every model for one on the GPU.
            hidden = {} if devices else {"CUDA_VISIBLE_DEVICES": ""}
            commands = [(_FRESH_MAIN, f"{folder}/job", str(rank)) for rank in range(n)]
            for rank, done in enumerate(warm_python.run_all(commands, timeout=LIMIT, envs=[hidden] * n)):
                assert done.returncode == 0, f"rank {rank} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
            per_rank = [torch.load(f"{folder}/results-{rank}", weights_only=False) for rank in range(n)]
        return [[results[i] for results in per_rank] for i in range(len(backends))]

    return run
