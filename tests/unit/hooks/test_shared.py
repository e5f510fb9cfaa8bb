"""`shared`: the part of one rank's state that is valid on every rank, through all combinators."""

from typing import Any

import pytest
import torch

from gradwire import hooks
from gradwire.hooks import CommHook, after, chain, error_feedback, every, hierarchical, mean, partition, power_sgd
from gradwire.testing import simulate

SPEC = hooks.BucketSpec(0, ("w", "b"), ((32, 16), (16,)), ((16, 1), (1,)), torch.float32, torch.device("cpu"))
LOW = power_sgd(2)
FED = chain(error_feedback(), LOW)
HOSTS = [[0, 1], [2, 3]]
HOOKS: dict[str, tuple[CommHook, Any]] = {
    "power_sgd": (LOW, None),
    "power_sgd, batched": (power_sgd(2, batched=True), None),
    "error_feedback": (FED, None),
    "after, before": (after(9, mean(), before=LOW), None),
    "after": (after(1, FED), None),
    "every": (every(2, LOW), None),
    "every, otherwise": (every(2, mean(), otherwise=FED), None),
    "partition": (partition({"b": mean(), "*": FED}), None),
    "by_size": (hooks.by_size(numel=100, large=FED), None),
    "hierarchical, inside": (hierarchical(inside=LOW, across=mean()), HOSTS),
    "hierarchical, across": (hierarchical(across=FED), HOSTS),
}


def tensors(state: Any, under: str = "") -> dict[str, torch.Tensor]:
    if isinstance(state, dict):
        return {k: t for key, part in state.items() for k, t in tensors(part, f"{under}/{key}").items()}
    return {under: state} if isinstance(state, torch.Tensor) else {}


@pytest.mark.parametrize(("hook", "hosts"), HOOKS.values(), ids=HOOKS)
def test_common_state_is_shared_and_residuals_are_not(hook: CommHook, hosts: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    states: Any = None
    for step in range(3):
        brought = [torch.randn(SPEC.numel, generator=generator) for _ in range(4 if hosts else 2)]
        states = simulate(hook, brought, spec=SPEC, states=states, step=step, hosts=hosts).states
    saved = hook.save(states[0], SPEC)
    common = hook.shared(saved)
    every_q = {k: t for k, t in tensors(saved).items() if not {"residual", "kept", "unsent"} & set(k.split("/"))}
    assert every_q
    assert tensors(common).keys() == every_q.keys()
    again = hook.save(hook.load(common, SPEC), SPEC)
    for name, q in every_q.items():
        assert torch.equal(tensors(again)[name], q), name
