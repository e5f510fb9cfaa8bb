"""Hooks on a model: what register_comm_hook takes and refuses, set_hook, states through rebuilds, the scale check."""

import copy
import functools
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from gradwire.collectives import ReduceOp, all_reduce
from gradwire.errors import HookError, UsageError, UsageTypeError
from gradwire.groups import Group, Recording, ThreadGroup
from gradwire.hooks import BucketSpec, CommHook, GradBucket, Reduced, Reduction, Turn, cast, chain, mean
from gradwire.parallel import DistributedDataParallel as DDP, replicate
from gradwire.policies import Buckets, ScaleCheck
from gradwire.reducer.hook.torch_hooks import check_torch_hook
from gradwire.testing import run_ranks
from helpers.comm_hooks import CountsSteps, Scripted
from helpers.futures import done
from helpers.models import inputs, mlp
from helpers.rank_tests import on_ranks

SMALL = 0.0001


@pytest.fixture
def ddp() -> Any:
    """A model on a group of one."""
    (group,) = ThreadGroup.world(1, timeout=20)
    yield DDP(mlp(), process_group=group, bucket_cap_mb=SMALL)
    group.close()


def plain(state: Any, bucket: Any) -> Any:
    state.append(bucket.index())
    return done(bucket.buffer() * 2)


