"""The intake: once a step has shown which gradients fill buckets, only these call, and every other way a step can go is noticed."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from gradwire.errors import GroupAborted, ReadyTwice, Unfinished
from gradwire.events import BackwardEnded, Event, GradientReady
from gradwire.groups import Group, ThreadGroup
from gradwire.hooks import GradBucket
from gradwire.parallel import replicate
from gradwire.parallel.replica import Replica
from gradwire.policies import Buckets, Gradients
from helpers.backward_calls import in_backward

X = torch.arange(8.0).view(2, 4) / 8


class Branches(nn.Module):
    """Two stages whose order, and whether each takes part, can be chosen at every forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, order: str = "ab", *, again: bool = False) -> Tensor:
        for name in order:
            x = getattr(self, name)(x)
        if again:  # twice in one backward: each checkpoint accumulates in a graph task of its own
            x = checkpoint(self.a, checkpoint(self.a, x, use_reentrant=True), use_reentrant=True)
        return x


@pytest.fixture
def group() -> Iterator[Group]:
    (only,) = ThreadGroup.world(1)
    yield only
    only.close()


@pytest.fixture(params=[(1 << 30,), (1,)], ids=["one bucket", "a bucket each"])
def model(request: pytest.FixtureRequest, group: Group) -> Branches:
    """A model whose next step calls once per bucket."""
    module = Branches()
    replicate(module, group=group, buckets=Buckets(request.param), gradients=Gradients.COPIES)
    for _ in range(3):
        step(module)
    return module


def replica_of(module: nn.Module) -> Replica:
    replica: Replica = module._gradwire_replica  # type: ignore[assignment]
    return replica


