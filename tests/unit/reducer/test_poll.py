"""POLL: after a plain step only a few parameters have hooks, and every other way a step can go is noticed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradwire.errors import GroupAborted, ReadyTwice, Unfinished
from gradwire.events import BackwardEnded, BucketLaunched, Event, GradientReady
from gradwire.groups import Group, ThreadGroup
from gradwire.hooks import GradBucket
from gradwire.parallel import DistributedDataParallel, replicate
from gradwire.parallel.replica import Replica
from gradwire.policies import Buckets, Gradients, Graph
from gradwire.reducer.machine import State
from gradwire.testing import run_ranks

X = torch.arange(8.0).view(2, 4) / 8
PLAIN_STEPS = 3
"""The first shows the order, the second that it is plain, and from the third on there is silence."""


class Stages(nn.Module):
    """Three linear stages, whose order can be chosen at every forward, and how often each runs re-entrantly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, order: str = "abc") -> Tensor:
        for name in order:
            stage = getattr(self, name.lower())
            x = checkpoint(stage, x, use_reentrant=True) if name.isupper() else stage(x)
        return x


@pytest.fixture
def group() -> Iterator[Group]:
    (only,) = ThreadGroup.world(1, timeout=20)
    yield only
    only.close()


@pytest.fixture(params=[(1 << 30,), (1,), (100,)], ids=["one bucket", "a bucket each", "some buckets"])
def limits(request: pytest.FixtureRequest) -> tuple[int, ...]:
    chosen: tuple[int, ...] = request.param
    return chosen


@pytest.fixture(params=[Gradients.COPIES, Gradients.VIEWS], ids=["copies", "views"])
def model(request: pytest.FixtureRequest, group: Group, limits: tuple[int, ...]) -> Stages:
    """A model that was polled in the last step, and will be in the next."""
    module = Stages()
    replicate(module, group=group, buckets=Buckets(limits), gradients=request.param)
    for _ in range(PLAIN_STEPS):
        step(module)
    assert is_polling(module)
    return module


def replica_of(module: nn.Module) -> Replica:
    replica: Replica = module._gradwire_replica  # type: ignore[assignment]
    return replica


def is_polling(module: nn.Module) -> bool:
    """Whether the last step was polled to its end."""
    return replica_of(module).reducer.listener.listening.polling


def step(module: nn.Module, order: str = "abc") -> None:
    module.zero_grad()
    module(X, order).square().sum().backward()


def hooked(module: nn.Module) -> set[int]:
    """The parameters that carry anything of ours, or whose accumulator nodes do."""
    replica: Replica | None = module._gradwire_replica  # type: ignore[assignment]
    hooks: Any = None if replica is None else replica.reducer.listener.hooks
    return set(() if hooks is None else hooks.calling) | {
        i for i, p in enumerate(module.parameters()) if p._backward_hooks or p._post_accumulate_grad_hooks
    }


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters()]  # type: ignore[misc]


def assert_right(module: nn.Module, order: str = "abc", times: int = 1) -> None:
    alone = Stages()
    for _ in range(times):
        alone(X, order).square().sum().backward()
    for (name, p), q in zip(module.named_parameters(), alone.parameters(), strict=True):
        assert p.grad is not None, name
        assert torch.equal(p.grad, q.grad), name  # type: ignore[arg-type]


# -- silence ---------------------------------------------------------------------------------------------------------------


def test_only_gradients_that_launch_are_heard(model: Stages, calls: Callable[[], list[int]]) -> None:
    reducer = replica_of(model).reducer
    seen = calls()
    step(model)
    expected = {members[-1] for members in reducer.layout.members}
    assert set(seen) == expected == hooked(model)
    assert len(seen) == len(expected)
    assert reducer.steps == PLAIN_STEPS + 1
    assert_right(model)


def test_no_trace_is_left_on_the_others(group: Group) -> None:
    module = Stages()
    replicate(module, group=group)
    for _ in range(PLAIN_STEPS):
        step(module)
    others = [p for i, p in enumerate(module.parameters()) if i not in hooked(module)]
    assert len(others) == 5
    assert all(p._backward_hooks is None and p._post_accumulate_grad_hooks is None for p in others)


