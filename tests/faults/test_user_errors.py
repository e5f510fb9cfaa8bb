"""User exceptions in a step: every rank raises each once, in the same iteration, and continues with correct gradients.

The input of an iteration is its number plus the rank, so a gradient shows which iterations of the ranks were averaged.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from gradwire.collectives import ReduceOp, all_reduce
from gradwire.errors import GroupAborted
from gradwire.groups import Group
from gradwire.hooks import CommHook, Reduced, Reduction, Turn, mean
from gradwire.parallel import DistributedDataParallel as DDP, replicate
from gradwire.testing import run_ranks
from helpers.backward_calls import fail_in_backward
from helpers.comm_hooks import Scripted


def trap(x: Tensor, error: type[BaseException] | None) -> Tensor:
    return fail_in_backward(x, error, "of the user's own")


PLACES = ("in the loss", "before the first gradient", "between gradients", "after the last gradient")


class Model(nn.Module):
    """Two layers of weight 1 with traps around them; with a buffer, ranks communicate in forward too."""

    def __init__(self, *, buffer: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.first.weight)
        nn.init.ones_(self.second.weight)
        if buffer:
            self.register_buffer("seen", torch.zeros(3))
        self.armed: dict[str, type[BaseException]] = {}

    def forward(self, x: Tensor) -> Tensor:
        if "in forward" in self.armed:
            raise self.armed["in forward"]("of the user's own")
        x = trap(x, self.armed.get("after the last gradient"))
        x = trap(self.first(x), self.armed.get("between gradients"))
        return trap(self.second(x), self.armed.get("before the first gradient"))


def two_collectives(grad: Tensor, state: Any, turn: Turn) -> Reduction:
    """The mean, after another collective: on the lane."""
    yield all_reduce(torch.zeros(1))
    yield all_reduce(grad, op=ReduceOp.AVG)
    return Reduced(grad, grad)


def step(ddp: nn.Module, model: Model, x: float) -> None:
    inputs = torch.full((1, 1), x, requires_grad=True)
    trap(ddp(inputs).sum(), model.armed.get("in the loss")).backward()


def train(
    group: Group,
    *,
    faults: dict[int, tuple[int, str]],
    kind: type[BaseException] = ValueError,
    iterations: int = 8,
    buffer: bool = False,
    hook: CommHook | None = None,
    accumulate: bool = False,
    by_function: bool = False,
    **flags: Any,
) -> list[str]:
    """The outcome of each iteration; `faults` maps iterations to the rank that fails and where."""
    model = Model(buffer=buffer)
    ddp: Any = replicate(model, group=group) if by_function else DDP(model, process_group=group, **flags)
    if hook is not None:
        ddp.set_hook(hook)
    call = model if by_function else ddp
    story = []
    for i in range(iterations):
        call.zero_grad()
        rank, place = faults.get(i, (-1, ""))
        model.armed = {place.removeprefix("under no_sync, "): kind} if group.rank == rank else {}
        try:
            if accumulate:
                armed = model.armed
                model.armed = armed if place.startswith("under no_sync") else {}
                with ddp.no_sync():
                    step(call, model, 0.0)
                model.armed = {} if place.startswith("under no_sync") else armed
            step(call, model, float(i + group.rank))
        except BaseException as error:
            story.append(f"{type(error).__name__}: {error}")
        else:
            assert model.first.weight.grad is not None
            assert model.second.weight.grad is not None
            assert torch.equal(model.first.weight.grad, model.second.weight.grad)
            story.append(f"{model.first.weight.grad.item():g}")
        if kind is SystemExit and i in faults and group.rank == rank:
            break
    assert (ddp.reducer if by_function else ddp.replica.reducer).iterations.number == iterations
    return story


def check(stories: list[list[str]], faults: dict[int, tuple[int, str]], kind: str = "ValueError") -> None:
    size = len(stories)
    for rank, story in enumerate(stories):
        for i, said in enumerate(story):
            if i not in faults:
                assert said == f"{i + (size - 1) / 2:g}", (rank, i, stories)
            elif faults[i][0] == rank:
                assert said == f"{kind}: of the user's own", (rank, i, stories)
            else:
                assert said.startswith("GroupAborted"), (rank, i, stories)
                assert f"rank {faults[i][0]} with {kind}: of the user's own" in said


GRAPHS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a buffer": {"buffer": True},
    "small buckets": {"bucket_cap_mb": 1e-6},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "several collectives": {"hook": Scripted(two_collectives)},
    "function": {"by_function": True},
}
KINDS = ("threads", "gloo", "shared_memory")


@pytest.mark.parametrize("flags", GRAPHS.values(), ids=GRAPHS)
def test_every_place_in_every_kind_of_step(flags: dict[str, Any]) -> None:
    """Every place in turn, in the first iteration, in early ones, and in late ones, where hooks are on a few parameters."""
    faults = {0: (1, PLACES[2]), 2: (0, PLACES[2])}
    faults |= {15 + 3 * n: (n % 2, place) for n, place in enumerate([*PLACES, "in forward"])}
    faults |= {30: (1, PLACES[0]), 31: (0, PLACES[1]), 32: (1, PLACES[3])}
    stories = run_ranks(lambda group: train(group, faults=faults, iterations=36, **flags), 2)
    check(stories, faults)


@pytest.mark.parametrize(("kind", "buffer"), [("gloo", True), ("shared_memory", False)])
def test_every_place_on_every_kind_of_group(kind: str, buffer: bool) -> None:
    faults = {2 + 3 * n: (1, place) for n, place in enumerate([*PLACES, "in forward"])}
    stories = run_ranks(lambda group: train(group, faults=faults, iterations=18, buffer=buffer), 3, kind=kind)
    check(stories, faults)


@pytest.mark.parametrize("where", ["", "under no_sync, "])
def test_while_gradients_accumulate(where: str) -> None:
    faults = {2 + 3 * n: (1, where + place) for n, place in enumerate([*PLACES, "in forward"])}
    stories = run_ranks(lambda group: train(group, faults=faults, iterations=18, accumulate=True), 2)
    check(stories, faults)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError, SystemExit])
def test_any_exception(kind: type[BaseException]) -> None:
    faults = {3: (1, "between gradients")}
    iterations = 4 if kind is SystemExit else 6
    stories = run_ranks(lambda group: train(group, faults=faults, kind=kind, iterations=iterations), 2)
    check(stories, faults, kind.__name__)


def raises_late(grad: Tensor, state: Any, turn: Turn) -> Reduction:
    """The mean; on rank 1 it raises in chosen steps once the others have all that they need."""
    yield all_reduce(grad, op=ReduceOp.AVG)
    if turn.rank == 1 and grad[0].item() in (4.0, 7.0, 8.0, 12.0):
        raise ValueError("of the user's own")
    return Reduced(grad, grad)


@pytest.mark.filterwarnings("ignore:rank . had finished step")
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_finished_the_step_that_failed_stay_in_step(kind: str) -> None:
    """An abort finds the other ranks in the step that failed, between steps, or in the next one."""
    stories = run_ranks(
        lambda group: train(group, faults={}, iterations=16, hook=Scripted(raises_late, 1)), 3, kind=kind
    )
    for i, said in enumerate(zip(*stories, strict=True)):
        right = [text == f"{i + 1}" for text in said]
        if i in (3, 6, 7, 11):
            assert not right[1]
        else:
            assert all(right) or not any(right), (i, stories)
    assert any("ValueError" in text for text in stories[1])


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_between_forward_and_backward_that_is_reported(kind: str) -> None:
    def rank_main(group: Group) -> list[str]:
        model = Model()
        ddp, story = DDP(model, process_group=group), []
        for i in range(6):
            ddp.zero_grad()
            try:
                loss = ddp(torch.full((1, 1), float(i + group.rank))).sum()
                if i == 3 and group.rank == 1:
                    raise ValueError("of the user's own")
                loss.backward()
            except Exception as error:
                ddp.step_failed(error)
                ddp.step_failed(error)  # already reported
                story.append(f"{type(error).__name__}: {error}")
            else:
                story.append(f"{model.first.weight.grad.item():g}")
        return story

    check(run_ranks(rank_main, 2, kind=kind), {3: (1, "")})


@pytest.mark.parametrize("kind", KINDS)
def test_another_hook_may_be_set_at_once_after_a_hook_has_failed(kind: str) -> None:
    def fails(grad: Tensor, state: Any, turn: Turn) -> Reduction:
        if turn.rank == 1:
            raise ValueError("of the user's own")
        yield all_reduce(grad, op=ReduceOp.AVG)
        return Reduced(grad, grad)

    def rank_main(group: Group) -> float:
        model = Model()
        ddp = DDP(model, process_group=group)
        ddp.set_hook(Scripted(fails, 1))
        with pytest.raises((ValueError, GroupAborted), match="of the user's own"):
            step(ddp, model, 1.0)
        ddp.set_hook(mean())
        ddp.zero_grad()
        step(ddp, model, 1.0 + group.rank)
        return model.first.weight.grad.item()

    assert run_ranks(rank_main, 2, kind=kind) == [1.5, 1.5]


class Hidden(nn.Module):
    """Its parameters are not in the graph that the loss shows."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        for p in self.parameters():
            nn.init.ones_(p)
        self.reentrant = reentrant
        self.armed = False

    def compute(self, x: Tensor) -> Tensor:
        return self.layers[1](trap(self.layers[0](x), ValueError if self.armed else None))

    def forward(self, x: Tensor) -> Tensor:
        if not self.reentrant:
            return self.compute(x)
        return checkpoint(self.compute, x.requires_grad_(), use_reentrant=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", ["ddp", "replicate"])
@pytest.mark.parametrize("hidden", ["in a re-entrant checkpoint", "behind a gradient edge"])
def test_a_backward_without_parameters_in_its_graph_fails_on_all_ranks(hidden: str, form: str) -> None:
    def rank_main(group: Group) -> list[str | float]:
        module = Hidden(reentrant="checkpoint" in hidden)
        model: nn.Module = DDP(module, process_group=group) if form == "ddp" else module
        if form == "replicate":
            replicate(module, group=group)
        log: list[str | float] = []
        for iteration in range(5):
            module.armed = iteration == 2 and group.rank == 0
            model.zero_grad()
            try:
                loss = model(torch.full((1, 1), 1.0 + group.rank + iteration)).sum()
                if "edge" in hidden:
                    torch.autograd.backward([get_gradient_edge(loss)], [torch.ones(())])  # type: ignore[list-item]
                else:
                    loss.backward()
                log.append(module.layers[0].weight.grad.item())  # type: ignore[union-attr,operator]
            except (ValueError, GroupAborted) as error:
                log.append(type(error).__name__)
        return log

    first, second = run_ranks(rank_main, 2)
    assert first == [1.5, 2.5, "ValueError", 4.5, 5.5]
    assert second == [1.5, 2.5, "GroupAborted", 4.5, 5.5]
