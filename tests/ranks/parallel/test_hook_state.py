"""States of hooks under torch's own DDP and in copies of a model, on processes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire.errors import HookError
from gradwire.groups import Group
from gradwire.hooks import cast, chain, error_feedback, mean, top_k
from gradwire.interop import as_torch_hook
from gradwire.parallel import DistributedDataParallel as DDP
from gradwire.testing import run_ranks
from helpers.models import inputs, mlp

SMALL = 0.0001
HOOK = chain(error_feedback(), cast(torch.bfloat16), mean())

with torch.random.fork_rng():
    torch.manual_seed(0)
    NET = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def train(model: nn.Module, rank: int, steps: range) -> Tensor:
    for step in steps:
        model.zero_grad()
        inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank))
        model(inputs).pow(2).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad  # type: ignore[operator]
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def through_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_the_same_methods_under_torchs_own_ddp(torch_world: Callable[..., Any]) -> None:
    def rank_main(group: Group) -> tuple[Tensor, Tensor]:
        def make() -> tuple[Any, Any]:
            model = TorchDDP(copy.deepcopy(NET), bucket_cap_mb=SMALL)
            hook = as_torch_hook(HOOK, group, named_parameters=model.module.named_parameters())
            model.register_comm_hook(None, hook)
            return model, hook

        with torch_world(group, "gloo"):
            whole, hook = make()
            train(whole, group.rank, range(4))
            state = through_file({"model": whole.state_dict(), "hook": hook.hook_state_dict()})
            assert state["hook"]["step"] == 4
            assert sorted(state["hook"]["state"]) == ["0.bias", "0.weight", "2.bias", "2.weight"]
            expected = train(whole, group.rank, range(4, 7))
            other, again = make()
            other.load_state_dict(state["model"])
            again.load_hook_state_dict(state["hook"])
            with pytest.raises(HookError, match=r"and the model now has mean\(\)"):
                as_torch_hook(mean(), group).load_hook_state_dict(state["hook"])
            resumed = train(other, group.rank, range(4, 7))
            del whole, other, hook, again
        return expected, resumed

    for expected, resumed in run_ranks(rank_main, 2, kind="gloo"):
        assert torch.equal(expected, resumed)


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_keeps_mixed_precision_hook_state_and_weight(torch_world: Callable[..., Any], how: str) -> None:
    def rank_main(group: Group) -> None:
        with torch_world(group, "gloo"):
            ddp = DDP(mlp(), mixed_precision=SimpleNamespace(param_dtype=BF16, reduce_dtype=FP32, buffer_dtype=None))
            ddp.set_hook(chain(error_feedback(), top_k(ratio=0.1)))
            ddp.replica.weight = 3.0

            def step(model: DDP, number: int) -> list[Tensor]:
                model.zero_grad()
                output = model(inputs(group.rank, number))
                assert output.dtype == BF16
                output.float().pow(2).sum().backward()
                assert {t.dtype for t in model.state_dict().values()} == {FP32}
                return [p.grad.clone() for p in model.parameters() if p.grad is not None]

            for number in range(3):
                step(ddp, number)
            if group.rank == 0:  # it takes no other rank
                duplicate(ddp, how)
            copied = duplicate(ddp, how)
            assert copied.replica.weight == 3.0
            assert repr(copied.replica.hook) == repr(ddp.replica.hook)
            assert copied.hook_state_dict()["step"] == 3
            for number in range(3, 6):
                for a, b in zip(step(ddp, number), step(copied, number), strict=True):
                    assert torch.equal(a, b)

    run_ranks(rank_main, 2, kind="gloo")


def duplicate(ddp: DDP, how: str) -> DDP:
    if how == "deepcopy":
        return copy.deepcopy(ddp)
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]