def test_sampling_step_times_puts_no_hooks_on_accumulators(group: Group) -> None:
    ddp = DistributedDataParallel(Stages(), process_group=group)
    for _ in range(2):
        ddp.zero_grad()
        ddp(X).sum().backward()
    assert ddp.replica.reducer.events  # one of the first ten steps, whose times are all taken
    assert not ddp.replica.reducer.listener.hooks.calling  # type: ignore[union-attr]
    assert ddp._get_ddp_logging_data()["avg_backward_compute_time"] > 0
    ddp.replica.detach()


def test_the_order_last_seen_is_kept(model: Stages) -> None:
    reducer = replica_of(model).reducer
    before = list(reducer.order.last_arrival)
    step(model)
    assert reducer.order.last_arrival == before
    assert reducer.order.graph_seems_static


def test_buckets_are_launched_before_backward_ends(group: Group) -> None:
    module, launched = Stages(), []
    replica = replicate(module, group=group, buckets=Buckets((1,)))
    for _ in range(PLAIN_STEPS):
        step(module)
    start = replica.runner.start

    def spy(bucket: GradBucket) -> Any:
        launched.append(sum(p.grad is not None for p in module.parameters()))
        return start(bucket)

    replica.runner.start = spy  # type: ignore[method-assign]
    step(module)
    assert is_polling(module)
    assert launched == [1, 2, 3, 4, 5, 6]


def test_a_listener_hears_of_every_gradient_in_its_order(model: Stages) -> None:
    reducer, events = replica_of(model).reducer, []
    with reducer.events.listen(events.append):
        step(model, "cab")
    assert not is_polling(model)
    assert [e.index for e in events if isinstance(e, GradientReady)] == reducer.order.last_arrival
    assert reducer.order.last_arrival[:2] == [3, 2]
    assert [e.bucket for e in events if isinstance(e, BucketLaunched)] == list(range(len(reducer.layout.members)))
    step(model, "cab")
    step(model, "cab")
    assert is_polling(model)
    assert_right(model, "cab")


def test_a_forward_without_backward_changes_nothing(model: Stages) -> None:
    model.zero_grad()
    model(X)
    model(X)
    model(X).square().sum().backward()
    assert is_polling(model)
    assert_right(model)


def test_a_shared_parameter_is_looked_at_once_all_its_uses_are_summed(group: Group) -> None:
    module = Stages()
    module.c = module.a
    replicate(module, group=group, buckets=Buckets((1,)))
    for _ in range(PLAIN_STEPS + 1):
        step(module, "abca")
    assert is_polling(module)
    found = [g.clone() for g in gradients(module)]
    alone = Stages()
    alone.c = alone.a
    alone(X, "abca").square().sum().backward()
    assert all(map(torch.equal, found, gradients(alone)))


def test_no_sync_is_not_reduced_and_not_heard_of(model: Stages) -> None:
    replica = replica_of(model)
    model.zero_grad()
    with replica.no_sync():
        model(X).square().sum().backward()
    assert replica.reducer.steps == PLAIN_STEPS
    model(X).square().sum().backward()  # something is left over: not polled
    assert not is_polling(model)
    assert replica.reducer.steps == PLAIN_STEPS + 1
    assert_right(model, times=2)


def test_autograd_grad_accumulates_nothing(model: Stages) -> None:
    for _ in range(2):
        model.zero_grad()
        loss = model(X).square().sum()
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        assert replica_of(model).reducer.machine.state is State.ARMED
        loss.backward()
        assert_right(model)


def test_drop_in_class_polls_between_sampled_steps() -> None:
    (group,) = ThreadGroup.world(1)
    module = Stages()
    ddp = DistributedDataParallel(module, process_group=group)
    for number in range(13):
        ddp.zero_grad()
        ddp(X).square().sum().backward()
        assert ddp.replica.reducer.listener.listening.polling == (number >= 10)
        assert_right(module)
    ddp._set_ddp_runtime_logging_sample_rate(1)
    ddp.zero_grad()
    ddp(X).square().sum().backward()
    assert not ddp.replica.reducer.listener.listening.polling
    assert ddp._get_ddp_logging_data()["prev_iteration_grad_ready_order_indices"] == "5, 4, 3, 2, 1, 0"
    ddp.replica.detach()
    group.close()


