"""Drives reductions against a group: one collective at once, several on a lane, in the same order on every rank."""

import contextlib
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from gradwire.collectives import ReduceOp, all_gather_into_tensor, all_reduce
from gradwire.errors import CollectiveTimeout, GroupAborted, HookError
from gradwire.groups import Group, Recording, ThreadGroup
from gradwire.hooks import BucketSpec, CommHook, Reduced, Reduction, Turn, mean
from gradwire.hooks.pump import pump
from gradwire.parallel import DistributedDataParallel as DDP
from gradwire.reducer.hook.driver import Driver, _OnLane
from gradwire.testing import run_ranks
from helpers.comm_hooks import Scripted

PATIENCE = 120.0


def spec(index: int, numel: int = 3) -> BucketSpec:
    return BucketSpec(index, (f"p{index}",), ((numel,),), ((1,),), torch.float32, torch.device("cpu"))


class Several(CommHook):
    """Three collectives a bucket; `pause(turn)` runs between them."""

    def __init__(self, pause: Callable[[Turn], None] = lambda turn: None) -> None:
        self.pause = pause

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        label = f"bucket {turn.spec.index}"
        self.pause(turn)
        everybody = torch.empty(turn.world_size * grad.numel())
        yield all_gather_into_tensor(everybody, grad, label=label)
        self.pause(turn)
        norm = grad.norm().reshape(1)
        yield all_reduce(norm, op=ReduceOp.MAX, label=label)
        self.pause(turn)
        value = grad.clone()
        yield all_reduce(value, op=ReduceOp.AVG, label=label)
        torch.testing.assert_close(value, everybody.view(turn.world_size, -1).mean(0))
        return Reduced(value, grad)


def launch(driver: Driver, hook: CommHook, value: float, index: int = 0) -> Any:
    group = driver.group
    return driver.launch(hook, torch.full((3,), value), None, Turn(spec(index), group.rank, group.size, donated=True))


@pytest.fixture
def alone() -> Any:
    """A driver of a group of one."""
    (group,) = ThreadGroup.world(1)
    driver = Driver(group)
    yield driver
    driver.close()
    group.close()


# -- one collective --------------------------------------------------------------------------------------------------------


def test_a_single_collective_is_submitted_at_launch_and_finished_by_the_waiter() -> None:
    a, b = ThreadGroup.world(2)
    first, second = launch(Driver(a), mean(), 1.0), launch(Driver(b), mean(), 3.0)  # one thread: neither waits
    assert first.wait().tolist() == second.wait().tolist() == [2.0, 2.0, 2.0]
    a.close(), b.close()


def test_what_follows_the_collective_runs_in_the_waiters_thread(alone: Driver) -> None:
    threads = []

    def script(grad: Tensor, state: Any, turn: Turn) -> Reduction:
        yield all_reduce(grad)
        threads.append(threading.current_thread())
        return Reduced(grad, grad)

    pending = launch(alone, Scripted(script, 1), 1.0)
    assert threads == []
    pending.wait()
    assert threads == [threading.current_thread()]


def second_one(grad: Tensor, state: Any, turn: Turn) -> Reduction:
    yield all_reduce(grad)
    yield all_reduce(grad)
    return Reduced(grad, grad)


def none_at_all(grad: Tensor, state: Any, turn: Turn) -> Reduction:
    return Reduced(grad, grad)
    yield


def no_result(grad: Tensor, state: Any, turn: Turn) -> Any:
    yield all_reduce(grad)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (second_one, "declares collectives = 1 but yielded a second one, all_reduce"),
        (none_at_all, "declares collectives = 1 but yielded none"),
        (no_result, r"on bucket 0 \(parameters p0\), rank 0, step 0: reduce\(\) returned NoneType"),
    ],
)
def test_a_hook_that_lies_is_a_hook_error(alone: Driver, script: Callable[..., Reduction], words: str) -> None:
    with pytest.raises(HookError, match=words) as caught:
        launch(alone, Scripted(script, 1), 1.0).wait()
    assert caught.value.hook == f"{script.__name__}()"


def test_a_hook_of_no_collective_is_done_at_once(alone: Driver) -> None:
    assert launch(alone, Scripted(none_at_all, 0), 2.0).wait().tolist() == [2.0, 2.0, 2.0]
    assert alone._lane.idle
    with pytest.raises(HookError, match="declares collectives = 0 but yielded all_reduce"):
        launch(alone, Scripted(second_one, 0), 1.0)


# -- several, on the lane ------------------------------------------------------------------------------------------------


def test_launch_does_not_wait_for_a_hook_of_several_collectives(alone: Driver) -> None:
    gate = threading.Event()
    pending = launch(alone, Several(lambda turn: gate.wait(PATIENCE) or None), 1.0)
    assert not pending._future.done()
    gate.set()
    assert pending.wait().tolist() == [1.0, 1.0, 1.0]


def test_buckets_keep_their_order_on_every_rank_whatever_the_timing() -> None:
    buckets = 5

    def rank_main(group: Group) -> list[str]:
        assert isinstance(group, Recording)
        rng = random.Random(group.rank)
        never = threading.Event()
        driver = Driver(group)
        hook = Several(lambda turn: never.wait(rng.random() * 0.004) and None)
        pending = [launch(driver, hook, float(group.rank + b), b) for b in range(buckets)]
        for b, reduction in enumerate(pending):
            assert reduction.wait().tolist() == [1.0 + b] * 3
        driver.close()
        return [signature.label for signature in group.submitted]

    orders = run_ranks(rank_main, 3, wrap=Recording)
    assert orders == [[f"bucket {b}" for b in range(buckets) for _ in range(3)]] * 3


