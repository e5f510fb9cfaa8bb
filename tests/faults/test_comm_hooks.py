"""Every way in which a communication hook can break its contract: which error each rank gets, that no rank hangs, and recovery.

One model goes through all violations, one after another. After each, all ranks train a step with correct gradients.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future

from gradwire.collectives import ReduceOp, all_reduce
from gradwire.errors import CollectiveTimeout, GradwireError, GroupError, HookError
from gradwire.groups import Deadline, Group
from gradwire.hooks import CommHook, Reduced, Reduction, Turn
from gradwire.parallel import DistributedDataParallel as DDP
from gradwire.testing import run_ranks
from helpers.futures import done

SECONDS = 3.0
"""The group's patience, where a Future that is never completed has to be waited for."""


class OwnError(Exception):
    """Of the hook's own."""


def failed(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def raise_own() -> Any:
    raise OwnError("the hook's own words")


@dataclass(frozen=True)
class Violation:
    """What the hook does instead of reducing, and the error that its rank gets."""

    act: Callable[[Any], Any]
    error: type[Exception]
    words: str
    note: str = ""


CONTRACT = "must return a torch.futures.Future object, but got "
WHERE = "communication hook 'faulty' on bucket 0 (parameters "
VIOLATIONS: dict[str, Violation] = {
    "not a Future": Violation(lambda b: b.buffer(), HookError, CONTRACT + "torch.Tensor"),
    "None": Violation(lambda b: None, HookError, CONTRACT + "builtins.NoneType"),
    "a class": Violation(lambda b: Future, HookError, CONTRACT),
    "Future of None": Violation(
        lambda b: done(None), HookError, "returned a Future of None, expected a Future of one tensor"
    ),
    "Future of a list": Violation(lambda b: done([b.buffer()]), HookError, "returned a Future of builtins.list"),
    "Future of a string": Violation(lambda b: done("mean"), HookError, "returned a Future of builtins.str"),
    "Future of too few": Violation(
        lambda b: done(b.buffer()[:3]), HookError, "a tensor of 3 elements, expected one of 10"
    ),
    "Future of one": Violation(lambda b: done(torch.zeros(1)), HookError, "a tensor of 1 elements, expected one of 10"),
    "Future of another dtype": Violation(
        lambda b: done(b.buffer().double()), HookError, "returned a torch.float64 tensor, expected one of torch.float32"
    ),
    "Future on another device": Violation(
        lambda b: done(b.buffer().to("meta")), HookError, "returned a tensor on meta, expected one on cpu"
    ),
    "Future of a sparse tensor": Violation(
        lambda b: done(b.buffer().to_sparse()), HookError, "returned a torch.sparse_coo tensor"
    ),
    "Future that fails": Violation(
        lambda b: failed(OwnError("inside")), OwnError, "inside", "raised in the Future of " + WHERE
    ),
    "callback that fails": Violation(
        lambda b: done(None).then(lambda f: raise_own()), RuntimeError, "OwnError", "raised in the Future of " + WHERE
    ),
    "raises": Violation(lambda b: raise_own(), OwnError, "the hook's own words", "raised by " + WHERE),
}
NEVER = Violation(lambda b: Future(), CollectiveTimeout, f"its Future was not completed after {SECONDS:.3g} s")


class Faulty:
    """A hook that reduces, unless it is set to break its contract."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.violation: Violation | None = None
        self.fired = 0
        self.__qualname__ = "faulty"

    def __call__(self, state: Any, bucket: Any) -> Any:
        if self.violation is not None:
            self.fired += 1
            return self.violation.act(bucket)
        work = self.group.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda f: f.value()[0] / self.group.size)


def batch(group: Group) -> Tensor:
    return torch.full((3, 4), float(group.rank + 1))


def trains_rightly(ddp: DDP, group: Group) -> None:
    """Two steps with the mean over ranks, which every rank can compute by itself."""
    for _ in range(2):
        ddp.zero_grad()
        ddp(batch(group)).sum().backward()
        mean = 3.0 * sum(range(1, group.size + 1)) / group.size
        assert ddp.module.weight.grad.tolist() == [[mean] * 4] * 2
        assert ddp.module.bias.grad.tolist() == [3.0, 3.0]


def wait_for_failure(group: Group) -> None:
    """Return when this rank has detected that another rank's step has failed."""
    with pytest.raises(GroupError):
        while True:
            group.check_peers()
            time.sleep(0.01)


@dataclass(frozen=True)
class Outcome:
    """The error that one rank got for a violation."""

    kind: str
    is_group_error: bool
    expected: bool
    text: str
    notes: str
    fired: int
    seconds: float


def violate(ddp: DDP, hook: Faulty, group: Group, violation: Violation, culprits: tuple[int, ...]) -> Outcome:
    group.barrier()  # all have finished what was before, so the fault hits no other step
    hook.violation, hook.fired = (violation if group.rank in culprits else None), 0
    started = time.perf_counter()
    with pytest.raises(Exception) as caught:
        ddp(batch(group)).sum().backward()
    hook.violation = None
    error = caught.value
    return Outcome(
        type(error).__name__,
        isinstance(error, GroupError),
        isinstance(error, violation.error) and isinstance(error, (GradwireError, OwnError, RuntimeError)),
        str(error),
        "\n".join(getattr(error, "__notes__", ())),
        hook.fired,
        time.perf_counter() - started,
    )


def through_all(group: Group, violations: dict[str, Violation], culprits: tuple[int, ...], **flags: Any) -> Any:
    torch.manual_seed(group.rank)
    ddp, hook, outcomes = DDP(nn.Linear(4, 2), process_group=group, **flags), Faulty(group), {}
    ddp.register_comm_hook(None, hook)
    for name, violation in violations.items():
        outcomes[name] = violate(ddp, hook, group, violation, culprits)
        trains_rightly(ddp, group)
    return outcomes


def check(outcome: Outcome, violation: Violation, rank: int, culprits: tuple[int, ...]) -> None:
    """A rank that broke the contract gets its own error, unless another's reached it first; all others get a GroupError."""
    if rank not in culprits:
        assert outcome.fired == 0
        assert outcome.is_group_error, outcome
        assert f"rank {culprits[0]}" in outcome.text or f"ranks [{culprits[0]}]" in outcome.text
    elif outcome.fired == 0 or (outcome.is_group_error and not issubclass(violation.error, GroupError)):
        assert len(culprits) > 1
        assert outcome.is_group_error, outcome
    else:
        assert outcome.expected, outcome
        assert violation.words in outcome.text
        assert violation.note in outcome.notes
        assert f", rank {rank}" in outcome.text + outcome.notes
        assert WHERE in outcome.text + outcome.notes


KINDS = ["threads", "gloo", "shared_memory"]
CULPRITS = {"all ranks": (0, 1), "only rank 1": (1,)}


@pytest.fixture(scope="module", params=[(kind, who) for kind in KINDS for who in CULPRITS], ids=" ".join)
def story(request: pytest.FixtureRequest) -> Any:
    """The errors that every rank got for every violation, in one world; and the culprits."""
    kind, who = request.param
    culprits = CULPRITS[who]
    outcomes = run_ranks(lambda group: through_all(group, VIOLATIONS, culprits), 2, kind=kind)
    return outcomes, culprits


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_broken_contract_is_named_and_over(story: Any, name: str) -> None:
    outcomes, culprits = story
    assert any(outcomes[rank][name].fired for rank in culprits)
    for rank in range(2):
        check(outcomes[rank][name], VIOLATIONS[name], rank, culprits)
        assert outcomes[rank][name].seconds < 50


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("who", CULPRITS)
def test_a_future_that_is_never_completed_is_given_up(kind: str, who: str) -> None:
    culprits = CULPRITS[who]

    def rank_main(group: Group) -> Any:
        return through_all(group, {"never": NEVER}, culprits)["never"]

    outcomes = run_ranks(rank_main, 2, kind=kind, wrap=lambda group: Deadline(group, seconds=SECONDS))
    # If both wait for their own Future, one times out first, and the other may get its abort before it times out too.
    first = next(rank for rank in culprits if outcomes[rank].expected)
    for rank in range(2):
        gave_up = rank == first or (rank in culprits and outcomes[rank].expected)
        check(outcomes[rank], NEVER, rank, culprits if gave_up else (first,))
        assert outcomes[rank].seconds < SECONDS + 30


FLAGS: list[dict[str, Any]] = [
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb": 0.00001},
]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: next(iter(flags)))
def test_every_kind_of_graph_recovers_from_every_violation(flags: dict[str, Any]) -> None:
    outcomes = run_ranks(lambda group: through_all(group, VIOLATIONS, (2,), **flags), 3)
    for name in VIOLATIONS:
        assert outcomes[2][name].fired >= 1
        assert outcomes[2][name].expected
        for rank in range(2):
            assert outcomes[rank][name].is_group_error
            assert "rank 2" in outcomes[rank][name].text


