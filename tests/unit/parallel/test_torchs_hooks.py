"""Every hook that torch ships, unchanged, on our model: the same parameters as on torch's own."""

import importlib
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire.groups import Group
from gradwire.parallel import DistributedDataParallel as DDP
from gradwire.testing import run_ranks
from helpers.models import descend

STEPS = 4
Setup = Callable[[nn.Module], Any]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))


def train(model: nn.Module, rank: int, *, by_hand: bool = True) -> Tensor:
    data = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        model.zero_grad()
        model(torch.randn(8, 6, generator=data)).pow(2).sum().backward()
        if by_hand:
            descend(model, 0.02)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# -- how each is registered; imported in the ranks, since some take their time ------------------------------------------------


def shipped(module: str) -> Any:
    return importlib.import_module(f"torch.distributed.algorithms.ddp_comm_hooks.{module}")


def of(module: str, hook: str, state: Callable[[Any], Any] = lambda model: None) -> Setup:
    return lambda model: model.register_comm_hook(state(model), getattr(shipped(module), hook))


def low_rank(model: Any) -> Any:
    return shipped("powerSGD_hook").PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)


def fp16_wrapper(model: Any) -> None:
    hook = shipped("default_hooks").fp16_compress_wrapper(shipped("powerSGD_hook").powerSGD_hook)
    model.register_comm_hook(low_rank(model), hook)


def bf16_wrapper(model: Any) -> None:
    hooks = shipped("default_hooks")
    model.register_comm_hook(None, hooks.bf16_compress_wrapper(hooks.allreduce_hook))


def batched_power_sgd(model: Any) -> None:
    module = shipped("powerSGD_hook")
    plain = module._orthogonalize
    # torch 2.13: the hook hands its helper one matrix, not a batch. `trained` restores it.
    module._orthogonalize = lambda m, *rest: plain(m if m.dim() == 3 else m[None], *rest)
    model.register_comm_hook(low_rank(model), module.batched_powerSGD_hook)


class AsOverNccl:
    """`dist` with all_gather's future as NCCL has it, all outputs in one tensor: what the quantization hooks were written for.

    Over gloo, which gives a list, they fail on torch's own model too.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_gather(self, *args: Any, **named: Any) -> Any:
        future = dist.all_gather(*args, **named).get_future()
        return SimpleNamespace(get_future=lambda: future.then(lambda f: [torch.stack(f.value())]))


def as_over_nccl(model: Any) -> None:
    shipped("quantization_hooks").dist = AsOverNccl()


def alone_after_two_steps(model: Any) -> Any:
    alone, _ = dist.new_subgroups(1)
    return shipped("post_localSGD_hook").PostLocalSGDState(None, subgroup=alone, start_localSGD_iter=2)


def by_type(model: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook

    register_ddp_comm_hook(DDPCommHookType.FP16_COMPRESS, model, None)


HOOKS: dict[str, Setup] = {
    "allreduce": of("default_hooks", "allreduce_hook"),
    "allreduce_with_its_group": of("default_hooks", "allreduce_hook", lambda model: model.process_group),
    "fp16": of("default_hooks", "fp16_compress_hook"),
    "fp16_wrapper": fp16_wrapper,
    "power_sgd": of("powerSGD_hook", "powerSGD_hook", low_rank),
    "batched_power_sgd": batched_power_sgd,
    "quantization_per_tensor": of("quantization_hooks", "quantization_pertensor_hook", as_over_nccl),
    "quantization_per_channel": of("quantization_hooks", "quantization_perchannel_hook", as_over_nccl),
    "post_local_sgd": of("post_localSGD_hook", "post_localSGD_hook", alone_after_two_steps),
    "noop": of("debugging_hooks", "noop_hook"),
    "by_type": by_type,
    "builtin": lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
    "builtin_fp16": lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
    "fused_optimizer": lambda model: model._register_fused_optim(torch.optim.SGD, 0.02),
}
ONLY_OURS: dict[str, Setup] = {"bf16": of("default_hooks", "bf16_compress_hook"), "bf16_wrapper": bf16_wrapper}
"""torch refuses these on the CPU."""


@pytest.fixture(scope="module")
def trained(torch_world: Callable[..., Any]) -> list[dict[str, Any]]:
    """Parameters after training, by hook and by whose model, on each rank. One world does them all: worlds are slow."""

    def rank_main(group: Group) -> dict[str, Any]:
        done: dict[str, Any] = {}
        importlib.import_module("torch.distributed.optim")  # its defaults keep the WORLD of the first import alive
        module = shipped("powerSGD_hook")
        restored = mock.patch.object(module, "_orthogonalize", module._orthogonalize)
        with torch_world(group, "gloo"), warnings.catch_warnings(), restored:
            warnings.simplefilter("ignore")
            done["plain"] = train(TorchDDP(mlp()), group.rank)
            for name, setup in {**HOOKS, **ONLY_OURS}.items():
                for whose in (DDP,) if name in ONLY_OURS else (TorchDDP, DDP):
                    model = whose(mlp(), bucket_cap_mb=1)
                    torch.manual_seed(1)
                    setup(model)
                    key = f"{name} {whose.__module__.split('.')[0]}"
                    done[key] = train(model, group.rank, by_hand=name != "fused_optimizer")
        return done

    return run_ranks(rank_main, 2, kind="gloo")


@pytest.mark.parametrize("hook", HOOKS)
def test_the_same_as_on_torchs_model(trained: list[dict[str, Any]], hook: str) -> None:
    for done in trained:
        torch.testing.assert_close(done[f"{hook} gradwire"], done[f"{hook} torch"], rtol=1e-4, atol=1e-5)
    if hook not in ("post_local_sgd", "noop"):
        assert torch.equal(trained[0][f"{hook} gradwire"], trained[1][f"{hook} gradwire"])


@pytest.mark.parametrize("hook", ["bf16", "bf16_wrapper"])
def test_bfloat16_works_on_the_cpu(trained: list[dict[str, Any]], hook: str) -> None:
    for done in trained:
        torch.testing.assert_close(done[f"{hook} gradwire"], done["plain"], rtol=0.1, atol=0.02)
        assert not torch.equal(done[f"{hook} gradwire"], done["plain"])


def test_hooks_made_a_difference_where_they_should(trained: list[dict[str, Any]]) -> None:
    plain = trained[0]["plain"]
    for hook in ("allreduce", "builtin", "fused_optimizer"):
        torch.testing.assert_close(trained[0][f"{hook} gradwire"], plain)
    for hook in ("fp16", "power_sgd", "quantization_per_tensor", "post_local_sgd", "noop"):
        assert not torch.equal(trained[0][f"{hook} gradwire"], plain)
