"""Hook state saved and loaded: by name, through files, rebuilds and other worlds; what does not fit is refused on every rank."""

import copy
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire import hooks
from gradwire.collectives import ReduceOp, all_reduce
from gradwire.errors import HookError
from gradwire.groups import Group
from gradwire.hooks import CommHook, Reduced, Reduction, Turn, chain, error_feedback, mean, streaming_diloco
from gradwire.hooks.numerics.rng import generator
from gradwire.interop import as_fsdp_hook, as_torch_hook
from gradwire.parallel import DistributedDataParallel as DDP, replicate
from gradwire.testing import run_ranks
from helpers.buckets import TorchBucket
from helpers.comm_hooks import CountsSteps, Scripted
from helpers.models import train
from helpers.rank_tests import on_ranks
from helpers.through_file import through_file

SMALL = 0.0001
HOOK = chain(error_feedback(), hooks.cast(torch.bfloat16), mean())

with torch.random.fork_rng():
    torch.manual_seed(0)
    NET = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def noisy(grad: Tensor, state: Any, turn: Turn) -> Reduction:
    """A mean with noise that all ranks draw alike, so that its step shows; for all buckets the same, so that they do not."""
    everywhere = replace(turn, spec=replace(turn.spec, index=0, names=()))
    grad = grad + torch.randn(1, generator=generator(0, everywhere, shared=True))
    yield all_reduce(grad, op=ReduceOp.AVG)
    return Reduced(grad, grad)


class Stubborn(CountsSteps):
    """Keeps a number per parameter, and loads nothing else."""

    def __repr__(self) -> str:
        return "stubborn()"


def build(group: Group, hook: CommHook) -> DDP:
    ddp = DDP(copy.deepcopy(NET), process_group=group, bucket_cap_mb=SMALL)
    ddp.set_hook(hook)
    return ddp


# -- there and back ------------------------------------------------------------------------------------------------------


ACROSS = chain(error_feedback(), hooks.quantize(bits=4, block=32, rounding="stochastic"))
"""A block of it holds other elements if the first step after a checkpoint has all parameters in one bucket."""


@pytest.mark.parametrize(
    ("hook", "saved_after", "loaded_after"),
    [*product((HOOK, Scripted(noisy, 1)), (0, 1, 4), (0, 1, 3)), *product((ACROSS,), (1, 2, 5), (0,))],
)
def test_training_goes_on_as_if_it_had_not_stopped(hook: CommHook, saved_after: int, loaded_after: int) -> None:
    """Saved before the first step, before the rebuild or after it; loaded into a model that is before or after its own."""

    def rank_main(group: Group) -> tuple[Tensor, Tensor]:
        whole = build(group, hook)
        train(whole, group.rank, range(saved_after))
        state = through_file({"model": whole.state_dict(), "hook": whole.hook_state_dict()})
        expected = train(whole, group.rank, range(saved_after, 8))
        other = build(group, hook)
        train(other, group.rank, range(50, 50 + loaded_after))
        other.load_state_dict(state["model"])
        other.load_hook_state_dict(state["hook"])
        again = other.hook_state_dict()
        assert {key: again[key] for key in ("version", "hook", "rank", "step")} == {
            "version": 2,
            "hook": repr(hook),
            "rank": group.rank,
            "step": saved_after,
        }
        return expected, train(other, group.rank, range(saved_after, 8))

    for expected, resumed in run_ranks(rank_main, 2):
        assert torch.equal(expected, resumed)


def test_the_state_is_by_parameter_name_and_is_a_copy(group: Group) -> None:
    replica = replicate(model := copy.deepcopy(NET), group=group, hook=HOOK)
    train(model, 0, range(3))
    state = replica.hook_state_dict()
    assert sorted(state["state"]) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    residual = state["state"]["0.weight"]["residual"]
    assert residual.shape == (32,)
    assert bool(residual.any())
    kept = residual.clone()
    train(model, 0, range(3, 5))
    assert torch.equal(residual, kept)
    replica.load_hook_state_dict(state)
    train(model, 0, range(5, 7))
    assert torch.equal(state["state"]["0.weight"]["residual"], kept)
    replica.load_hook_state_dict(state)
    assert torch.equal(
        replica.hook_state_dict()["state"]["0.weight"]["residual"], kept
    )  # before any bucket asked for it
    state["state"]["0.weight"]["residual"] = torch.ones(7)
    with pytest.warns(UserWarning, match=r"that of 0\.weight has 7 values, and the parameter has 32"):
        replica.load_hook_state_dict(state)
    replica.detach()