@pytest.mark.filterwarnings("ignore:rank 0 had finished step 0")
def test_a_rank_that_finished_the_step_goes_on_with_the_others() -> None:
    """The culprit reduces, and only then returns something invalid: the other's step is done by then.

    To raise in its next step would leave the ranks a step apart; it is warned, and both make the next step together.
    """
    late = Violation(lambda b: None, HookError, "a Future of builtins.list")

    def rank_main(group: Group) -> str:
        ddp = DDP(nn.Linear(4, 2), process_group=group)
        bad = [group.rank == 1]

        def hook(state: Any, bucket: Any) -> Any:
            future = group.all_reduce(bucket.buffer(), async_op=True).get_future()
            return future.then(lambda f: f.value() if bad[0] else f.value()[0] / group.size)

        ddp.register_comm_hook(None, hook)
        if group.rank == 1:
            with pytest.raises(HookError, match=late.words):
                ddp(batch(group)).sum().backward()
        else:
            ddp(batch(group)).sum().backward()
            wait_for_failure(group)
        bad[0] = False
        trains_rightly(ddp, group)
        assert ddp.replica.reducer.iterations.number == 3
        return str(ddp.replica.reducer.iterations.last_error)

    for kind in KINDS:
        said = run_ranks(rank_main, 2, kind=kind)
        assert "failed on rank 1 with HookError" in said[0]