# -- falling back ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["cba", "bac", "cab", "aBC", "aBc"])
def test_another_order_is_noticed_and_nothing_is_launched_too_early(model: Stages, order: str) -> None:
    reducer = replica_of(model).reducer
    step(model, order)
    assert_right(model, order)
    assert reducer.steps == PLAIN_STEPS + 1
    step(model, order)
    assert_right(model, order)
    step(model)
    assert_right(model)
    assert reducer.steps == PLAIN_STEPS + 3


def test_after_three_irregular_steps_nothing_is_polled_any_more(model: Stages) -> None:
    reducer = replica_of(model).reducer
    for order in ["cba", "abc", "abc"] * 4:
        step(model, order)
        assert_right(model, order)
    for _ in range(3):
        step(model)
        assert not is_polling(model)
        assert_right(model)
    assert reducer.listener.hooks is not None
    assert not reducer.listener.hooks.can_poll
    assert hooked(model) == set(range(6))


@pytest.mark.parametrize("how", ["accumulating", "in place", "between"])
def test_programs_that_are_not_plain_end_up_in_last_per_bucket(group: Group, how: str) -> None:
    module = Stages()
    replica = replicate(module, group=group)
    for number in range(8):
        if how == "in place":
            module.zero_grad(set_to_none=False)
        if how == "accumulating":
            module.zero_grad()
            with replica.no_sync():
                module(X).square().sum().backward()
        loss = module(X).square().sum()
        if how == "between":
            module.zero_grad()
        loss.backward()
        assert not is_polling(module) or number < PLAIN_STEPS
        assert_right(module, times=2 if how == "accumulating" else 1)
    assert replica.reducer.listener.hooks is not None
    assert not replica.reducer.listener.hooks.can_poll


def test_a_parameter_without_gradient_is_named_in_the_next_step(model: Stages) -> None:
    step(model, "bc")
    assert replica_of(model).reducer.steps == PLAIN_STEPS
    with pytest.raises(Unfinished, match=r"rank 0: a\.weight, a\.bias\n"):
        step(model)
    step(model)  # recovers
    assert_right(model)


def test_a_backward_that_reaches_nothing_that_is_heard_is_known_too(group: Group) -> None:
    module = Stages()
    replicate(module, group=group)  # one bucket, which a.weight fills
    for _ in range(PLAIN_STEPS):
        step(module)
    step(module, "c")
    with pytest.raises(Unfinished, match=r"rank 0: a\.weight, a\.bias, b\.weight, b\.bias\n"):
        step(module)
    step(module)
    assert_right(module)


def test_a_backward_that_failed_before_anything_came_has_failed_the_step(model: Stages) -> None:
    fail = True

    def maybe(_: Tensor) -> None:
        if fail:
            raise KeyError("once")

    model.zero_grad()
    out = model(X)
    hidden = out * 1  # the hook on `out` itself has run by then
    out.register_hook(maybe)
    with pytest.raises(KeyError, match="once"):
        hidden.square().sum().backward(retain_graph=True)
    fail = False
    with pytest.raises(GroupAborted, match="KeyError: 'once'"):  # the other ranks were told that the step had failed
        hidden.square().sum().backward()
    step(model)
    assert_right(model)