def test_a_residual_stays_with_its_rank_and_a_new_rank_starts_with_zeros() -> None:
    def save(group: Group) -> dict[str, Any]:
        ddp = build(group, HOOK)
        train(ddp, group.rank, range(4))
        return ddp.hook_state_dict()

    saved = run_ranks(save, 2)

    def residual(state: dict[str, Any]) -> Tensor:
        return torch.cat([state["state"][n]["residual"] for n in sorted(state["state"])])

    def load(group: Group) -> tuple[int, dict[str, Any]]:
        ddp = build(group, HOOK)
        ddp.load_hook_state_dict(saved[group.rank] if group.rank < 2 else saved[0])
        before = ddp.hook_state_dict()
        train(ddp, group.rank, range(1))
        return ddp.hook_state_dict()["step"], before

    for step, before in run_ranks(load, 3)[:2]:
        assert step == 5
        assert torch.equal(residual(before), residual(saved[before["rank"]]))
    step, before = run_ranks(load, 3)[2]
    assert (step, before["step"], before["state"]) == (5, 4, {})
    (_, before) = run_ranks(load, 1)[0]
    assert torch.equal(residual(before), residual(saved[0]))


# -- refusals ------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_state_of_another_hook_names_both(group: Group) -> None:
    state = build(group, HOOK).hook_state_dict()
    other = build(group, mean())
    with pytest.raises(
        HookError, match=r"saved under the hook error_feedback\(\) > cast.*and the model now has mean\(\)"
    ):
        other.load_hook_state_dict(state)
    train(other, group.rank, range(2))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d: d | {"version": 7}, "the state has format 7, and this gradwire reads format 2"),
        (lambda d: {k: v for k, v in d.items() if k != "step"}, "this is not a hook state: it lacks step"),
        (lambda d: {}, "it lacks hook, rank, state, step, version"),
        (lambda d: None, "it lacks hook"),
    ],
)
def test_what_is_no_state_is_refused(group: Group, spoil: Any, words: str) -> None:
    ddp = build(group, HOOK)
    with pytest.raises(HookError, match=words):
        ddp.load_hook_state_dict(spoil(ddp.hook_state_dict()))


def test_if_one_rank_cannot_load_none_does() -> None:
    def rank_main(group: Group) -> str:
        ddp = build(group, HOOK)
        train(ddp, group.rank, range(2))
        state = ddp.hook_state_dict()
        train(ddp, group.rank, range(2, 4))
        if group.rank == 1:
            state |= {"hook": "mean()", "structure": ""}
        with pytest.raises(HookError) as caught:
            ddp.load_hook_state_dict(state)
        assert ddp.hook_state_dict()["step"] == 4
        return str(caught.value)

    said = run_ranks(rank_main, 3)
    assert "saved under the hook mean()" in said[1]
    assert "load_hook_state_dict on rank 0" in said[0]
    assert "ranks [1] could not load theirs, or loaded another step's or another run's. Nothing was changed" in said[0]


def inner(state: dict[str, Any], **parts: Any) -> dict[str, Any]:
    return state | {"outer": state["outer"] | parts}


DILOCO = streaming_diloco(every=3, fragments=2, delay=1)


@pytest.mark.parametrize(
    ("hook", "spoil"),
    [
        (HOOK, lambda d: d | {"step": None}),
        (HOOK, lambda d: d | {"step": "soon"}),
        (HOOK, lambda d: d | {"state": 7}),
        (Stubborn(), lambda d: d | {"state": {"0.weight": "spoilt"}}),
        (DILOCO, lambda d: d | {"outer": None}),
        (DILOCO, lambda d: inner(d, rounds={0: "many"})),
        (DILOCO, lambda d: inner(d, lands={0: 5}, came={})),
        (DILOCO, lambda d: d | {"state": {name: {"anchor": 3} for name in d["state"]}}),
    ],
    ids=["no step", "text for a step", "no states", "a spoilt state", "no outer", "rounds", "what came", "anchor"],
)
@pytest.mark.parametrize("api", ["replica", "torch"])
def test_what_cannot_be_read_on_one_rank_changes_nothing_on_any(hook: CommHook, spoil: Any, api: str) -> None:
    """Whatever the error is: the others neither wait for the rank that has it, nor continue without it."""

    def rank_main(group: Group) -> str | None:
        parameters = [(n, p.detach().clone().requires_grad_()) for n, p in NET.named_parameters()]
        owner: Any = as_torch_hook(hook, group, named_parameters=parameters)
        if api == "replica":
            owner = replicate(model := copy.deepcopy(NET), group=group, hook=hook)
            owner.attach_optimizer()
            train(model, group.rank, range(2))
        else:
            owner.attach_optimizer()
            for value in (2.0, 3.0):
                owner(None, TorchBucket([p for _, p in parameters], value)).wait()
        owner.outer_step()
        before = owner.hook_state_dict()
        state = through_file(before)
        owner.outer_step()
        now = owner.hook_state_dict()
        if group.rank == 1:
            state = spoil(state)
        with pytest.raises(HookError) as caught:
            owner.load_hook_state_dict(state)
        after = owner.hook_state_dict()
        for text in ("hook", "structure", "order"):
            assert after.pop(text, None) == now.pop(text, None)
        torch.testing.assert_close(after, now, rtol=0, atol=0)
        if api == "replica":
            owner.detach()
        return str(caught.value)

    said = run_ranks(rank_main, 2)
    assert "ranks [1] could not load theirs" in str(said[0])
    assert "load_hook_state_dict on rank 1 for" in str(said[1])
    assert "the state cannot be read" in str(said[1])