def test_a_hook_that_raises_on_the_lane_raises_in_the_waiters_until_it_is_drained(alone: Driver) -> None:
    """Buckets behind it submit nothing: other ranks may still be at the one that has failed."""

    def pause(turn: Turn) -> None:
        if turn.spec.index == 0:
            raise KeyError("mine")

    first, second = launch(alone, Several(pause), 1.0, 0), launch(alone, Several(pause), 1.0, 1)
    with pytest.raises(KeyError, match="mine") as caught:
        first.wait()
    assert "on bucket 0 (parameters p0), rank 0" in caught.value.__notes__[0]
    third = launch(alone, mean(), 1.0, 1)
    for behind in (second, third):
        with pytest.raises(KeyError, match="mine"):
            behind.wait()
    alone.drain(PATIENCE)
    assert launch(alone, Several(pause), 1.0, 1).wait().tolist() == [1.0, 1.0, 1.0]


def test_an_exception_between_two_collectives_is_every_ranks_reason() -> None:
    """Also if more buckets, of other sizes and of another model, are behind it."""

    class Halves(CommHook):
        collectives = None

        def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
            yield all_reduce(grad[:1])
            if turn.rank == 1 and turn.spec.index == 0:
                raise KeyError("mine")
            yield all_reduce(grad[1:])
            return Reduced(grad, grad)

    def rank_main(group: Group) -> None:
        layers = [torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 6)) for _ in range(2)]
        models = [DDP(each, process_group=group, bucket_cap_mb=5e-5) for each in layers]
        for model in models:
            model.set_hook(Halves())
        error: type[Exception] = KeyError if group.rank == 1 else GroupAborted
        with pytest.raises(error, match="mine"):
            sum(model(torch.ones(2, 4)).sum() for model in models).backward()

    run_ranks(rank_main, 2)


def test_a_hook_that_computes_forever_is_given_up() -> None:
    (group,) = ThreadGroup.world(1, timeout=0.02)
    driver, gate = Driver(group), threading.Event()
    pending = launch(driver, Several(lambda turn: gate.wait(PATIENCE) or None), 1.0)
    with pytest.raises(CollectiveTimeout, match=r"bucket 0 .*on rank 0: the hook has not finished after") as caught:
        pending.wait()
    assert float(str(caught.value).split()[-2]) >= 0.2  # ten times the group's timeout, or more on a busy machine
    gate.set()
    driver.close()
    group.close()


def test_grad_mode_is_off_on_the_lane(alone: Driver) -> None:
    modes = []
    launch(alone, Several(lambda turn: modes.append(torch.is_grad_enabled())), 1.0).wait()
    assert modes == [False, False, False]


def test_a_result_of_the_lane_is_there_only_after_its_event_was_recorded(alone: Driver) -> None:
    """To wait for an event of CUDA that was not recorded yet does nothing."""
    started, early = threading.Event(), []

    class SideStream:
        value: Tensor

        @contextlib.contextmanager
        def here(self) -> Iterator[None]:
            assert started.wait(PATIENCE)
            yield
            early.append(pending._future.done())

        def wait(self) -> Tensor:
            return self.value

    turn, side = Turn(spec(0), 0, 1, donated=True), cast("Any", SideStream())
    pending = _OnLane(mean().reduce(torch.ones(3), None, turn), alone.group, alone._lane, turn, side)
    started.set()
    assert pending.wait().tolist() == [1.0, 1.0, 1.0]
    assert early == [False]


# -- failures and ends ---------------------------------------------------------------------------------------------------


def test_a_hook_may_catch_what_its_collective_failed_with() -> None:
    (group,) = ThreadGroup.world(1)
    caught = []

    def careful(grad: Tensor, state: Any, turn: Turn) -> Reduction:
        try:
            yield all_reduce(grad)
        except GroupAborted as error:
            caught.append(error)
        return Reduced(grad, grad)

    group.abort("for the test")
    result = pump(careful(torch.ones(1), None, Turn(spec(0), 0, 1)), lambda op: group.submit(op).wait())
    assert result.value.item() == 1.0
    assert len(caught) == 1
    group.close()


def test_drain_outlasts_what_is_on_the_lane(alone: Driver) -> None:
    gate, ended = threading.Event(), []

    def pause(turn: Turn) -> None:
        gate.wait(PATIENCE)
        ended.append(turn.spec.index)

    for b in range(2):
        launch(alone, Several(pause), 1.0, b)
    with pytest.raises(CollectiveTimeout, match="still at work after 0.01 s"):
        alone.drain(0.01)
    assert ended == []
    gate.set()
    alone.drain(PATIENCE)
    assert ended == [0, 0, 0, 1, 1, 1]


def test_a_driver_that_is_dropped_ends_its_thread() -> None:
    (group,) = ThreadGroup.world(1)
    driver = Driver(group)
    launch(driver, Several(), 1.0).wait()
    weak = weakref.ref(driver)
    del driver
    assert weak() is None
    group.close()  # and the fixture around every test looks for the lane's thread