class _Result:
    """An output that only its user can look into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("wrap", "look", "polling"),
    [
        (lambda t: {"a": [t], "b": None}, lambda found: found["a"][0], True),
        (_Result, lambda found: found.value, False),
    ],
    ids=["nested", "hidden"],
)
def test_what_can_be_found_in_an_output(group: Group, wrap: Any, look: Any, polling: bool) -> None:
    class Wrapped(Stages):
        def forward(self, x: Tensor, order: str = "abc") -> Any:
            return wrap(super().forward(x, order))

    module = Wrapped()
    replicate(module, group=group)
    for _ in range(6):
        module.zero_grad()
        look(module(X)).square().sum().backward()
        assert_right(module)
    assert is_polling(module) is polling


def test_check_finished_knows_of_gradients_that_came_unheard(model: Stages) -> None:
    step(model, "bc")
    with pytest.raises(Unfinished, match=r"rank 0: a\.weight, a\.bias\n"):
        replica_of(model).check_finished()


def test_a_parameter_that_was_frozen_is_heard_of_again(group: Group) -> None:
    module = Stages()
    replicate(module, group=group)
    for _ in range(PLAIN_STEPS):
        step(module)
    for p in module.parameters():
        p.requires_grad_(False)
    module(X.clone().requires_grad_())  # trains what is before this model, as a discriminator does
    for p in module.parameters():
        p.requires_grad_(True)
    for _ in range(3):
        step(module)
        assert_right(module)


def test_two_backwards_that_share_the_parameters_among_them(model: Stages) -> None:
    reducer = replica_of(model).reducer
    for expected in (PLAIN_STEPS + 1, PLAIN_STEPS + 2):
        model.zero_grad()
        hidden = model(X, "ab").detach()
        outputs = [model(X, "ab"), model.c(hidden)]
        for output in outputs[::-1]:
            output.square().sum().backward()
        assert reducer.steps == expected
        assert reducer.machine.state is State.RESTING


def test_a_backward_that_raised_has_failed_the_step(model: Stages) -> None:
    class Raised(Exception):
        pass

    def fail(_: Tensor) -> None:
        raise Raised

    handle = model.a.register_forward_hook(lambda module, inputs, output: output.register_hook(fail) and None)
    with pytest.raises(Raised):
        step(model)  # the gradients of `b` and `c` have come, most of them unheard
    handle.remove()
    reducer = model._gradwire_replica.reducer  # type: ignore[union-attr]
    assert "Raised" in reducer.group.failure.reason
    step(model)
    assert_right(model)


def test_a_gradient_that_comes_again_before_its_bucket_is_launched_is_part_of_the_sum(group: Group) -> None:
    module = Stages()
    replicate(module, group=group)  # one bucket
    for _ in range(PLAIN_STEPS):
        step(module)
    step(module, "aBBc")
    assert_right(module, "aBBc")


def test_a_gradient_that_comes_again_after_its_bucket_was_launched_is_an_error(group: Group) -> None:
    module = Stages()
    replica = replicate(module, group=group, buckets=Buckets((1 << 7,)))
    for _ in range(PLAIN_STEPS):
        step(module)
    members = replica.reducer.layout.members
    unheard = [i for bucket in members for i in bucket if i not in hooked(module)]
    first = next(i for i in unheard if i in members[0])
    name = [n for n, _ in module.named_parameters()][first]

    def again(_: Tensor) -> None:
        with torch.enable_grad():
            (dict(module.named_parameters())[name] * 2).sum().backward()

    module.zero_grad()
    out = module.a(X)
    out.register_hook(again)  # when all buckets but the last have been launched
    module(X)  # says that a backward is to come
    inner = module.c(module.b(out)).square().sum()
    before = replica.reducer.steps
    with pytest.raises(ReadyTwice, match=f"{name}\\).* changed after their buckets had been launched"):
        inner.backward()
    assert replica.reducer.steps == before
    step(module)  # recovers
    assert_right(module)


def test_a_program_that_writes_to_gradients_during_backward_is_not_plain(group: Group) -> None:
    module = Stages()
    replica = replicate(module, group=group, buckets=Buckets((1,)), gradients=Gradients.COPIES)

    def scale(*_: Any) -> None:
        for p in module.c.parameters():  # launched long since: too late, but no error
            assert p.grad is not None
            p.grad *= 2

    module.a.register_full_backward_hook(scale)
    for _ in range(8):
        module.zero_grad()
        module(X.clone().requires_grad_()).square().sum().backward()
        assert not is_polling(module)
    assert replica.reducer.steps == 8
    assert_right(module)


def test_torch_hooks_may_write_to_gradients_so_there_is_no_silence(group: Group) -> None:
    module = Stages()
    replica = replicate(module, group=group)

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    replica.use_hook((hook, None))
    for _ in range(5):
        step(module)
        assert not is_polling(module)
        assert_right(module)


@pytest.mark.parametrize("graph", [Graph.FIND_UNUSED, Graph.STATIC])
def test_graphs_that_say_more_about_themselves_are_always_heard(group: Group, graph: Graph) -> None:
    module = Stages()
    replicate(module, group=group, graph=graph)
    for _ in range(5):
        step(module)
        assert not is_polling(module)
        assert_right(module)


@pytest.mark.parametrize("keep", [True, False])
def test_averages_go_to_the_gradients_that_a_listener_puts_in_place(model: Stages, keep: bool) -> None:
    replica = replica_of(model)

    def replace(event: Event) -> None:
        if isinstance(event, BackwardEnded):
            for p in model.parameters():
                p.grad = p.grad.clone() * 0 if keep and p.grad is not None else None

    replica.reducer.events.listen(replace)
    for _ in range(2):
        step(model)
        assert_right(model)


class _FromBefore(torch.autograd.Function):
    """The sum of a weight, whose gradient is what `give` returns."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, give: Callable[[], Tensor]) -> Tensor:
        ctx.give = give
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.give(), None