class Generated(CommHook):
    """The mean, on the lane or not, unless `act` interferes: it is called before the collective, between and after."""

    def __init__(self, act: Callable[[str, Turn], Any], collectives: int | None) -> None:
        self.act = act
        self.collectives = collectives

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        self.act("before", turn)
        if self.collectives is None:
            yield all_reduce(torch.zeros(1))
            self.act("between", turn)
        yield all_reduce(grad, op=ReduceOp.AVG)
        result = self.act("after", turn)
        return Reduced(grad, grad) if result is None else result

    def __repr__(self) -> str:
        return "generated()"


def raise_it(turn: Turn) -> None:
    raise OwnError("the hook's own words")


OWN: dict[str, tuple[str, Callable[[Turn], Any], type[Exception], str]] = {
    "raises before": ("before", raise_it, OwnError, "the hook's own words"),
    "raises between": ("between", raise_it, OwnError, "the hook's own words"),
    "raises after": ("after", raise_it, OwnError, "the hook's own words"),
    "returns no Reduced": ("after", lambda turn: 3, HookError, "reduce() returned int, not Reduced"),
    "returns one element": (
        "after", lambda turn: Reduced(torch.zeros(1), torch.zeros(1)), HookError, "of 1 elements for a bucket of",
    ),
    "returns another dtype": (
        "after", lambda turn: Reduced(torch.zeros(10).double(), torch.zeros(10)), HookError, "returned torch.float64 of 10",
    ),
}  # fmt: skip


def generated_story(group: Group, collectives: int | None) -> dict[str, tuple[bool, str]]:
    """Every violation on rank 1 alone; (whether it was a GroupError, all that was said)."""
    fault: list[Any] = [None]

    def act(when: str, turn: Turn) -> Any:
        return fault[0][1](turn) if fault[0] is not None and fault[0][0] == when else None

    ddp, outcomes = DDP(nn.Linear(4, 2), process_group=group), {}
    ddp.set_hook(Generated(act, collectives))
    for name, violation in OWN.items():
        if violation[0] == "between" and collectives is not None:
            continue
        group.barrier()
        fault[0] = violation if group.rank == 1 else None
        try:
            ddp(batch(group)).sum().backward()
        except (GradwireError, OwnError) as error:
            said = "\n".join([str(error), *getattr(error, "__notes__", ())])
            outcomes[name] = isinstance(error, GroupError), said
        else:
            wait_for_failure(group)
        fault[0] = None
        trains_rightly(ddp, group)
        # If the fault was after the collective, the other rank's step was done: it got a warning before its next.
        outcomes.setdefault(name, (True, str(ddp.replica.reducer.iterations.last_error)))
    return outcomes


@pytest.mark.filterwarnings("ignore:rank 0 had finished step")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("collectives", [1, None], ids=["at once", "on the lane"])
def test_our_own_hooks_are_held_to_theirs(kind: str, collectives: int | None) -> None:
    other, culprit = run_ranks(lambda group: generated_story(group, collectives), 2, kind=kind)
    for name, (is_group_error, said) in culprit.items():
        assert not is_group_error
        assert OWN[name][3] in said
        assert "communication hook generated() on bucket 0 (parameters " in said
        assert "), rank 1" in said
    for is_group_error, said in other.values():
        assert is_group_error
        assert "failed on rank 1" in said


def test_a_reduction_left_over_from_a_failed_step_does_not_reach_the_recovered_group() -> None:
    """Two buckets on the lane. Rank 1 fails the first; rank 0's lane is held in the second until rank 1 has recovered."""
    failed, held = threading.Event(), threading.Event()

    def act(when: str, turn: Turn) -> None:
        if turn.rank == 1 and not failed.is_set():
            failed.set()
            raise OwnError("on rank 1")
        if turn.rank == 0 and turn.spec.index == 1 and not held.is_set():
            held.set()
            threading.Event().wait(
                0.3
            )  # busy, like a hook that computes, while the caller continues with its next step

    def rank_main(group: Group) -> None:
        ddp = DDP(nn.Linear(4, 2), process_group=group, bucket_cap_mb_list=[0.00001])
        ddp.set_hook(Generated(act, None))
        with pytest.raises((OwnError, GroupError)):
            ddp(batch(group)).sum().backward()
        trains_rightly(ddp, group)

    run_ranks(rank_main, 2)
    assert held.is_set()
