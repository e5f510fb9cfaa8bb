"""NaN and infinity in what our hooks reduce inside FSDP2: all ranks decide together, also those whose shards are finite."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradwire.errors import NonFiniteGradient, Origin, UsageError, UsageTypeError
from gradwire.groups import Group, ThreadGroup
from gradwire.hooks import cast, chain, error_feedback, mean, quantize
from gradwire.interop import FsdpChecks, as_fsdp_hook, as_fsdp_reduce_scatter, from_process_group, fsdp_parameters
from gradwire.policies import NonFinite

FEEDBACK = chain(error_feedback(), quantize(bits=8))
NAN = float("nan")


class Net(nn.Module):
    """`factor` is in the gradients of row 2 of the last layer, which is on the second of two shards, and in no others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor, factor: float) -> Tensor:
        inner = self.first(inputs).tanh()
        return self.last(inner)[:, :2].sum() + self.last(inner.detach())[:, 2].sum() * factor


class Run:
    """A model on all ranks as shards, with checked hooks after torch's reduce-scatter, or in place of it."""

    def __init__(self, mesh: Any, groups: dict[str, Group], place: str, checks: FsdpChecks, hook: Any) -> None:
        torch.manual_seed(0)
        self.model = Net()
        fully_shard(self.model.first, mesh=mesh["shard"])
        fully_shard(self.model, mesh=mesh["shard"])
        self.hooks: list[Any] = []
        for module, named in fsdp_parameters(self.model):
            if place == "after":
                self.hooks.append(as_fsdp_hook(hook, groups["replicate"], named_parameters=named, checks=checks))
                module.set_all_reduce_hook(self.hooks[-1])
            else:
                self.hooks.append(as_fsdp_reduce_scatter(hook, groups["shard"], named_parameters=named, checks=checks))
                module.set_custom_reduce_scatter(self.hooks[-1])

    def backward(self, factor: float = 1.0) -> None:
        self.model.zero_grad()
        self.model(torch.ones(2, 6), factor).backward()

    def grads(self) -> list[list[float] | None]:
        grads = [p.grad for p in self.model.parameters()]
        return [None if grad is None else grad.to_local().flatten().tolist() for grad in grads]  # type: ignore[attr-defined]

    def states(self) -> list[dict[str, Any]]:
        return [hook.hook_state_dict() for hook in self.hooks]


def bad_on_rank_0(rank: int, size: int) -> dict[str, Any]:
    """The batch of rank 0 has a NaN, which is in the shard of rank 1 alone. What each policy does on this rank."""
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("replicate", "shard"))
    groups = {name: from_process_group(mesh.get_group(name)) for name in ("replicate", "shard")}
    world = from_process_group(dist.group.WORLD)
    bad = NAN if rank == 0 else 1.0
    done: dict[str, Any] = {}
    for place in ("after", "instead"):
        run = Run(mesh, groups, place, FsdpChecks(world, nonfinite=NonFinite.SKIP), FEEDBACK)
        run.backward()
        healthy, before = run.grads(), run.states()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.backward(bad)
        skipped, after = run.grads(), run.states()
        run.backward()
        state = before[-1]["state"], after[-1]["state"]
        same = all(torch.equal(state[0][name]["residual"], state[1][name]["residual"]) for name in state[0])
        steps = [one["step"] for states in (before, after, run.states()) for one in states]
        texts = [str(w.message) for w in caught if w.category is RuntimeWarning]
        done[place, "skip"] = skipped, same, steps, texts, None not in healthy and None not in run.grads()

        run = Run(mesh, groups, place, FsdpChecks(world, nonfinite=NonFinite.RAISE), mean())
        with pytest.raises(NonFiniteGradient) as raised:
            run.backward(bad)
        done[place, "raise"] = raised.value
        run.backward()
        done[place, "good"] = run.grads()

        run = Run(mesh, groups, place, FsdpChecks(world, nonfinite=NonFinite.RECORD), mean())
        run.backward(bad)
        done[place, "record"] = run.grads()[-1]

        narrow = chain(cast(torch.float16), mean())
        run = Run(mesh, groups, place, FsdpChecks(world, nonfinite=NonFinite.RAISE), narrow)
        with pytest.raises(NonFiniteGradient) as raised:
            run.backward(1e30 if rank == 0 else 1.0)
        done[place, "overflow"] = raised.value
    for group in (*groups.values(), world):
        group.close()
    return done