def annotated_as_torchs(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return plain(state, bucket)


def annotated_as_ours(state: object, bucket: GradBucket) -> Future[Tensor]:
    return plain(state, bucket)


class Callable_:
    def __call__(self, state: Any, bucket: Any) -> Any:
        return plain(state, bucket)

    def method(self, state: Any, bucket: Any) -> Any:
        return plain(state, bucket)


TAKEN: dict[str, Any] = {
    "function": plain,
    "annotated as torch's": annotated_as_torchs,
    "annotated as ours": annotated_as_ours,
    "other names": lambda memory, b: plain(memory, b),
    "partial": functools.partial(lambda extra, state, bucket: plain(state, bucket), 3),
    "lambda": lambda state, bucket: plain(state, bucket),
    "callable object": Callable_(),
    "bound method": Callable_().method,
    "any number of arguments": lambda *args: plain(*args),
}


@pytest.mark.parametrize("name", TAKEN)
def test_any_callable_is_a_hook_and_is_called_once_per_bucket(ddp: DDP, name: str) -> None:
    state: list[int] = []
    ddp.register_comm_hook(state, TAKEN[name])
    alone = copy.deepcopy(ddp.module)
    alone(inputs(0)).sum().backward()
    with ddp.no_sync():
        ddp(inputs(0)).sum().backward()
    assert state == []
    ddp.zero_grad()
    ddp(inputs(0)).sum().backward()
    assert state == [0]
    ddp(inputs(0)).sum().backward()
    assert state == [0, 0, 1, 2, 3][: 1 + len(ddp.replica.reducer.layout.members)]
    assert len(ddp.replica.reducer.layout.members) > 1
    ddp.zero_grad()
    ddp(inputs(0)).sum().backward()
    for p, q in zip(ddp.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, 2 * q.grad)  # type: ignore[operator]


@on_ranks(2)
def test_the_hook_runs_with_grad_mode_off_on_an_undivided_buffer_with_its_state(group: Group) -> None:
    ddp = DDP(nn.Linear(4, 2), process_group=group)
    ddp(inputs(0)).sum().backward()
    state, seen = object(), []

    def hook(s: Any, bucket: GradBucket) -> Future[Tensor]:
        seen.append((s is state, torch.is_grad_enabled(), bucket.is_last(), bucket.names(), bucket.buffer().clone()))
        return done(bucket.buffer())

    ddp.register_comm_hook(state, hook)
    ddp.zero_grad()
    ddp(torch.ones(1, 4)).sum().backward()
    ((same, grad_mode, last, names, buffer),) = seen
    assert (same, grad_mode, last, sorted(names)) == (True, False, True, ["bias", "weight"])
    assert buffer.tolist() == [1.0] * 10


def test_futures_of_every_kind(ddp: DDP) -> None:
    def later(bucket: Any) -> Future[Any]:
        future: Future[Any] = Future()
        threading.Thread(target=lambda: future.set_result(bucket.buffer() * 3)).start()
        return future

    ways: list[Callable[[Any], Future[Any]]] = [
        lambda b: done(b.buffer() * 3),
        later,
        lambda b: later(b).then(lambda f: f.value()),
        lambda b: done(None).then(lambda _: b.buffer() * 3),
        lambda b: ddp.group.all_reduce(b.buffer(), async_op=True).get_future().then(lambda f: f.value()[0] * 3),
        lambda b: torch.futures.collect_all([later(b)]).then(lambda f: f.value()[0].value()),
    ]
    way: list[Any] = []
    ddp.register_comm_hook(None, lambda state, bucket: way[0](bucket))
    alone = copy.deepcopy(ddp.module)
    alone(inputs(0)).sum().backward()
    for one in ways:
        way[:] = [one]
        ddp.zero_grad()
        ddp(inputs(0)).sum().backward()
        torch.testing.assert_close(ddp.module[0].weight.grad, 3 * alone[0].weight.grad)


def test_a_bucket_may_be_kept_and_its_buffer_exchanged(ddp: DDP) -> None:
    kept: list[GradBucket] = []

    def hook(state: Any, bucket: GradBucket) -> Future[Tensor]:
        bucket.set_buffer(bucket.buffer().to(torch.float16))
        kept.append(bucket)
        return done(bucket.buffer())

    ddp.register_comm_hook(None, hook)
    ddp(inputs(0)).sum().backward()
    assert kept[0].gradients()[0].dtype == torch.float16
    assert kept[0].parameters()[0] is ddp.module[0].weight
    assert ddp.module[0].weight.grad.dtype == torch.float32


def bad_bucket(state: Any, bucket: int) -> Any: ...


def bad_return(state: Any, bucket: Any) -> int: ...


def bad_second(state: Any, b: list[int]) -> Any: ...


@pytest.mark.parametrize(
    ("hook", "error", "words"),
    [
        (3, UsageTypeError, "Communication hook must be callable."),
        (None, TypeError, "Communication hook must be callable."),
        ("mean", TypeError, "Communication hook must be callable."),
        (bad_bucket, ValueError, "bucket annotation should be dist.GradBucket."),
        (bad_second, UsageError, "bucket annotation should be dist.GradBucket."),
        (bad_return, ValueError, r"return annotation should be torch.futures.Future\[torch.Tensor\]."),
    ],
)
def test_what_is_no_hook_is_refused_in_torchs_words(ddp: DDP, hook: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ddp.register_comm_hook(None, hook)
    assert ddp.replica.runner.torch_hook is None
    ddp.register_comm_hook(None, mean())  # and the place is still free


def test_annotations_of_the_other_kind_are_seen_too(ddp: DDP) -> None:
    """This module's annotations are text; a module without the future import has the objects."""

    def hook(state, bucket): ...
    def keyword_only(*state_and_bucket, scale: float = 1.0): ...

    check_torch_hook(keyword_only)
    hook.__annotations__ = {"bucket": int}
    with pytest.raises(ValueError, match="bucket annotation"):
        ddp.register_comm_hook(None, hook)
    hook.__annotations__ = {"return": Tensor}
    with pytest.raises(ValueError, match="return annotation"):
        ddp.register_comm_hook(None, hook)
    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    ddp.register_comm_hook(None, hook)


def test_a_second_registration_changes_nothing(ddp: DDP) -> None:
    first: list[int] = []
    ddp.register_comm_hook(first, plain)
    for again in (plain, mean()):
        with pytest.raises(HookError, match=r"can only be called once\.") as caught:
            ddp.register_comm_hook([], again)
        assert isinstance(caught.value, RuntimeError)
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    ddp(inputs(0)).sum().backward()
    assert first == [0]
    assert ddp._get_ddp_logging_data()["comm_hook"] == "plain"


def test_a_state_is_freed_with_the_model(group: Group) -> None:
    class State:
        pass

    model = DDP(mlp(), process_group=group)
    state = State()
    model.register_comm_hook(state, lambda s, bucket: done(bucket.buffer()))
    model(inputs(0)).sum().backward()
    weak = weakref.ref(state)
    del state
    assert weak() is not None
    del model
    assert weak() is None


def doubles(grad: Tensor, state: Any, turn: Turn) -> Reduction:
    """Twice the mean, so that it can be distinguished from others."""
    yield all_reduce(grad, op=ReduceOp.AVG)
    return Reduced(grad * 2, grad)


def test_hooks_are_swapped_between_steps() -> None:
    def rank_main(group: Group) -> list[float]:
        ddp = DDP(nn.Linear(4, 2), process_group=group)
        grads = []
        for hook in (None, Scripted(doubles, 1), chain(cast(torch.bfloat16), mean()), Scripted(doubles, 1), mean()):
            if hook is not None:
                ddp.set_hook(hook)
            ddp.zero_grad()
            ddp(torch.full((1, 4), group.rank + 1.0)).sum().backward()
            grads.append(ddp.module.weight.grad[0, 0].item())
        return grads

    assert run_ranks(rank_main, 3) == [[2.0, 4.0, 2.0, 4.0, 2.0]] * 3


def test_set_hook_replaces_a_registered_hook_of_either_kind(ddp: DDP) -> None:
    ddp.register_comm_hook([], plain)
    ddp(torch.ones(1, 4)).sum().backward()
    ddp.set_hook(mean())
    ddp.zero_grad()
    ddp(torch.ones(1, 4)).sum().backward()
    assert ddp.module[2].bias.grad.tolist() == [1.0, 1.0]
    assert ddp._get_ddp_logging_data()["comm_hook"] == "mean()"


def test_a_disagreement_is_reported_to_every_rank_and_changes_nothing() -> None:
    def rank_main(group: Group) -> str:
        ddp = DDP(nn.Linear(4, 2), process_group=group)
        with pytest.raises(HookError) as caught:
            ddp.set_hook(Scripted(doubles, 1) if group.rank == 1 else chain(cast(torch.bfloat16), mean()))
        ddp(torch.full((1, 4), group.rank + 1.0)).sum().backward()
        assert ddp.module.weight.grad[0, 0].item() == 2.0
        return str(caught.value)

    said = run_ranks(rank_main, 3)
    assert "set_hook(doubles()) at step 0 on rank 1: ranks [0, 2] set a different hook" in said[1]
    assert "on rank 0: ranks [1] set a different hook" in said[0]


def test_set_hook_during_backward_is_refused(ddp: DDP) -> None:
    said: list[HookError] = []

    def interfere(_: Any) -> None:
        try:
            ddp.set_hook(mean())
        except HookError as error:
            said.append(error)

    ddp.module[0].weight.register_hook(interfere)
    ddp(inputs(0)).sum().backward()
    assert "during backward. Call it between steps." in str(said[0])


class Remembers(CountsSteps):
    """Every state is as old as the step, and of the bucket's parameters."""

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        assert set(state.values()) == {turn.step}, (state, turn.step)
        assert set(state) == set(turn.spec.names)
        return (yield from super().reduce(grad, state, turn))

    def load(self, saved: Any, spec: BucketSpec) -> dict[str, int]:
        return {name: saved[name] for name in spec.names}


def test_states_follow_their_parameters_when_buckets_are_rebuilt(ddp: DDP) -> None:
    ddp.register_comm_hook(None, Remembers())
    for _ in range(4):
        ddp(inputs(0)).sum().backward()
    assert len(ddp.replica.reducer.layout.members) > 1


def test_a_hook_registered_after_some_steps_starts_with_states_of_its_own(ddp: DDP) -> None:
    for _ in range(3):
        ddp(inputs(0)).sum().backward()
    ddp.register_comm_hook(None, Remembers())
    for _ in range(2):
        ddp(inputs(0)).sum().backward()
    assert ddp.replica.reducer.steps == 5


def sums(grad: Tensor, state: Any, turn: Turn) -> Reduction:
    """Forgets to divide."""
    yield all_reduce(grad, op=ReduceOp.SUM)
    return Reduced(grad, grad)


class Slow(CommHook):
    """The mean, in several collectives on the lane."""

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        threading.Event().wait(0.001 * turn.rank)
        yield all_reduce(torch.zeros(3))
        return (yield from mean().reduce(grad, state, turn))


with torch.random.fork_rng():
    torch.manual_seed(0)
    SEEDED = mlp()
    """The same in every run: if a projection happens to cancel, the check correctly does not raise."""


def scaled(group: Group, hook: CommHook, check: ScaleCheck | None, steps: int = 3) -> None:
    model = copy.deepcopy(SEEDED)
    replica = replicate(model, group=group, hook=hook, scale_check=check, buckets=Buckets((100,)))
    try:
        for step in range(steps):
            model.zero_grad()
            model(inputs(group.rank, step).abs()).sum().backward()
    finally:
        replica.detach()


@pytest.mark.parametrize("hook", [mean(), chain(cast(torch.bfloat16), mean()), Slow()], ids=repr)
def test_a_right_hook_passes_the_scale_check(hook: CommHook) -> None:
    run_ranks(lambda group: scaled(group, hook, ScaleCheck(tolerance=0.05)), 3)


def test_a_sum_is_caught_and_named_on_every_rank() -> None:
    def rank_main(group: Group) -> str:
        with pytest.raises(HookError) as caught:
            scaled(group, Scripted(sums, 1), ScaleCheck())
        assert caught.value.hook == "sums()"
        return str(caught.value)

    for rank, said in enumerate(run_ranks(rank_main, 3)):
        assert (
            f"scale check of hook sums() on bucket 0 (parameters 0.weight, 0.bias, 2.weight, 2.bias), rank {rank}"
            in said
        )
        assert (
            "the result is 3 times the mean over 3 ranks. It looks like a sum: divide by the number of ranks." in said
        )


@on_ranks(3)
def test_a_wrong_result_does_not_reach_the_gradients(group: Group) -> None:
    model = nn.Linear(4, 2)
    replica = replicate(model, group=group, hook=Scripted(doubles, 1), scale_check=ScaleCheck())
    with pytest.raises(HookError, match="the result is 2 times the mean"):
        model(torch.ones(1, 4)).sum().backward()
    replica.detach()


def test_it_is_done_every_so_many_steps_and_costs_three_numbers() -> None:
    def rank_main(group: Group) -> list[int]:
        assert isinstance(group, Recording)
        scaled(group, mean(), ScaleCheck(every=2), steps=4)
        return [info.bytes for info in group.finished if info.label.startswith("scale check")]

    for sizes in run_ranks(rank_main, 2, wrap=Recording):
        assert sizes == [24] * 3  # one bucket in the first step, two in the third


@on_ranks(2)
def test_torchs_hooks_are_checked_too(group: Group) -> None:
    ddp = DDP(copy.deepcopy(SEEDED), process_group=group)
    ddp.replica.runner.scale_check = ScaleCheck()

    def summing(state: Any, bucket: Any) -> Any:
        return group.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])

    ddp.register_comm_hook(None, summing)
    with pytest.raises(HookError, match=r"hook .*summing on bucket 0 .*It looks like a sum"):
        ddp(inputs(group.rank).abs()).sum().backward()


