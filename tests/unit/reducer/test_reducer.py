"""The performer, with a launcher of the test's own: when gradients are touched, when buckets are rebuilt, what a failure leaves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire.errors import GroupAborted
from gradwire.groups import Group, ThreadGroup
from gradwire.hooks import GradBucket
from gradwire.reducer import BucketLayout, ParameterSpec, Reducer, ReducerOptions
from gradwire.reducer.machine import State


class Launcher:
    """Notes what is launched; `answer(bucket)` is what waiting for it gives."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, ...]] = []
        self.waited: list[int] = []
        self.verify: Callable[[int], Exception | None] = lambda step: None
        self.rebuilt = 0
        self.answer: Callable[[GradBucket], Tensor] = lambda bucket: bucket.buffer()

    def start(self, bucket: GradBucket) -> Any:
        self.launched.append(tuple(map(int, bucket.names())))
        launcher = self

        class Pending:
            def wait(self) -> Tensor:
                launcher.waited.append(bucket.index())
                return launcher.answer(bucket)

        return Pending()

    def drop_step(self) -> None:
        pass

    def buckets_changed(self) -> None:
        self.rebuilt += 1


class World:
    """Four parameters of four bytes each, in two buckets, on a group of one."""

    def __init__(self, group: Group, **named: Any) -> None:
        self.group = group
        self.parameters = [nn.Parameter(torch.full((1,), float(i + 1))) for i in range(4)]
        self.launcher = Launcher()
        specs = [ParameterSpec.of(str(i), p) for i, p in enumerate(self.parameters)]
        self.reducer = Reducer(
            self.parameters,
            BucketLayout.make(specs, [[3, 2], [1, 0]]),
            group=group,
            runner=self.launcher,
            options=ReducerOptions(**{"limits": (8,)} | named),
        )
        self.reducer.attach()

    def backward(self, order: str = "3210") -> None:
        """Gradients 1, 2, 4, 8 times two, in this order: a chain of products would hide it, so one backward each."""
        for i in order:
            (self.parameters[int(i)] * 2 ** int(i)).sum().backward()

    def gradients(self) -> list[float | None]:
        return [None if p.grad is None else p.grad.item() for p in self.parameters]


@pytest.fixture
def make() -> Any:
    (group,) = ThreadGroup.world(1, timeout=20)
    yield lambda **named: World(group, **named)
    group.close()


def test_buckets_are_launched_as_they_fill_and_waited_for_at_the_end(make: Any) -> None:
    world = make()
    world.reducer.prepare()
    world.backward("32")
    assert world.launcher.launched == [(3, 2)]
    assert world.launcher.waited == []
    world.backward("01")
    assert world.launcher.launched == [(3, 2), (1, 0)]
    assert world.launcher.waited == [0, 1]
    assert world.reducer.machine.state is State.RESTING


def test_the_result_becomes_the_gradient_whatever_tensor_it_came_in(make: Any) -> None:
    for views in (False, True):
        world = make(keep_views=views)
        world.launcher.answer = lambda bucket: bucket.buffer() * 10
        world.reducer.prepare()
        world.backward()
        assert world.gradients() == [10.0, 20.0, 40.0, 80.0]


def test_no_gradient_is_touched_before_all_results_are_there(make: Any) -> None:
    world = make()

    def second_fails(bucket: GradBucket) -> Tensor:
        if bucket.index() == 1:
            raise KeyError("the second")
        return bucket.buffer() * 10

    world.launcher.answer = second_fails
    world.reducer.prepare()
    with pytest.raises(KeyError, match="the second"):
        world.backward()
    assert world.gradients() == [1.0, 2.0, 4.0, 8.0]


def test_checks_come_after_all_results_and_before_any_gradient(make: Any) -> None:
    world = make()
    seen: list[Any] = []
    world.launcher.answer = lambda bucket: bucket.buffer() * 10
    world.reducer.prepare()
    world.launcher.verify = lambda step: seen.append((step, list(world.launcher.waited), world.gradients()))
    world.backward()
    assert seen == [(0, [0, 1], [1.0, 2.0, 4.0, 8.0])]


def test_an_error_that_verify_returns_is_raised_before_any_gradient_is_written(make: Any) -> None:
    world = make()
    world.launcher.verify = lambda step: ValueError(f"step {step}")
    world.launcher.answer = lambda bucket: bucket.buffer() * 10
    world.reducer.prepare()
    with pytest.raises(ValueError, match="step 0"):
        world.backward()
    assert world.gradients() == [1.0, 2.0, 4.0, 8.0]