def test_all_ranks_decide_together(fresh: Callable[..., Any]) -> None:
    (ranks,) = fresh(bad_on_rank_0, ("gloo",))
    for place, whose, name in (("after", 1, "last.bias"), ("instead", 0, "last.bias (shard 1)")):
        for rank, done in enumerate(ranks):
            skipped, same, steps, texts, healthy = done[place, "skip"]
            assert skipped == [None] * 4
            assert same  # the hook has what it had before the step
            assert steps == [1, 1, 1, 1, 2, 2]
            assert healthy
            assert len(texts) == (rank == 0)
            for policy, origin in (("raise", Origin.GRADIENT), ("overflow", Origin.OVERFLOW)):
                error = done[place, policy]
                assert (error.rank, error.parameter, error.index, error.origin) == (whose, name, (0,), origin)
                assert error.step == 0
                assert str(error) == str(ranks[0][place, policy])
            assert ("that it shards with" in str(done[place, "raise"])) == (place == "after")
            assert "The averages are in .grad" in str(done[place, "raise"])
        good = [done[place, "good"] for done in ranks]
        assert good[1][-1] == [2.0]
        record = [done[place, "record"] for done in ranks]
        assert record[0] == good[0][-1]
        assert len(record[1]) == 1
        assert record[1][0] != record[1][0]  # NaN


def test_what_does_not_fit_is_refused() -> None:
    (group,) = ThreadGroup.world(1, timeout=20)
    with pytest.raises(UsageTypeError, match="not a gradwire Group"):
        FsdpChecks(object(), nonfinite=NonFinite.SKIP)  # type: ignore[arg-type]
    with pytest.raises(UsageTypeError, match=r"not a gradwire\.policies\.NonFinite"):
        FsdpChecks(group, nonfinite=True)  # type: ignore[arg-type]
    checks = FsdpChecks(group, nonfinite=NonFinite.RAISE)
    for adapt in (as_fsdp_hook, as_fsdp_reduce_scatter):
        with pytest.raises(UsageError, match="errors name parameters"):
            adapt(mean(), group, checks=checks)
    group.close()


def test_without_a_policy_nothing_is_looked_at() -> None:
    """Outside of a backward too, where nothing could be decided."""
    (group,) = ThreadGroup.world(1, timeout=20)
    checks = FsdpChecks(group, nonfinite=NonFinite.PASS)
    hook = as_fsdp_hook(mean(), group, named_parameters=[("a", torch.zeros(2))], checks=checks)
    flat = torch.tensor([NAN, 1.0])
    hook(flat)
    assert flat.isnan().tolist() == [True, False]
    group.close()


def test_a_row_without_names_is_that_of_its_module() -> None:
    """Some parameters got no gradient; FSDP does not expose which."""
    (group,) = ThreadGroup.world(1, timeout=20)
    named = [("a", torch.zeros(2)), ("b", torch.zeros(3))]
    checks = FsdpChecks(group, nonfinite=NonFinite.RAISE)
    hook = as_fsdp_hook(mean(), group, named_parameters=named, checks=checks)
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(lambda grad: hook(grad.clone()))
    with pytest.warns(UserWarning, match="reduces 3 elements"), pytest.raises(NonFiniteGradient) as raised:
        (weight * torch.tensor([1.0, NAN, 1.0])).sum().backward()
    assert raised.value.parameter == "a or another parameter of its module"
    assert raised.value.index == (1,)
    weight.grad = None
    (weight * 2).sum().backward()  # and the next one is healthy
    group.close()
