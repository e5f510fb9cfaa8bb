"""Few gradients that call against all: random programs, step by step, must end in the same gradients and the same errors."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradwire.errors import GradwireError
from gradwire.events import BucketLaunched, GradientReady
from gradwire.groups import ThreadGroup
from gradwire.hooks import GradBucket
from gradwire.parallel import replicate
from gradwire.parallel.replica import Replica
from gradwire.policies import Buckets, Gradients
from gradwire.reducer.machine import State

COUNT = 5
X = torch.tensor([1.0, 3.0])
ORDER = tuple(range(COUNT))


@dataclass(frozen=True)
class Step:
    """What a program does in one step. `backwards` says in which order each of its backwards reaches parameters."""

    backwards: tuple[tuple[int, ...], ...] = (ORDER,)
    reentrant: frozenset[int] = frozenset()
    zero: str = "before"
    in_place: bool = False
    accumulate: tuple[int, ...] = ()
    discarded: bool = False
    probe: bool = False


class Chain(nn.Module):
    """Multiplies by its parameters in a given order; the last factor is the first to get its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterList([nn.Parameter(torch.tensor([2.0 + i, 3.0 - i])) for i in range(COUNT)])

    def forward(self, step: Step) -> list[Tensor]:
        return [self._product(order, step.reentrant) for order in step.backwards]

    def _product(self, order: tuple[int, ...], reentrant: frozenset[int]) -> Tensor:
        x = X.clone().requires_grad_()
        for i in reversed(order):
            x = self._reentrant(x, i) if i in reentrant else x * self.factors[i]
        return x.sum()

    def _reentrant(self, x: Tensor, index: int) -> Tensor:
        """The factor gets its gradient in a backward inside the backward, as it is no input of the checkpoint."""
        result: Tensor = checkpoint(lambda x: x * self.factors[index], x, use_reentrant=True)
        return result


class Program:
    """One replica, and everything that can be seen of its steps from outside."""

    def __init__(self, how: str, limit: int, gradients: Gradients) -> None:
        (self.group,) = ThreadGroup.world(1, timeout=20)
        self.module = Chain()
        self.replica: Replica = replicate(self.module, group=self.group, buckets=Buckets((limit,)), gradients=gradients)
        self.launches: list[int] = []
        start = self.replica.runner.start

        def launch(bucket: GradBucket) -> Any:
            self.launches.append(bucket.index())
            return start(bucket)

        self.replica.runner.start = launch  # type: ignore[method-assign]
        if how == "all call":
            self.replica.reducer.events.listen(lambda event: None, only=GradientReady)
        elif how == "with a listener":
            self.replica.reducer.events.listen(lambda event: None, only=BucketLaunched)

    def zero(self, step: Step, when: str) -> None:
        if step.zero == when:
            self.module.zero_grad(set_to_none=not step.in_place)

    def take(self, step: Step) -> list[Any]:
        """The errors of its parts, what was launched, and the gradients."""
        seen: list[Any] = []
        self.launches.clear()
        self.zero(step, "before")
        parts = [self._accumulate, self._train]
        for part in parts:
            try:
                part(step)
                seen.append(None)
            except GradwireError as error:
                seen.append(type(error).__name__)
                self.module.zero_grad()  # how far a backward came that failed is nobody's business
        seen.append(list(self.launches))
        seen.append([None if p.grad is None else p.grad.tolist() for p in self.module.parameters()])
        return seen

    def _accumulate(self, step: Step) -> None:
        if step.accumulate:
            with self.replica.no_sync():
                self.module(Step((step.accumulate,)))[0].backward()

    def _train(self, step: Step) -> None:
        if step.discarded:
            self.module(step)
        losses = self.module(step)
        if step.probe and not step.reentrant:  # which torch refuses
            torch.autograd.grad(losses[0], list(self.module.parameters()), retain_graph=True, allow_unused=True)
        self.zero(step, "between")
        for loss in losses:
            loss.backward()

    def close(self) -> None:
        self.replica.detach()
        self.group.close()


orders = st.permutations(ORDER).map(tuple)
kinds = {
    "zero": st.sampled_from(["before", "before", "between", "never"]),
    "in_place": st.sampled_from([False, False, True]),
    "accumulate": st.sampled_from([(), (), ORDER, (3, 1), (4, 3, 2, 1, 0)]),
    "discarded": st.booleans(),
    "probe": st.booleans(),
    "reentrant": st.frozensets(st.sampled_from(ORDER), max_size=2),
}
in_one = st.builds(lambda order, **kind: Step((order,), **kind), orders, **kinds)
in_two = st.builds(
    lambda order, cut, **kind: Step((order[:cut], order[cut:]), **kind), orders, st.integers(1, 4), **kinds
)
lacking = st.builds(lambda order, left, **kind: Step((order[:left],), **kind), orders, st.integers(1, 4), **kinds)
odd = st.one_of(in_one, in_two, lacking)
programs = st.lists(st.one_of(st.just(Step()), odd), min_size=1, max_size=7)
ways = {
    "steps": programs,
    "limit": st.sampled_from([1, 16, 1 << 20]),
    "gradients": st.sampled_from([Gradients.COPIES, Gradients.VIEWS]),
}


def compare(how: str, steps: list[Step], limit: int, gradients: Gradients) -> None:
    """Both take three plain steps, and then these."""
    programs = [Program(each, limit, gradients) for each in (how, "all call")]
    try:
        for number, step in enumerate([Step()] * 3 + steps):
            if programs[1].replica.reducer.machine.state is not State.RESTING:
                # Part of the last step is missing. The next forward says so, unless a backward under no_sync is first, which
                # brings gradients once more: also an error, but told at once or at the next forward.
                step = replace(step, accumulate=())
            ours, theirs = (program.take(step) for program in programs)
            assert ours == theirs, (number, step)
    finally:
        for program in programs:
            program.close()


@settings(max_examples=50)
@given(**ways)
@example([Step((ORDER[::-1],))], 1 << 20, Gradients.COPIES)
@example([Step(((0, 1), (2, 3, 4)))], 16, Gradients.COPIES)
def test_steps_in_which_few_gradients_call_are_like_those_in_which_all_do(
    steps: list[Step], limit: int, gradients: Gradients
) -> None:
    compare("few call", steps, limit, gradients)


@settings(max_examples=25)
@given(**ways)
def test_a_listener_changes_nothing(steps: list[Step], limit: int, gradients: Gradients) -> None:
    compare("with a listener", steps, limit, gradients)