def test_a_weighted_mean_is_measured_by_its_weights() -> None:
    from gradwire.hooks import weighted_mean

    def rank_main(group: Group) -> None:
        ddp = DDP(copy.deepcopy(SEEDED), process_group=group)
        ddp.replica.runner.scale_check = ScaleCheck(tolerance=0.05)
        ddp.register_comm_hook(None, weighted_mean())
        for step in range(3):
            ddp.set_weight(1 + 9 * group.rank)
            ddp(inputs(group.rank, step)).pow(2).sum().backward()

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("kind", ["mean", "torch's", "weighted_mean"])
def test_a_weight_that_has_no_effect_is_a_warning(group: Group, kind: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    from gradwire.hooks import weighted_mean

    model = DDP(mlp(), process_group=group)
    if kind == "torch's":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    if kind == "weighted_mean":
        model.set_hook(chain(cast(torch.bfloat16), weighted_mean()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.set_weight(3)
    texts = [str(warning.message) for warning in caught]
    if kind == "weighted_mean":
        assert texts == []
    else:
        (text,) = texts
        assert "set_weight(3) has no effect with the hook " + {"mean": "mean()"}.get(kind, "allreduce_hook") in text
        assert "model.set_hook(gw.hooks.weighted_mean())" in text


def test_a_hook_of_torch_without_a_process_group_says_which_to_pass(group: Group) -> None:
    """torch's hooks take None for the default process group, which there is not under gw.init()."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = DDP(mlp(), process_group=group)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with pytest.raises(AttributeError) as caught:
        model(inputs(0)).sum().backward()
    assert "register_comm_hook(gw.as_process_group(group), hook)" in caught.value.__notes__[-1]


class Raising(CommHook):
    """Averages, and raises an exception of its own in one place in step 1. In a reduction: see faults/test_comm_hooks.py."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.steps = 0

    def _reach(self, place: str) -> None:
        if self.place == place and self.steps == 1:
            raise LookupError("mine")

    def init(self, spec: BucketSpec) -> None:
        self._reach("init")

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        self.steps = turn.step
        self._reach("a function that is not a generator")
        return mean().reduce(grad, state, turn)


@pytest.mark.parametrize("place", ["a function that is not a generator", "init"])
def test_an_exception_of_the_hooks_own_names_hook_bucket_and_step(place: str) -> None:
    (group,) = ThreadGroup.world(1)
    with group:
        model = DDP(nn.Linear(2, 1), process_group=group)
        model.set_hook(hook := Raising(place))
        model(torch.ones(1, 2)).sum().backward()
        if place == "init":  # of the state that a new hook begins with
            hook.steps = 1
            model.set_hook(hook)
        with pytest.raises(LookupError) as caught:
            model(torch.ones(1, 2)).sum().backward()
        assert caught.value.__notes__[0] == (
            f"raised by communication hook {hook} on bucket 0 (parameters bias, weight), rank 0, step 1"
        )
