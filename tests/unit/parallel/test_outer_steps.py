"""Hooks with outer steps on a model: attached to the optimizer, counted by its steps, saved, and an error when forgotten."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire import hooks
from gradwire.collectives import Layout, ReduceOp, all_reduce
from gradwire.errors import GroupAborted, HookError, UsageError, UsageTypeError
from gradwire.groups import Group, HierarchicalGroup, Recording
from gradwire.hooks import cast, chain, diloco, error_feedback, gossip, local_sgd, mean, streaming_diloco
from gradwire.interop import as_torch_hook
from gradwire.parallel import DistributedDataParallel as DDP, replicate
from gradwire.policies import ScaleCheck
from gradwire.testing import run_ranks
from helpers.buckets import TorchBucket
from helpers.models import descend
from helpers.outer_training import NET, flat, loss_on, train
from helpers.rank_tests import on_ranks
from helpers.through_file import through_file

HOOKS: dict[str, hooks.CommHook] = {
    "mean": mean(),
    "local_sgd": local_sgd(every=4),
    "post_local_sgd": hooks.post_local_sgd(start=5, every=4),
    "diloco": diloco(every=5),
    "diloco, compressed": diloco(every=5, hook=chain(error_feedback(), cast(torch.bfloat16), mean())),
    "streaming": streaming_diloco(every=4, fragments=2),
    "streaming, delayed": streaming_diloco(every=4, fragments=4, delay=2, alpha=0.5),
    "ring": gossip(),
    "random": gossip(topology="random", every=2),
}


@pytest.mark.parametrize("name", HOOKS)
def test_training_converges(name: str) -> None:
    def rank_main(group: Group) -> tuple[float, Tensor]:
        model, _ = train(group, HOOKS[name], 25)
        with torch.no_grad():
            return loss_on(model, 99, 0).item(), flat(model)

    results = run_ranks(rank_main, 4)
    with torch.no_grad():
        before = loss_on(NET, 99, 0).item()
    assert all(loss < 0.2 * before for loss, _ in results)


@pytest.mark.parametrize("name", HOOKS)
def test_what_is_equal_when(name: str) -> None:
    """Ranks hold the same bits after an outer step, and between two they do not; average_parameters makes them equal."""
    hook = HOOKS[name]

    def rank_main(group: Group) -> list[Tensor]:
        kept: list[Any] = []
        model, seen = train(group, hook, 14, ready=lambda replica, _: kept.append(replica))
        kept[0].average_parameters()
        return [*seen, flat(model)]

    ranks = run_ranks(rank_main, 3)
    equal = [all(torch.equal(other[step], ranks[0][step]) for other in ranks[1:]) for step in range(15)]
    assert equal[-1]
    equal = equal[:-1]
    steps = range(1, 15)
    if name in ("local_sgd", "diloco", "diloco, compressed"):
        assert equal == [bool(hook.due(step)) for step in steps]  # type: ignore[attr-defined]
    elif name == "post_local_sgd":
        assert equal == [step <= 5 or bool(hook.due(step)) for step in steps]  # type: ignore[attr-defined]
    else:
        assert equal == [name == "mean"] * 14


def test_local_sgd_in_every_step_is_averaging_gradients() -> None:
    def rank_main(group: Group) -> list[Tensor]:
        chosen = [
            mean(),
            local_sgd(every=1),
            diloco(every=1, outer_lr=1.0, outer_momentum=0.0),
            hooks.post_local_sgd(start=3, every=1),
        ]
        return [train(group, hook, 8)[1][-1] for hook in chosen]

    for dense, *others in run_ranks(rank_main, 3):
        for other in others:
            torch.testing.assert_close(other, dense)


@on_ranks(2)
def test_the_wire_carries_parameters_when_it_is_time_and_nothing_else(group: Group) -> None:
    numel = flat(NET).numel()
    for hook, expected in (
        (local_sgd(every=4), [(numel, "float32")] * 2),
        (diloco(every=8, hook=chain(cast(torch.bfloat16), mean())), [(numel, "bfloat16")]),
        (local_sgd(every=9), []),
    ):
        recorded, before = Recording(group), 0

        def ready(*_: Any, recorded: Recording = recorded) -> None:
            nonlocal before
            before = len(recorded.submitted)

        train(recorded, hook, 8, ready=ready)
        ops = [op for op in recorded.submitted[before:] if op.label != "bucket order"]
        assert [(op.shapes[0][0], op.dtypes[0]) for op in ops] == expected


def test_fragments_travel_in_turn_and_land_later() -> None:
    """Each fragment is sent every fourth step; one step later all ranks have the same parameters there."""

    def rank_main(group: Group) -> list[Tensor]:
        hook = streaming_diloco(every=4, fragments=2, delay=1, outer_lr=1.0, outer_momentum=0.0)
        return train(group, hook, 12)[1]

    a, b = run_ranks(rank_main, 2)
    names = [n for n, _ in NET.named_parameters()]
    sizes = [p.numel() for p in NET.parameters()]
    equal = [
        {n for n, x, y in zip(names, p.split(sizes), q.split(sizes), strict=True) if torch.equal(x, y)}
        for p, q in zip(a, b, strict=True)
    ]
    # Fragment 1 is sent after steps 2, 6, 10 and fragment 0 after 4, 8, 12: both land one later. The middle of the model lies
    # in its first weight.
    second = {"0.bias", "2.weight", "2.bias"}
    first = set(names) - second
    expected = {3: second, 5: first, 7: second, 9: first, 11: second}
    assert equal == [expected.get(step, set()) for step in range(1, 13)]


def test_accumulated_gradients_count_as_one_step() -> None:
    def rank_main(group: Group) -> list[bool]:
        model = copy.deepcopy(NET)
        ddp = DDP(model, process_group=group, bucket_cap_mb=0.001)
        ddp.set_hook(local_sgd(every=2))
        optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
        ddp.attach_optimizer(optimizer)
        equal = []
        for step in range(4):
            optimizer.zero_grad()
            with ddp.no_sync():
                for part in range(3):
                    loss_on(ddp, group.rank, 10 * step + part).backward()
            loss_on(ddp, group.rank, 10 * step + 3).backward()
            optimizer.step()
            low, high = flat(model), flat(model)
            group.all_reduce(low, ReduceOp.MIN)
            group.all_reduce(high, ReduceOp.MAX)
            equal.append(torch.equal(low, high))
        return equal

    assert run_ranks(rank_main, 2) == [[False, True, False, True]] * 2


def test_several_optimizers_make_one_step_together() -> None:
    def rank_main(group: Group) -> list[int]:
        model = copy.deepcopy(NET)
        replica = replicate(model, group=group, hook=local_sgd(every=1))
        pair = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
        replica.attach_optimizer(*pair)
        steps = []
        for step in range(3):
            loss_on(model, group.rank, step).backward()
            for optimizer in pair:
                optimizer.step()
                assert replica.runner.outer is not None
                steps.append(replica.runner.outer.step)
        replica.detach()
        loss_on(model, group.rank, 5).backward()
        pair[0].step(), pair[1].step()  # detached: these steps do not count
        assert replica.runner.outer.step == 3
        return steps

    assert run_ranks(rank_main, 2) == [[0, 1, 1, 2, 2, 3]] * 2


# -- forgetting it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3])
def test_a_forgotten_optimizer_is_an_error_when_an_outer_step_was_due(every: int) -> None:
    def rank_main(group: Group) -> int:
        model = copy.deepcopy(NET)
        replicate(model, group=group, hook=local_sgd(every=every))
        for step in range(every + 1):
            if step == every:
                with pytest.raises(
                    UsageError,
                    match=rf"local_sgd\(every={every}\) on rank {group.rank}: an outer step was due after step {every}.*"
                    r"model\.attach_optimizer\(optimizer\) once",
                ):
                    loss_on(model, group.rank, step).backward()
                return step
            loss_on(model, group.rank, step).backward()
        return -1

    assert run_ranks(rank_main, 1) == [every]


def test_steps_can_be_counted_by_hand() -> None:
    def rank_main(group: Group) -> list[bool]:
        model = copy.deepcopy(NET)
        replica = replicate(model, group=group, hook=local_sgd(every=2))
        replica.attach_optimizer()
        for step in range(4):
            model.zero_grad()
            for part in range(2):  # synchronized needlessly: still one step
                loss_on(model, group.rank, 10 * step + part).backward()
            descend(model, 0.1)
            replica.outer_step()
        replica.detach()
        return flat(model).tolist()

    a, b = run_ranks(rank_main, 2)
    assert a == b


@pytest.mark.parametrize("delay", [0, 1])
def test_outer_steps_use_hosts(delay: int) -> None:
    """What diloco sends goes by its hook's two levels: exact inside a host, narrow between hosts."""

    def rank_main(world: Group) -> list[str]:
        layout = Layout(((0, 1), (2, 3)))
        host, index = layout.place(world.rank)
        inside, across = world.split(host, index), world.split(index, host)
        assert inside is not None
        assert across is not None
        log = Recording(across)
        hook = hooks.hierarchical(across=chain(cast(torch.bfloat16), mean()))
        with HierarchicalGroup(inside, log, rank=world.rank) as group:
            before: list[int] = []
            train(
                group,
                streaming_diloco(every=2, fragments=1, delay=delay, hook=hook),
                5,
                ready=lambda *_: before.append(len(log.submitted)),
            )
            return [op.dtypes[0] for op in log.submitted[before[0] :] if op.label != "bucket order"]

    assert run_ranks(rank_main, 4, kind="threads") == [["bfloat16"] * 2] * 4


