"""State dicts saved by an earlier version load, and training continues as it would have continued there.

`saved_states.pt` was written by `python tests/unit/hooks/test_saved_states.py` on the tree before the hooks were sorted into
packages. Write it again only when the format of saved states changes on purpose, and keep the old file then.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire import hooks
from gradwire.groups import Group
from gradwire.hooks import CommHook, chain, error_feedback, mean, quantize, top_k
from gradwire.parallel import DistributedDataParallel as DDP
from gradwire.testing import run_ranks

FILE = Path(__file__).parent / "saved_states.pt"
SAVED_AFTER, STEPS = 3, 6

HOOKS: dict[str, Callable[[], CommHook]] = {
    "error_feedback": lambda: chain(error_feedback(), quantize(bits=4, block=32)),
    "scaled_cast": lambda: chain(error_feedback(), hooks.scaled_cast(torch.float16), mean()),
    "dgc": lambda: hooks.dgc(0.2, momentum=0.5),
    "decoupled_momentum": lambda: hooks.decoupled_momentum(chunk=4, k=2),
    "power_sgd": lambda: chain(error_feedback(), hooks.power_sgd(rank=1)),
    "partition": lambda: hooks.partition({"*.bias": mean(), "*": chain(error_feedback(), top_k(ratio=0.2))}),
    "by_size": lambda: hooks.by_size(numel=20, large=hooks.dgc(0.3)),
    "before": lambda: hooks.after(5, chain(error_feedback(), top_k(ratio=0.2)), before=hooks.power_sgd(rank=1)),
    "after": lambda: hooks.after(1, chain(error_feedback(), top_k(ratio=0.2))),
    "every": lambda: hooks.every(2, chain(error_feedback(), top_k(ratio=0.2))),
    "every, otherwise": lambda: hooks.every(2, hooks.power_sgd(rank=1), otherwise=hooks.dgc(0.3)),
    "hierarchical": lambda: hooks.hierarchical(across=chain(error_feedback(), top_k(ratio=0.2))),
    "local_sgd": lambda: hooks.local_sgd(every=2),
    "diloco": lambda: hooks.diloco(every=2, hook=chain(error_feedback(), top_k(ratio=0.5))),
    "streaming_diloco": lambda: hooks.streaming_diloco(every=2, fragments=2, delay=1, alpha=0.5),
}


def build(group: Group, hook: CommHook) -> tuple[DDP, torch.optim.Optimizer]:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) / 2)
    ddp = DDP(net, process_group=group, bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    ddp.set_hook(hook)
    ddp.attach_optimizer(optimizer)
    return ddp, optimizer


def train(model: DDP, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> Tensor:
    for step in steps:
        optimizer.zero_grad()
        inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank))
        model(inputs).pow(2).sum().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def write() -> None:
    """Save what this version has after some steps, and the parameters that it has some steps later."""

    def rank_main(group: Group) -> dict[str, Any]:
        saved = {}
        for name, make in HOOKS.items():
            model, optimizer = build(group, make())
            train(model, optimizer, group.rank, range(SAVED_AFTER))
            state = {"model": copy.deepcopy(model.module.state_dict()), "hook": model.hook_state_dict()}
            saved[name] = state | {"expected": train(model, optimizer, group.rank, range(SAVED_AFTER, STEPS))}
        return saved

    torch.save(run_ranks(rank_main, 2), FILE)


@pytest.mark.parametrize("name", HOOKS)
def test_training_continues_from_what_an_earlier_version_saved(name: str) -> None:
    every_rank = torch.load(FILE, weights_only=True)

    def rank_main(group: Group) -> tuple[Tensor, Tensor]:
        saved = every_rank[group.rank][name]
        model, optimizer = build(group, HOOKS[name]())
        model.module.load_state_dict(saved["model"])
        model.load_hook_state_dict(saved["hook"])
        return train(model, optimizer, group.rank, range(SAVED_AFTER, STEPS)), saved["expected"]

    for got, expected in run_ranks(rank_main, 2):
        torch.testing.assert_close(got, expected)


if __name__ == "__main__":
    write()