@on_ranks(2)
def test_states_of_different_steps_are_refused(group: Group) -> None:
    ddp = build(group, HOOK)
    state = ddp.hook_state_dict()
    state["step"] = group.rank
    with pytest.raises(HookError, match="loaded another step's"):
        ddp.load_hook_state_dict(state)


def test_not_during_backward_and_not_under_a_hook_of_torchs(group: Group) -> None:
    ddp = build(group, HOOK)
    state = ddp.hook_state_dict()
    said: list[str] = []

    def interfere(_: Any) -> None:
        for do in (ddp.hook_state_dict, lambda: ddp.load_hook_state_dict(state)):
            with pytest.raises(HookError) as caught:
                do()
            said.append(str(caught.value))

    ddp.module[0].weight.register_hook(interfere)
    train(ddp, 0, range(1))
    assert [words.rpartition(" during")[0] for words in said] == ["hook_state_dict()", "load_hook_state_dict()"]
    other = DDP(copy.deepcopy(NET), process_group=group)

    def torchs(state: Any, bucket: Any) -> Any:
        return torch.futures.Future()

    other.register_comm_hook(None, torchs)
    with pytest.raises(HookError, match="torchs, which keeps its own state"):
        other.hook_state_dict()


# -- after a failure -----------------------------------------------------------------------------------------------------


class Breaks(CommHook):
    """Rank 1 fails in step 3, once; records the steps it was called with."""

    collectives = 1

    def __init__(self) -> None:
        self.steps: list[int] = []

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        first = 3 not in self.steps
        self.steps.append(turn.step)
        if turn.step == 3 and turn.rank == 1 and first:
            raise ValueError("broken")
        yield all_reduce(grad, op=ReduceOp.AVG)
        return Reduced(grad, grad)

    def __repr__(self) -> str:
        return "breaks()"


def test_after_a_failure_states_are_gone_and_steps_go_on_from_rank_0() -> None:
    def rank_main(group: Group) -> list[int]:
        hook = Breaks()
        model = copy.deepcopy(NET)
        replica = replicate(model, group=group, hook=chain(error_feedback(), hook))
        train(model, group.rank, range(3))
        assert replica.hook_state_dict()["state"]
        with pytest.raises(Exception, match="broken"):
            train(model, group.rank, range(3, 4))
        hook.steps.append(3)
        replica.before_forward()  # recovers
        assert replica.hook_state_dict()["state"] == {}
        hook.steps.clear()
        hook.steps.append(3)
        train(model, group.rank, range(4, 6))
        replica.detach()
        return hook.steps[1:]

    a, b = run_ranks(rank_main, 2)
    assert a == b
    assert a[0] in (3, 4)


# -- torch's own DDP -----------------------------------------------------------------------------------------------------


def test_names_of_a_compiled_model_are_those_of_the_uncompiled_one(group: Group) -> None:
    """In the functions for torch's own wrappers, and in states that were saved when the prefix was part of the names."""
    weight = torch.zeros(4)

    def fsdp_hook(name: str) -> Any:
        return as_fsdp_hook(HOOK, group, named_parameters=[(name, weight)])

    first = fsdp_hook("block._orig_mod.weight")
    first(torch.full((4,), 1 / 3))
    state = first.hook_state_dict()
    assert list(state["state"]) == ["block.weight"]
    saved = {**state, "state": {"block._orig_mod.weight": state["state"]["block.weight"]}}
    results = []
    for name, loaded in (("block.weight", state), ("_orig_mod.block.weight", saved)):
        hook, gradient = fsdp_hook(name), torch.full((4,), 1 / 3)
        hook.load_hook_state_dict(loaded)
        hook(gradient)
        results.append(gradient)
        assert hook.hook_state_dict()["state"].keys() == state["state"].keys()
    fresh = torch.full((4,), 1 / 3)
    fsdp_hook("block.weight")(fresh)
    assert torch.equal(*results)
    assert not torch.equal(results[0], fresh)  # which has no residual of a step before