@pytest.mark.parametrize("api", ["replica", "torch"])
def test_attaching_again_does_not_count_twice(group: Group, api: str) -> None:
    """Neither the same optimizer nor one that takes its place; and one that is refused leaves the earlier one attached."""
    model = copy.deepcopy(NET)
    owner: Any = as_torch_hook(local_sgd(every=2), group, named_parameters=model.named_parameters())
    if api == "replica":
        owner = replicate(model, group=group, hook=local_sgd(every=2))
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    for attached, stepped, counted in [
        ([first], first, 1),
        ([first], first, 2),
        ([second], second, 3),
        ([second], first, 3),
        ([], second, 3),
        ([first], first, 4),
    ]:
        owner.attach_optimizer(*attached)
        stepped.step()
        assert owner.hook_state_dict()["step"] == counted
    with pytest.raises(UsageTypeError):
        owner.attach_optimizer(second, "third")
    first.step()
    second.step()
    assert owner.hook_state_dict()["step"] == 5
    if api == "replica":
        owner.detach()


def test_what_is_no_optimizer_of_this_model_is_refused(group: Group) -> None:
    model = copy.deepcopy(NET)
    replica = replicate(model, group=group, hook=local_sgd(every=2))
    for wrong in (model, [torch.optim.SGD(model.parameters(), lr=0.1)]):
        with pytest.raises(UsageTypeError, match=r"not a torch\.optim\.Optimizer"):
            replica.attach_optimizer(wrong)  # type: ignore[arg-type]
    with pytest.raises(
        UsageTypeError, match=r"attach_optimizer\(None\): .* without such a hook, nothing need be attached"
    ):
        replica.attach_optimizer(None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"attach_optimizer\(SGD\): it moves none of the model's parameters"):
        replica.attach_optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
    replica.detach()


