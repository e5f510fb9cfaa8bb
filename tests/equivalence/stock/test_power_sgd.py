"""torch's PowerSGD hook, whose callbacks wait for further collectives: over every engine the same result as over torch's gloo."""

import builtins
import importlib
import logging
import secrets
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire as gw
from gradwire.groups import Group, HierarchicalGroup
from gradwire.interop import as_process_group, register_backend
from gradwire.parallel import DistributedDataParallel
from gradwire.testing import LeftBehind, run_ranks
from gradwire.testing.mpi import missing
from helpers.models import descend

STEPS = 9
RANKS = 4
PATIENCE = timedelta(seconds=120)


def on_two_hosts(store: dist.Store, rank: int, size: int, *, timeout: float, name: str) -> Group:
    return HierarchicalGroup.discover(store, rank, size, timeout=timeout, name=name, host=f"host {rank // 2}")


ENGINES: dict[str, Any] = {"shared_memory": "shared_memory", "gloo": "gloo", "hierarchical": on_two_hosts}
MODELS: dict[str, Callable[..., nn.Module]] = {"torch": TorchDDP, "gradwire": DistributedDataParallel}


def train(model: Any, rank: int, process_group: Any = None) -> torch.Tensor:
    logging.getLogger("torch").setLevel(logging.ERROR)
    state = powerSGD_hook.PowerSGDState(process_group, matrix_approximation_rank=2, start_powerSGD_iter=3)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    data = torch.Generator().manual_seed(100 + rank)
    for _ in range(STEPS):
        model.zero_grad()
        inputs = torch.randn(16, 8, generator=data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's hook compares Tensors with None
            nn.functional.mse_loss(model(inputs), inputs[:, :4].sin()).backward()
        descend(model, 0.05)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def over(
    backend: str, engine: Any, group: Group, wrap: Callable[..., nn.Module], folder: Path, kept: list[Any] | None = None
) -> torch.Tensor:
    """Train in the world that `dist.init_process_group` makes of the ranks of `group`; its process group is put into `kept`."""
    importlib.import_module("torch.distributed.nn.functional")  # its defaults keep the WORLD of the first import alive
    number = torch.tensor([secrets.randbits(60)])
    group.broadcast(number, src=0)
    store = dist.FileStore(str(folder / f"{int(number)}"), group.size)
    if engine is not None:
        register_backend(backend, kind=engine)
    dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.size, timeout=PATIENCE)
    if kept is not None:
        kept.append(dist.group.WORLD)
    try:
        return train(wrap(make_model()), group.rank)
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    """Over torch's own gloo. Its last reference may be dropped by a callback of the hook, in gloo's own thread, which then joins
    itself and ends the process; so these ranks keep one to their end.
    """

    folder = tmp_path_factory.mktemp("stores")

    def rank(group: Group) -> torch.Tensor:
        kept: list[Any] = []
        builtins.kept_by_power_sgd = kept  # type: ignore[attr-defined]
        return over("gloo", None, group, TorchDDP, folder, kept)

    return run_ranks(rank, RANKS, kind="gloo", leftovers=LeftBehind.IGNORE)


def check(results: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert not torch.allclose(
        results[0], torch.cat([p.detach().flatten() for p in make_model().parameters()]), atol=0.01
    )
    for result in results:
        assert torch.equal(result, results[0])
        # Sums of float32 may be formed in another order, which 9 steps and an orthogonalization enlarge.
        torch.testing.assert_close(result, expected[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", ENGINES)
def test_same_parameters_as_over_torchs_gloo(
    engine: str, model: str, expected: list[torch.Tensor], tmp_path: Path
) -> None:
    def rank(group: gw.Group) -> torch.Tensor:
        return over(f"power_{engine}", ENGINES[engine], group, MODELS[model], tmp_path)

    check(run_ranks(rank, RANKS, kind="gloo"), expected)


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("model", MODELS)
def test_over_mpi(model: str, expected: list[torch.Tensor], tmp_path: Path) -> None:
    check(
        run_ranks(lambda group: over("power_mpi", "mpi", group, MODELS[model], tmp_path), RANKS, kind="mpi"), expected
    )


def test_on_ranks_that_are_threads() -> None:
    """The hook draws from torch's global generator, which threads share: ranks agree, but not with those of another run."""

    def rank(group: gw.Group) -> torch.Tensor:
        model = DistributedDataParallel(make_model(), process_group=group)
        return train(model, group.rank, as_process_group(group))

    results = run_ranks(rank, RANKS)
    for result in results:
        assert torch.equal(result, results[0])
