"""Steps that are dropped, and other numbers of ranks: `Fork`, `HookStates.fork`, and a runner whose ranks change."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire import hooks
from gradwire.groups import ThreadGroup
from gradwire.hooks import BucketSpec, CommHook, GradBucket
from gradwire.hooks.state_fork import Fork
from gradwire.reducer.hook.hook_states import HookStates, owed_norm
from gradwire.reducer.hook.runner import HookRunner
from gradwire.testing.hook_trial import equal_states, same_bits

FED = hooks.chain(hooks.error_feedback(), hooks.top_k(ratio=0.2))


def bucket(*names: str, index: int = 0) -> BucketSpec:
    shapes, strides = ((6, 4),) * len(names), ((4, 1),) * len(names)
    return BucketSpec(index, names, shapes, strides, torch.float32, torch.device("cpu"))


class OwnDict(dict[str, int]):
    pass


class OwnList(list[int]):
    pass


@dataclass
class Mixed:
    """A state of everything that a state may hold."""

    flat: Tensor = field(default_factory=lambda: torch.arange(8.0))
    number: int = 3
    parts: list[Any] = field(default_factory=lambda: [torch.ones(2), {"deep": torch.zeros(2).expand(3, 2)}])
    pair: tuple[Tensor, set[int]] = field(default_factory=lambda: (torch.ones(1), {1}))
    draws: random.Random = field(default_factory=lambda: random.Random(5))
    kinds: tuple[dict[str, int], list[int]] = field(default_factory=lambda: (OwnDict(a=1), OwnList([1])))

    def __post_init__(self) -> None:
        self.view = self.flat[2:4].view(2, 1)


CHANGES: dict[str, Callable[[Mixed], object]] = {
    "in place": lambda s: s.view.add_(1),
    "rebound": lambda s: setattr(s, "flat", torch.zeros(3)),
    "other memory": lambda s: setattr(s.flat, "data", torch.zeros(3)),
    "other shape": lambda s: (s.flat.resize_(3), s.view.t_()),
    "subclasses": lambda s: (s.kinds[0].update(a=2), s.kinds[1].append(2)),
    "number": lambda s: setattr(s, "number", 4),
    "another attribute": lambda s: setattr(s, "more", 1),
    "list": lambda s: s.parts.pop(),
    "deep": lambda s: s.parts[1].update(deep=1),
    "in a tuple": lambda s: (s.pair[0].add_(1), s.pair[1].add(2)),
    "what only deepcopy knows": lambda s: s.draws.random(),
}


def test_a_fork_restores_everything() -> None:
    state, place = Mixed(), Mixed().flat.shape
    address, drawn, fork = state.flat.data_ptr(), random.Random(5).random(), Fork(state)
    for change in [*CHANGES.values(), *CHANGES.values()]:
        fork.renew()
        change(state)
        assert fork.drop() is state
        assert (state.flat.data_ptr(), state.flat.shape) == (address, place)
        assert state.view.tolist() == [[2.0], [3.0]]
        assert state.kinds == ({"a": 1}, [1])
        assert (state.number, len(state.parts), hasattr(state, "more")) == (3, 2, False)
        assert torch.equal(state.parts[1]["deep"], torch.zeros(3, 2))
        assert (state.pair[0].item(), state.pair[1]) == (1.0, {1})
    assert state.draws.random() == drawn


def test_views_are_copied_once() -> None:
    """Of PowerSGD's hundred views, the four tensors that they are views of; and the copies stay."""
    spec = bucket(*(f"p{i}" for i in range(12)))
    hook = hooks.power_sgd(1, min_compression=1)
    fork = Fork(hook.init(spec))
    assert len(fork._tensors) > 50
    assert len(fork._copies) == 4
    copies = [t.data_ptr() for t in fork._copies]
    fork.renew()
    assert [t.data_ptr() for t in fork._copies] == copies


def reduce(states: HookStates, spec: BucketSpec, seed: int) -> None:
    """As a hook with error feedback does: change the state in place."""
    state, gradient = states.of(spec), torch.randn(spec.numel, generator=torch.Generator().manual_seed(seed))
    states.begin(spec, gradient)
    state["residual"].add_(gradient)