def test_a_local_hook_without_an_outer_half_is_refused(group: Group) -> None:
    around = chain(cast(torch.bfloat16), local_sgd(every=2))
    with pytest.raises(UsageError, match=r"nothing would ever average the parameters.*diloco\(hook=chain"):
        replicate(copy.deepcopy(NET), group=group, hook=around)
    ddp = DDP(copy.deepcopy(NET), process_group=group)
    for do in (ddp.set_hook, lambda hook: ddp.register_comm_hook(None, hook), lambda hook: as_torch_hook(hook, group)):
        with pytest.raises(UsageError, match="nothing would ever average"):
            do(around)
    ddp.register_comm_hook(None, mean())  # the place is still free
    with pytest.raises(UsageError, match=r"this hook writes parameters, but none were given"):
        as_torch_hook(local_sgd(every=2), group)


def test_join_is_refused(group: Group) -> None:
    ddp = DDP(copy.deepcopy(NET), process_group=group)
    ddp.set_hook(local_sgd(every=2))
    with pytest.raises(UsageError, match=r"join\(\) with local_sgd\(every=2\).*the same number of batches"):
        ddp.join()
    with ddp.join(enable=False):
        pass


def test_an_optimizer_does_not_keep_a_model_alive(group: Group, no_gc: None) -> None:
    ddp = DDP(copy.deepcopy(NET), process_group=group)
    ddp.set_hook(local_sgd(every=1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp.attach_optimizer(optimizer)
    loss_on(ddp, 0, 0).backward()
    optimizer.step()
    weak = weakref.ref(ddp)
    del ddp
    assert weak() is None
    optimizer.step()
    gc.collect()


def test_a_graph_declared_static_later_keeps_the_optimizer(group: Group) -> None:
    ddp = DDP(copy.deepcopy(NET), process_group=group)
    ddp.set_hook(local_sgd(every=1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp.attach_optimizer(optimizer)
    ddp._set_static_graph()
    for step in range(3):
        loss_on(ddp, 0, step).backward()
        optimizer.step()
    assert ddp.hook_state_dict()["step"] == 3


def test_a_checkpoint_loaded_before_the_first_step_is_where_the_round_starts() -> None:
    def rank_main(group: Group) -> Tensor:
        def ready(replica: Any, _: Any) -> None:
            with torch.no_grad():
                for p in replica.module.parameters():
                    p.add_(10.0)

        return train(group, diloco(every=1, outer_lr=0.5, outer_momentum=0.0), 1, lr=1e-6, ready=ready)[1][-1]

    for result in run_ranks(rank_main, 2):
        torch.testing.assert_close(result, flat(NET) + 10, rtol=0, atol=1e-3)


# -- swapping and failing ------------------------------------------------------------------------------------------------


def test_swapping_the_hook_averages_what_has_drifted_apart() -> None:
    def rank_main(group: Group) -> list[Tensor]:
        model = copy.deepcopy(NET)
        replica = replicate(model, group=group, hook=local_sgd(every=100))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica.attach_optimizer(optimizer)
        seen = []
        for hook in (None, diloco(every=2), mean(), gossip()):
            if hook is not None:
                replica.set_hook(hook)
            seen.append(flat(model))
            for step in range(3):
                optimizer.zero_grad()
                loss_on(model, group.rank, step).backward()
                optimizer.step()
        replica.detach()
        return seen

    a, b = run_ranks(rank_main, 2)
    for p, q in zip(a, b, strict=True):
        assert torch.equal(p, q)


class Fails(hooks.OuterHook):
    """Rank 1's second outer step fails before it communicates; once."""

    def __init__(self) -> None:
        self.failed = False

    def due(self, step: int) -> tuple[int, ...]:
        return (0,)

    def after_step(self, parameters: Tensor, state: Any, turn: hooks.Turn) -> hooks.Reduction:
        if turn.step == 1 and turn.rank == 1 and not self.failed:
            self.failed = True
            raise ValueError("the second one")
        yield all_reduce(parameters, op=ReduceOp.AVG)
        return hooks.Reduced(parameters, parameters)

    def __repr__(self) -> str:
        return "fails()"


def test_a_failed_outer_step_ends_on_every_rank_and_the_model_can_be_used_again() -> None:
    def rank_main(group: Group) -> Tensor:
        model = copy.deepcopy(NET)
        replica = replicate(model, group=group, hook=Fails())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica.attach_optimizer(optimizer)
        for step in range(5):
            optimizer.zero_grad()
            loss_on(model, group.rank, step).backward()
            if step == 1:
                with pytest.raises((ValueError, GroupAborted), match="the second one"):
                    optimizer.step()
            else:
                optimizer.step()
        assert replica.runner.outer is not None
        assert replica.runner.outer.step == 5
        replica.detach()
        return flat(model)

    a, b, c = run_ranks(rank_main, 3)
    assert torch.equal(a, b)
    assert torch.equal(a, c)


@on_ranks(2)
def test_a_scale_check_leaves_local_gradients_alone(group: Group) -> None:
    model = copy.deepcopy(NET)
    replica = replicate(model, group=group, hook=local_sgd(every=10), scale_check=ScaleCheck())
    loss_on(model, group.rank, 0).backward()
    replica.detach()


# -- state ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hook",
    [
        local_sgd(every=3),
        diloco(every=3, hook=chain(error_feedback(), cast(torch.bfloat16), mean())),
        streaming_diloco(every=4, fragments=2, delay=2, alpha=0.5),
        gossip(topology="random"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("stop", [4, 5])
def test_training_goes_on_from_a_saved_state_as_if_it_had_not_stopped(hook: hooks.CommHook, stop: int) -> None:
    """In the middle of a round, and while a fragment is on its way: each rank saves its parameters and its hook state."""

    def rank_main(group: Group) -> tuple[Tensor, Tensor]:
        whole = train(group, hook, 12)[1][-1]
        saved: list[Any] = []
        model, _ = train(group, hook, stop, ready=lambda replica, _: saved.append(replica))
        loaded = through_file({"model": model.state_dict(), "hook": saved[0].hook_state_dict()})
        assert loaded["hook"]["step"] == stop

        def ready(replica: Any, _: Any) -> None:
            replica.module.load_state_dict(loaded["model"])
            replica.load_hook_state_dict(loaded["hook"])

        return whole, train(group, hook, 12 - stop, first=stop, ready=ready)[1][-1]

    for whole, resumed in run_ranks(rank_main, 3):
        assert torch.equal(whole, resumed)


def test_a_rank_that_is_new_takes_the_anchor_from_rank_0() -> None:
    hook = diloco(every=2, hook=chain(error_feedback(), cast(torch.bfloat16), mean()))

    def two(group: Group) -> dict[str, Any]:
        kept: list[Any] = []
        train(group, hook, 3, ready=lambda replica, _: kept.append(replica))
        return kept[0].hook_state_dict()

    saved = run_ranks(two, 2)

    def three(group: Group) -> list[Tensor]:
        mine = saved[group.rank] if group.rank < 2 else saved[0]
        return train(group, hook, 3, first=3, ready=lambda replica, _: replica.load_hook_state_dict(mine))[1]

    ranks = run_ranks(three, 3)
    assert torch.equal(ranks[0][0], ranks[2][0])  # step 4: an outer step
    assert not torch.equal(ranks[0][1], ranks[2][1])


# -- torch's own DDP -----------------------------------------------------------------------------------------------------


def test_torchs_ddp_also_reports_a_forgotten_optimizer(group: Group) -> None:
    weight = torch.zeros(2, requires_grad=True)
    hook = as_torch_hook(local_sgd(every=1), group, named_parameters=[("weight", weight)])
    assert hook(None, TorchBucket([weight], 1.0)).wait().tolist() == [1.0, 1.0]
    with pytest.raises(UsageError, match=r"attach_optimizer\(optimizer\)"):
        hook(None, TorchBucket([weight], 1.0))
    hook.attach_optimizer()
    hook.outer_step()
    with pytest.raises(HookError, match="lacks"):
        hook.load_hook_state_dict({})