def test_a_failure_aborts_the_group_and_the_step(make: Any) -> None:
    world = make()
    world.launcher.answer = lambda bucket: bucket.buffer()[5]  # an IndexError
    world.reducer.prepare()
    with pytest.raises(IndexError):
        world.backward()
    assert isinstance(world.group.failure, GroupAborted)
    assert "step 0 failed on rank 0 with IndexError" in world.group.failure.reason
    assert world.reducer.machine.state is State.RESTING
    assert "IndexError" in world.reducer.iterations.last_error
    with pytest.raises(GroupAborted, match="IndexError"):  # nor is a second backward reduced
        world.backward("3")
    assert len(world.launcher.launched) == 2


def test_buckets_are_rebuilt_once_in_the_order_of_arrival(make: Any) -> None:
    world = make()
    assert not world.reducer.rebuild()
    world.reducer.prepare()
    world.backward("0312")
    assert world.reducer.rebuild()
    assert world.reducer.layout.members == ((0, 3), (1, 2))
    assert world.launcher.rebuilt == 1
    assert not world.reducer.rebuild()
    world.reducer.prepare()
    world.backward("3210")
    assert world.launcher.launched[2:] == [(0, 3), (1, 2)]
    assert world.reducer.order.last_arrival == [3, 2, 1, 0]


def test_buckets_are_not_rebuilt_where_parameters_may_be_unused(make: Any) -> None:
    world = make(track_unused=True)
    world.reducer.prepare()
    world.backward()
    assert not world.reducer.rebuild()


def test_a_backward_that_raises_after_its_last_gradient_fails_the_step_before_the_last_bucket_is_launched(
    make: Any,
) -> None:
    world = make()
    world.reducer.prepare()

    def explode(_: Tensor) -> None:
        raise KeyError("late")

    x = torch.ones(1, requires_grad=True)
    x.register_hook(explode)
    product = x * 1.0  # reached after all parameters, which are nearer to the loss
    for p in world.parameters:
        product = product + p
    with pytest.raises(KeyError, match="late"):
        product.sum().backward()
    assert world.reducer.machine.state is State.RESTING
    assert world.group.failure.reason == "step 0 failed on rank 0 with KeyError: 'late'"
    assert len(world.launcher.launched) == 1


def test_starting_over_goes_back_to_the_first_buckets(make: Any) -> None:
    world = make()
    world.reducer.prepare()
    world.backward("0312")
    world.reducer.rebuild()
    world.reducer.prepare()
    world.backward("03")
    world.reducer.start_over()
    assert world.reducer.machine.state is State.RESTING
    assert world.reducer.layout.members == ((3, 2), (1, 0))
    assert not world.reducer.order.rebuilt
    world.launcher.launched.clear()
    world.reducer.prepare()
    world.backward("1230")
    assert world.launcher.launched == [(3, 2), (1, 0)]
    assert world.reducer.rebuild()
    assert world.reducer.layout.members == ((1, 2), (3, 0))


def test_a_static_graph_is_reduced_at_the_end_of_its_first_backward(make: Any) -> None:
    world = make()
    world.reducer.learn_static_graph()
    world.reducer.prepare()
    loss = sum(p * p for p in world.parameters[1:])  # 0 is unused
    assert isinstance(loss, Tensor)
    loss.sum().backward()
    assert world.launcher.launched == [(3, 2), (1, 0)]
    assert world.gradients() == [None, 4.0, 6.0, 8.0]
    assert world.reducer.machine.static_uses == [0, 1, 1, 1]
    world.reducer.prepare()
    world.backward("321")
    assert len(world.launcher.launched) == 4
    assert world.gradients()[0] is None


def test_a_first_static_backward_that_fails_is_recorded_again(make: Any) -> None:
    world = make()
    world.reducer.learn_static_graph()
    world.reducer.prepare()
    handle = world.parameters[0].register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sum(world.parameters).sum().backward()  # type: ignore[union-attr]
    handle.remove()
    world.group.recover()
    world.reducer.start_over()
    world.reducer.prepare()
    sum(world.parameters).sum().backward()  # type: ignore[union-attr]
    assert world.launcher.launched == [(3, 2), (1, 0)]
    assert world.reducer.machine.static_uses == [1, 1, 1, 1]


def test_buckets_for_which_there_was_no_memory_are_built_the_next_time(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    world.reducer.prepare()
    world.backward("0312")

    def out_of_memory(*args: Any, **kwargs: Any) -> Tensor:
        raise MemoryError("once")

    with monkeypatch.context() as patched:
        patched.setattr(world.group, "allocate", out_of_memory)
        with pytest.raises(MemoryError):
            world.reducer.rebuild()
    assert world.reducer.rebuild()
    assert world.reducer.layout.members == ((0, 3), (1, 2))
    world.reducer.prepare()
    world.backward("0312")
    assert world.reducer.steps == 2