def step(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    module.zero_grad()
    module(X, *args, **kwargs).square().sum().backward()


def assert_right(module: Branches, *args: Any, **kwargs: Any) -> None:
    alone = Branches()
    alone.load_state_dict(module.state_dict())
    step(alone, *args, **kwargs)
    for (name, p), q in zip(module.named_parameters(), alone.parameters(), strict=True):
        assert p.grad is not None, name
        assert torch.equal(p.grad, q.grad), name  # type: ignore[arg-type]


def test_only_gradients_that_launched_call_the_reducer(model: Branches, calls: Callable[[], list[int]]) -> None:
    reducer = replica_of(model).reducer
    before = reducer.order.last_arrival
    seen = calls()
    step(model)
    assert sorted(seen) == sorted(members[-1] for members in reducer.layout.members)
    assert reducer.order.last_arrival == before
    assert reducer.steps == 4
    assert_right(model)


def test_a_listener_is_called_for_every_gradient(model: Branches) -> None:
    reducer, events = replica_of(model).reducer, []
    with reducer.events.listen(events.append):
        step(model)
    assert [e.index for e in events if isinstance(e, GradientReady)] == reducer.order.last_arrival
    assert sorted(reducer.order.last_arrival) == [0, 1, 2, 3]
    step(model)
    assert reducer.steps == 5


def test_another_order_is_noticed_at_the_first_gradient_that_launches_nothing(
    model: Branches, calls: Callable[[], list[int]]
) -> None:
    reducer = replica_of(model).reducer
    seen = calls()
    step(model, "ba")
    assert reducer.steps == 4
    assert_right(model, "ba")
    assert reducer.order.last_arrival == [1, 0, 3, 2]
    assert reducer.order.last_arrival[-1] in seen
    seen.clear()
    step(model, "ba")  # by now it is the order to expect
    assert len(seen) < len(reducer.order.last_arrival) or len(reducer.layout.members) > 1
    assert reducer.steps == 5
    assert_right(model, "ba")


def test_buckets_are_launched_before_backward_ends(group: Group) -> None:
    module, launched = Branches(), []
    replica = replicate(module, group=group, buckets=Buckets((1,)))
    start = replica.runner.start

    def spy(bucket: GradBucket) -> Any:
        launched.append((bucket.index(), [i for i, p in enumerate(module.parameters()) if p.grad is not None]))
        return start(bucket)

    step(module)  # in one bucket, as the order is not known yet
    for order in ("ab", "ab", "ab", "ba", "ba", "ab"):
        launched.clear()
        replica.runner.start = spy  # type: ignore[method-assign]
        step(module, order)
        replica.runner.start = start  # type: ignore[method-assign]
        assert [number for number, _ in launched] == [0, 1, 2, 3]
        if order == "ab":
            assert [len(there) for _, there in launched] == [1, 2, 3, 4]  # each as soon as its gradient is there
        assert_right(module, order)


def test_a_parameter_without_gradient_is_named_in_the_next_step(model: Branches) -> None:
    replica = replica_of(model)
    step(model, "b")  # reaches no parameter of `a`
    assert replica.reducer.steps == 3
    with pytest.raises(Unfinished, match=r"a\.weight, a\.bias"):
        step(model)


def test_check_finished_counts_gradients_that_did_not_call(model: Branches) -> None:
    step(model, "b")
    with pytest.raises(Unfinished, match=r"a\.weight, a\.bias"):
        replica_of(model).check_finished()


def test_a_gradient_that_arrives_twice_is_an_error(model: Branches) -> None:
    with pytest.raises(ReadyTwice, match=r"a\.(weight|bias)"):
        step(model, "ab", again=True)


def test_what_arrives_under_no_sync_is_not_counted(model: Branches) -> None:
    replica = replica_of(model)
    model.zero_grad()
    for order in ("ab", "b", "b"):
        with replica.no_sync():
            model(X, order).square().sum().backward()
    model(X).square().sum().backward()
    assert replica.reducer.steps == 4
    assert not replica.reducer.intake.pop()


def test_a_backward_that_raised_has_failed_the_step(model: Branches) -> None:
    class Raised(Exception):
        pass

    def fail(_: Tensor) -> None:
        raise Raised

    def spoil(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(fail)

    handle = model.a.register_forward_hook(spoil)
    with pytest.raises(Raised):
        step(model)  # the gradients of `b` have arrived, without a call
    handle.remove()
    assert "Raised" in model._gradwire_replica.reducer.group.failure.reason  # type: ignore[union-attr]
    step(model)
    assert_right(model)


class _Result:
    """An output that only its user can look into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("wrap", "look", "few_call"),
    [(lambda t: {"a": [t], "b": None}, lambda found: found["a"][0], True), (_Result, lambda found: found.value, False)],
    ids=["nested", "hidden"],
)
def test_what_can_be_found_in_an_output(group: Group, wrap: Any, look: Any, few_call: bool) -> None:
    class Wrapped(Branches):
        def forward(self, x: Tensor, order: str = "ab") -> Any:
            return wrap(super().forward(x, order))

    module = Wrapped()
    replicate(module, group=group)
    for _ in range(6):
        module.zero_grad()
        look(module(X)).square().sum().backward()
        assert_right(module)
    assert (replica_of(module).reducer.intake._selected is not None) is few_call


def test_a_parameter_that_was_frozen_is_counted_again(group: Group) -> None:
    module = Branches()
    replicate(module, group=group)
    for _ in range(3):
        step(module)
    for p in module.parameters():
        p.requires_grad_(False)
    module(X.clone().requires_grad_()).sum().backward()  # trains what is before this model, as a discriminator does
    for p in module.parameters():
        p.requires_grad_(True)
    for _ in range(3):
        step(module)
        assert_right(module)


def test_a_backward_that_failed_before_anything_came_has_failed_the_step(model: Branches) -> None:
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


@pytest.mark.parametrize("keep", [True, False])
def test_averages_go_to_the_gradients_that_a_listener_puts_in_place(model: Branches, keep: bool) -> None:
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
    for _ in range(3 + 3):
        expected = _ALIASES[alias](module.before).clone()
        module.zero_grad()
        module().backward()
        assert torch.equal(module.weight.grad, expected)  # type: ignore[arg-type]
        module.before = module.weight.grad  # type: ignore[assignment]


def test_with_views_the_memory_of_gradients_is_free_once_their_bucket_is_filled(group: Group) -> None:
    """D4: gradients that live until backward ends, next to the buckets, would take as much memory as without views."""
    layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(6))
    alive: list[int] = []
    storages: list[StorageWeakRef] = []

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(in_backward(x, look))
            return x

    def look() -> None:
        alive.append(sum(not storage.expired() for storage in storages))

    module = Deep()
    replicate(module, group=group, buckets=Buckets((1,)), gradients=Gradients.VIEWS)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: storages.append(StorageWeakRef(p.grad.untyped_storage()))  # type: ignore[union-attr]
        )
    for _ in range(4):
        alive.clear()
        storages.clear()
        module.zero_grad()
        module(torch.ones(2, 16)).sum().backward()
    assert len(storages) == 6
    assert max(alive) <= 1  # the last gradient, unless its bucket has been filled