_SQUARE = torch.arange(16.0).view(4, 4)
_STARTS = {
    "dense": _SQUARE,
    "transposed": _SQUARE.t(),
    "with gaps": torch.arange(32.0).view(4, 8)[:, ::2],
    "channels last": torch.arange(64.0).view(1, 4, 4, 4).contiguous(memory_format=torch.channels_last),
}
_ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda grad: grad,
    "detached": Tensor.detach,
    "transposed": lambda grad: grad.transpose(-1, -2),
    "a view of the same shape": lambda grad: grad.view_as(grad),  # may have another stride where the size is 1
    "a copy": Tensor.clone,
}


@pytest.mark.parametrize("alias", _ALIASES)
@pytest.mark.parametrize("start", _STARTS)
@pytest.mark.parametrize("kept", list(Gradients))
def test_a_gradient_that_lies_in_the_memory_of_an_earlier_one(
    group: Group, kept: Gradients, start: str, alias: str
) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(_STARTS[start]), nn.Parameter(torch.ones(3))
            self.before = torch.rand(self.weight.shape)

        def forward(self) -> Tensor:
            out: Tensor = _FromBefore.apply(self.weight, lambda: _ALIASES[alias](self.before)) + self.bias.sum()
            return out

    module = Again()
    replicate(module, group=group, gradients=kept)
    for _ in range(PLAIN_STEPS + 3):
        expected = _ALIASES[alias](module.before).clone()
        module.zero_grad()
        module().backward()
        assert torch.equal(module.weight.grad, expected)  # type: ignore[arg-type]
        module.before = module.weight.grad  # type: ignore[assignment]
    assert is_polling(module)


def test_sparse_and_mixed_parameters(group: Group) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words = nn.Embedding(6, 4, sparse=True)
            self.wide = nn.Linear(4, 4, dtype=torch.float64)
            self.narrow = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.wide(self.narrow(self.words(x)).double())

    module, alone, words = Mixed(), Mixed(), torch.tensor([1, 4, 1])
    replicate(module, group=group, buckets=Buckets((1,)))
    for _ in range(PLAIN_STEPS + 2):
        for each in (module, alone):
            each.zero_grad()
            each(words).square().sum().backward()
        for p, q in zip(module.parameters(), alone.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert torch.equal(p.grad.to_dense(), q.grad.to_dense())
    assert is_polling(module)


# -- more than one rank ------------------------------------------------------------------------------------------------------


def _ranks_in_other_orders(group: Group) -> list[list[float]]:
    module = Stages()
    replica = replicate(module, group=group, buckets=Buckets((1,)))
    found = []
    for orders in ["abc abc", "abc abc", "abc abc", "abc cba", "bca abc", "cab cab", "abc abc", "abc abc"]:
        module.zero_grad()
        module(X * (group.rank + 1), orders.split()[group.rank]).square().sum().backward()
        found.append([g.sum().item() for g in gradients(module)])
    replica.detach()
    return found


def test_ranks_of_which_one_has_an_irregular_step_still_meet() -> None:
    mine, theirs = run_ranks(_ranks_in_other_orders, 2)
    assert mine == theirs


# -- leaving -----------------------------------------------------------------------------------------------------------------


def test_detaching_leaves_nothing_on_the_parameters(model: Stages) -> None:
    replica_of(model).detach()
    assert hooked(model) == set()


def test_a_polled_model_that_is_dropped_is_freed_at_once(group: Group) -> None:
    module = Stages()
    replica = replicate(module, group=group)
    for _ in range(PLAIN_STEPS):
        step(module)
    gc.collect()
    gc.disable()
    try:
        weak = weakref.ref(module.b.weight)
        del module, replica
        assert weak() is None
    finally:
        gc.enable()
