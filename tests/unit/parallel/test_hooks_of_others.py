"""Post-accumulate hooks of other code on parameters run before a bucket is launched, as in torch's DDP."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire.autograd import after_accumulate
from gradwire.groups import Group
from gradwire.hooks import GradBucket
from gradwire.parallel import DistributedDataParallel as DDP
from gradwire.testing import run_ranks
from helpers.futures import done

FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}
REGISTER = (Tensor.register_post_accumulate_grad_hook, after_accumulate)
AT = (-1, 0, 1, 15)
STEPS = 20


def clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(max=1.0)


def step_in_backward(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=-0.01)  # type: ignore[arg-type]
    parameter.grad = None


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])


def torch_style(state: Any, bucket: GradBucket) -> Any:
    return done(bucket.buffer().clone())


def story(
    make: Callable[[nn.Module], nn.Module], hook: Any, at: int, register: Any, none: bool, comm: bool
) -> list[Any]:
    """The gradients of every step; hooks are registered before step `at`, or before replication if that is -1."""
    module = model()
    if at < 0:
        for p in module.parameters():
            register(p, hook)
    ddp: Any = make(module)
    if comm:
        ddp.register_comm_hook(None, torch_style)
    found = []
    for i in range(STEPS):
        if i == at:
            for p in module.parameters():
                register(p, hook)
        ddp.zero_grad(set_to_none=none)
        ddp(torch.full((3, 4), 1.0 + i)).sum().backward()
        found.append([torch.zeros(()) if p.grad is None else p.grad.clone() for p in module.parameters()])
    return found


@functools.cache
def bare_story(at: int, none: bool) -> list[Any]:
    return story(lambda module: module, clamp, at, REGISTER[0], none, False)


@pytest.mark.parametrize("place", range(len(FLAGS)), ids=FLAGS)
@pytest.mark.parametrize("at", AT)
def test_clamped_gradients_are_averaged(at: int, place: int) -> None:
    """At world size 1 the averages are the clamped gradients themselves, which a bare model has too."""
    flags, register = list(FLAGS.values())[place], REGISTER[(AT.index(at) + place) % 2]
    for none in (True, False):
        bare = bare_story(at, none)
        comm = none == (register is after_accumulate)  # every pair of the three

        def rank_main(group: Group, none: bool = none, comm: bool = comm) -> Any:
            def make(module: nn.Module) -> nn.Module:
                return DDP(module, process_group=group, bucket_cap_mb=1e-4, **flags)

            return story(make, clamp, at, register, none, comm)

        (averaged,) = run_ranks(rank_main, 1)
        for i, (ours, theirs) in enumerate(zip(averaged, bare, strict=True)):
            assert all(map(torch.equal, ours, theirs)), (i, none, comm)


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("at", [0, 15])
def test_an_optimizer_in_backward_that_takes_gradients_away(at: int, flags: dict[str, Any]) -> None:
    """As in torch's DDP: what it leaves is averaged, and that is nothing: zeros, or None where unused ones are looked for."""

    def rank_main(group: Group) -> Any:
        def make(module: nn.Module) -> nn.Module:
            return DDP(module, process_group=group, bucket_cap_mb=1e-4, **flags)

        return story(make, step_in_backward, at, Tensor.register_post_accumulate_grad_hook, True, False)

    for found in run_ranks(rank_main, 2):
        for i, gradients in enumerate(found):
            assert all(not g.any() for g in gradients) == (i >= at), i
