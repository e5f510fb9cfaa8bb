"""The process group that `as_torch_hook` communicates over: a separate one, made at the first bucket."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire as gw
from gradwire.errors import UsageError
from gradwire.groups import Group
from gradwire.hooks import CommHook, cast, chain, error_feedback, local_sgd, mean, power_sgd, quantize, top_k
from gradwire.interop import as_torch_hook
from gradwire.testing import run_ranks
from helpers.buckets import TorchBucket

HOOKS: dict[str, CommHook] = {
    "quantize": quantize(bits=8),
    "power_sgd": power_sgd(rank=2),
    "feedback, power_sgd": chain(error_feedback(), power_sgd(rank=2)),
    "feedback, top_k": chain(error_feedback(), top_k(ratio=0.1)),
    "cast": chain(cast(torch.bfloat16), mean()),
}


class Sometimes(nn.Module):
    """One of two layers is unused, in turns, so that torch all-reduces its map of used parameters in every step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 64)
        self.both = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
        self.last = nn.Linear(64, 4)

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.last(self.both[step % 2](self.first(x)))


def train(model: nn.Module, rank: int, steps: int = 6) -> Tensor:
    data = torch.Generator().manual_seed(rank)
    for step in range(steps):
        model.zero_grad()
        model(torch.randn(4, 16, generator=data), step).pow(2).mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.01 * p.grad
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("backend", ["gloo", "gradwire"])
def test_torchs_map_of_used_parameters_does_not_meet_the_hooks_collectives(
    torch_world: Callable[..., Any], backend: str
) -> None:
    """torch all-reduces the map on DDP's process group while hooks of several collectives are at work."""

    def rank_main(group: Group) -> dict[str, Tensor]:
        done = {}
        with torch_world(group, backend):
            for name, hook in HOOKS.items():
                for way in ("given", "none", "state") if backend == "gloo" else ("given", "none"):
                    model = TorchDDP(Sometimes(), find_unused_parameters=True, bucket_cap_mb=0.01)
                    given = gw.from_process_group(dist.group.WORLD) if way == "given" else None
                    state = dist.group.WORLD if way == "state" else None
                    named = model.module.named_parameters()
                    model.register_comm_hook(state, as_torch_hook(hook, given, named_parameters=named))
                    done[f"{name}, {way}"] = train(model, group.rank)
        return done

    first, second = run_ranks(rank_main, 2, kind="gloo")
    for key, value in first.items():
        assert torch.equal(value, second[key]), f"{key}: ranks differ"
        assert torch.equal(value, first[f"{key.rpartition(', ')[0]}, given"]), key


def test_a_hook_can_be_made_before_any_process_group(torch_world: Callable[..., Any]) -> None:
    """As Lightning's DDPStrategy(ddp_comm_hook=...) does."""

    def rank_main(group: Group) -> dict[str, Any]:
        hook = as_torch_hook(chain(error_feedback(), quantize(bits=8)))
        with pytest.raises(UsageError, match="init_process_group"):
            hook.hook_state_dict()
        with torch_world(group, "gloo"):
            model = TorchDDP(Sometimes(), find_unused_parameters=True)
            model.register_comm_hook(None, hook)
            train(model, group.rank)
            return hook.hook_state_dict()

    for rank, state in enumerate(run_ranks(rank_main, 2, kind="gloo")):
        assert (state["rank"], state["step"]) == (rank, 6)


def test_state_is_loaded_before_the_first_bucket(torch_world: Callable[..., Any]) -> None:
    def rank_main(group: Group) -> tuple[int, Tensor]:
        with torch_world(group, "gloo"):
            model = TorchDDP(Sometimes(), find_unused_parameters=True)
            named = list(model.module.named_parameters())
            hook = as_torch_hook(chain(error_feedback(), quantize(bits=8)), named_parameters=named)
            model.register_comm_hook(None, hook)
            train(model, group.rank)
            again = as_torch_hook(chain(error_feedback(), quantize(bits=8)), named_parameters=named)
            again.load_hook_state_dict(hook.hook_state_dict())
            return again.hook_state_dict()["step"], train(model, group.rank)

    (step, a), (_, b) = run_ranks(rank_main, 2, kind="gloo")
    assert step == 6
    assert torch.equal(a, b)


def test_outer_steps_need_no_group_at_first(torch_world: Callable[..., Any]) -> None:
    def rank_main(group: Group) -> Tensor:
        with torch_world(group, "gloo"):
            model = TorchDDP(Sometimes(), find_unused_parameters=True)
            hook = as_torch_hook(local_sgd(every=2), named_parameters=model.module.named_parameters())
            model.register_comm_hook(None, hook)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            hook.attach_optimizer(optimizer)
            for step in range(3):
                model(torch.randn(2, 16) * (1 + group.rank), step).sum().backward()
                optimizer.step()
            hook.average_parameters()
            return torch.cat([p.detach().flatten() for p in model.parameters()])

    first, second = run_ranks(rank_main, 2, kind="gloo")
    assert torch.equal(first, second)


class Unsplittable(gw.GroupWrapper):
    """A group of which no second one can be made."""

    def __init__(self, inner: Group) -> None:
        super().__init__(inner)
        self.threads: set[str] = set()

    def submit(self, op: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        return self.inner.submit(op)

    def split(self, color: int | None, key: int | None = None) -> Group | None:
        raise UsageError("no subgroups here")


def test_without_a_second_group_a_reduction_ends_before_torch_goes_on() -> None:
    """Then all collectives of this process are in the order of the program."""

    def rank_main(group: Group) -> set[str]:
        whole = Unsplittable(group)
        assert as_torch_hook(power_sgd(rank=1), whole)(None, TorchBucket([torch.zeros(8, 8)])).done()
        return whole.threads - {threading.current_thread().name}

    assert run_ranks(rank_main, 2, kind="threads") == [set(), set()]


def test_without_torch_distributed_the_error_names_what_is_missing() -> None:
    with pytest.raises(UsageError, match=r"init_process_group"):
        as_torch_hook(mean())(None, TorchBucket([torch.zeros(2)]))