def test_forks_nest_and_survive_other_buckets() -> None:
    states, first, other = HookStates(FED, owed={"b": torch.ones(24)}), bucket("a", "b"), bucket("b", "a")
    reduce(states, bucket("a"), 0)
    known, at = states.by_name(), states.steps
    outer = states.fork()
    reduce(states, first, 1)
    inner = states.fork()
    middle = states.by_name()
    reduce(states, first, 2)
    inner.drop()
    assert equal_states(states.by_name(), middle)
    inner = states.fork()
    reduce(states, first, 3)
    inner.commit()
    states.next_step()
    states.store_by_parameter()  # buckets are rebuilt
    reduce(states, other, 4)
    outer.drop()
    outer.commit()  # it has ended
    assert equal_states({"a": states.by_name()["a"]}, known)
    assert (states.steps, list(states.owed)) == (at, ["b"])
    assert not states.forked


def test_a_loaded_state_survives_a_dropped_step_in_which_buckets_are_rebuilt() -> None:
    spec = bucket("a", "b")
    states = HookStates(FED)
    reduce(states, spec, 1)
    loaded = HookStates(FED, saved=states.by_name())
    step = loaded.fork()
    loaded.store_by_parameter()  # buckets are rebuilt before the first reduction
    reduce(loaded, spec, 2)
    step.drop()
    assert equal_states(loaded.by_name(), states.by_name())
    reduce(loaded, spec, 3)
    reduce(states, spec, 3)
    assert equal_states(loaded.by_name(), states.by_name())


def test_what_is_committed_outside_is_committed_inside() -> None:
    states, spec = HookStates(FED), bucket("a")
    outer = states.fork()
    states.fork()  # of a backward that has failed
    reduce(states, spec, 0)
    outer.commit()
    assert not states.forked
    assert states.of(spec)["residual"].any()


def runner(hook: CommHook, **named: Any) -> HookRunner:
    (group,) = ThreadGroup.world(1)
    return HookRunner(hook, group, **named)


def test_a_runner_takes_over_what_others_owe_and_rescales_it() -> None:
    """Also what an earlier hook owed, which is sent with the next gradients."""
    spec, ranks = bucket("a"), [runner(FED) for _ in range(3)]
    for i, one in enumerate(ranks):
        one.run(GradBucket(spec, torch.arange(24.0) * (i + 1), (), is_last=True))
    owed = [one.state_dict()["state"]["a"]["residual"] for one in ranks]
    assert owed_norm(ranks[0].state_dict(), FED) == pytest.approx(float(owed[0].norm()))
    ranks[0].change_ranks(3, 2, leavers=[ranks[2].state_dict()])
    ranks[1].change_ranks(3, 2)
    after = [one.state_dict()["state"]["a"]["residual"] for one in ranks[:2]]
    torch.testing.assert_close(sum(after) / 2, sum(owed) / 3)
    assert ranks[0].step == 1
    for one in ranks[:2]:
        one.replace(hooks.mean())
    ranks[0].change_ranks(2, 1, leavers=[ranks[1].state_dict()])
    torch.testing.assert_close(ranks[0].states.owed["a"], sum(owed) / 3)
    unknown = hooks.hierarchical(across=hooks.dion(rank=1))
    assert owed_norm(runner(unknown).state_dict(), unknown) == 0  # with nothing kept yet


@pytest.mark.parametrize(
    "hook",
    [
        hooks.sparse_loco(every=2, k=2, chunk=8),
        hooks.streaming_diloco(every=2, fragments=2, delay=1, alpha=0.5),
        hooks.local_sgd(every=2),
    ],
    ids=lambda hook: hook.made_by,
)
def test_an_outer_round_that_is_dropped_and_tried_again(hook: hooks.OuterHook) -> None:
    weights = [torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(5))]
    one = runner(hook, named_parameters=[("w", weights[0]), ("b", weights[1])])
    assert one.outer is not None

    def progress() -> None:
        assert one.outer is not None
        with torch.no_grad():
            for weight in weights:
                weight.mul_(0.75)
        one.outer.optimizer_stepped()

    def everything() -> Any:
        return [w.detach().clone() for w in weights], one.state_dict()

    for _ in range(5):
        local = [w.detach().clone() for w in weights]
        before, fork, results = one.state_dict(), one.states.fork(), []
        for again in (True, True, False):
            progress()
            results.append(everything())
            if again:
                fork.drop()
                fork = one.states.fork()
                assert equal_states(one.state_dict(), before)
                assert all(same_bits(w.detach(), was * 0.75) for w, was in zip(weights, local, strict=True))
                with torch.no_grad():  # an inner step belongs to its rank, and is not dropped
                    torch._foreach_copy_(weights, local)
        fork.commit()
        assert all(equal_states(result, results[0]) for result in results)
