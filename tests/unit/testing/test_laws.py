"""check_hook: good hooks pass, and every law has a hook that breaks it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.collectives import ReduceOp, all_reduce
from gradwire.errors import HookError
from gradwire.hooks import (
    BucketSpec,
    CommHook,
    Reduced,
    Reduction,
    Trait,
    Turn,
    cast,
    chain,
    error_feedback,
    mean,
    random_k,
    top_k,
    weighted_mean,
)
from gradwire.hooks.numerics.elementwise import drop_nonfinite_
from gradwire.hooks.state import Owed, join_flat, split_flat
from gradwire.hooks.state_fork import Fork
from gradwire.testing import check_hook, laws


class Average(CommHook):
    """A correct hook, to be broken in one place each."""

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        value = grad.clone()
        yield all_reduce(value, op=ReduceOp.AVG)
        return Reduced(value * turn.share, grad)


class Disagrees(Average):
    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        value, sent = yield from super().reduce(grad, state, turn)
        return Reduced(value + 1e-6 * turn.rank, sent)


class Widens(Average):
    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        value, sent = yield from super().reduce(grad, state, turn)
        return Reduced(value, sent.double())


class Writes(Average):
    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        value, sent = yield from super().reduce(grad.mul_(2), state, turn)
        return Reduced(value, sent)


class Guesses(Average):
    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        noise = torch.rand(1)
        yield all_reduce(noise)
        value, sent = yield from super().reduce(grad + noise, state, turn)
        return Reduced(value, sent)


class Sums(Average):
    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        value, sent = yield from super().reduce(grad, state, turn)
        return Reduced(value * turn.world_size * 2, sent)


class ForgetsDivisor(Average):
    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        value, sent = yield from super().reduce(grad, state, turn)
        return Reduced(value / turn.share, sent)


class ForgetsWeights(Average):
    """Weighs, without weighing what it reports as sent."""

    traits = Trait.WEIGHS

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        value, _ = yield from weighted_mean().reduce(grad, state, turn)
        return Reduced(value, grad)


class ScattersTheFirstRow(Average):
    """To every rank."""

    def reduce_scatter(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        value, sent = yield from super().reduce(grad, state, turn)
        return Reduced(value.chunk(turn.world_size)[0], sent)


class MiscountsScattered(ScattersTheFirstRow):
    def scatter_wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        return 1.0


class Drops(Average):
    """Reports as sent what it did not send."""

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        value, sent = yield from super().reduce(grad, state, turn)
        return Reduced(value * 0.5, sent)


class Miscounts(Average):
    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        return 1.0


class MiscountsCollectives(Average):
    collectives = 2


class Forgets(Average):
    """A momentum that is not saved."""

    traits = Trait.REMEMBERS

    def init(self, spec: BucketSpec) -> Any:
        return torch.zeros(spec.numel)

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        state.add_(grad)
        value, _ = yield from super().reduce(state, None, turn)
        return Reduced(value, state.clone())


class SavesNonsense(Average):
    def save(self, state: Any, spec: BucketSpec) -> dict[str, Any]:
        return {"nobody": 1}


@dataclass(frozen=True)
class Mixes(Forgets):
    """Gives a parameter the state of another."""

    def save(self, state: Any, spec: BucketSpec) -> dict[str, Any]:
        return {name: state.sum() + i for i, name in enumerate(spec.names)}

    def load(self, saved: Mapping[str, Any], spec: BucketSpec) -> Any:
        return torch.zeros(spec.numel)


class DividesByNothing(Average):
    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        norm = grad.norm()
        value, sent = yield from super().reduce(grad / norm, state, turn)
        return Reduced(value * 1.0, sent)


class NeverForgets(Average):
    """A momentum that keeps a NaN forever."""

    traits = Trait.REMEMBERS

    def init(self, spec: BucketSpec) -> Any:
        return torch.zeros(spec.numel)

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        state.mul_(0.5).add_(grad)
        return (yield from super().reduce(state, None, turn))


class Hides(Average):
    """Zeros in place of NaN, whatever it declares."""

    passes_nonfinite = True

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        return (yield from super().reduce(grad.nan_to_num(0.0, 0.0, 0.0), state, turn))


class SendsOne(Average):
    """The first element, always: the others are owed forever."""

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        first = torch.zeros_like(grad)
        first[:1] = grad[:1]
        return (yield from super().reduce(first, state, turn))


class Residual(Average):
    """Sends every other element and keeps the rest: a correct hook with a state."""

    traits = Trait.REMEMBERS

    def init(self, spec: BucketSpec) -> Any:
        return torch.zeros(spec.numel)

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        sent = state.add_(grad).clone()
        sent[turn.step % 2 :: 2] = 0
        drop_nonfinite_(state.sub_(sent))
        value, _ = yield from super().reduce(sent, None, turn)
        return Reduced(value, sent)

    def save(self, state: Any, spec: BucketSpec) -> dict[str, Any]:
        return split_flat(state, spec)

    def load(self, saved: Mapping[str, Any], spec: BucketSpec) -> Any:
        return join_flat(saved, spec)

    def owed(self, saved: Mapping[str, Any]) -> Owed | None:
        return list(saved.items())


class KeepsItsSize(Residual):
    def rebase(self, saved: Mapping[str, Any], old_size: int, new_size: int) -> Any:
        return saved


class ForgetsLeavers(Residual):
    def inherit(self, saved: Mapping[str, Any], leaver: Mapping[str, Any]) -> Any:
        return saved


class SharesWhatItOwes(Residual):
    def shared(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        return dict(saved)


class ReturnsCopies(Residual):
    def owed(self, saved: Mapping[str, Any]) -> Owed | None:
        return [(name, owed.clone()) for name, owed in saved.items()]


class SharedMemory(Fork):
    def renew(self) -> None:
        super().renew()
        self._copies = self._copied


class ForksInPlace(Residual):
    def fork(self, state: Any) -> Fork:
        return SharedMemory(state)


class Outside(Residual):
    """Counts on itself how often it was called, and decides by it."""

    def __init__(self) -> None:
        self._calls = 0

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        self._calls += 1
        return (yield from super().reduce(grad * (1 + self._calls // 9), state, turn))


BROKEN = {
    "forks": [ForksInPlace(), Outside()],
    "conserves": [KeepsItsSize(), ForgetsLeavers(), SharesWhatItOwes(), ReturnsCopies()],
    "agree": [Disagrees()],
    "kept": [Widens()],
    "unwritten": [Writes()],
    "repeatable": [Guesses()],
    "mean_of_sent": [Sums(), ForgetsDivisor(), ForgetsWeights(), ScattersTheFirstRow()],
    "pays_back": [Drops(), SendsOne()],
    "counted": [Miscounts(), MiscountsCollectives(), MiscountsScattered()],
    "saved": [Forgets(), SavesNonsense(), Mixes()],
    "from_nothing": [DividesByNothing()],
    "recovers": [NeverForgets()],
    "passes_nonfinite": [Hides()],
}


@pytest.mark.parametrize(
    "hook",
    [
        mean(),
        weighted_mean(),
        chain(cast(torch.bfloat16), mean()),
        chain(error_feedback(), cast(torch.float16), mean()),
        Residual(),
    ],
    ids=repr,
)
def test_good_hooks_keep_the_laws(hook: CommHook) -> None:
    check_hook(hook)


@pytest.mark.parametrize(
    "hook", [chain(error_feedback(), top_k(ratio=0.005)), chain(random_k(0.005), mean())], ids=repr
)
def test_hooks_that_send_little_at_a_time_pay_back_in_time(hook: CommHook) -> None:
    check_hook(hook, world_sizes=(2,), laws=[laws.pays_back])


def test_a_rounding_that_is_not_stated_is_told_where_to_state_it() -> None:
    with pytest.raises(HookError, match=r"Sums\.error\(spec\) states .* states by how much in its error method"):
        check_hook(Sums(), laws=[laws.mean_of_sent])


def test_hooks_look_alike_in_every_process_without_a_repr_of_their_own() -> None:
    class Scaled(Average):
        def __init__(self, by: float, dtype: torch.dtype) -> None:
            self.by, self.dtype, self._cache, self.key = by, dtype, 3, object()

    assert repr(Scaled(0.5, torch.bfloat16)).endswith("Scaled(by=0.5, dtype=torch.bfloat16)")
    assert repr(Average()) == "Average()"


@pytest.mark.parametrize(("law", "hook"), [(law, hook) for law, hooks in BROKEN.items() for hook in hooks])
def test_every_law_is_broken_by_somebody(law: str, hook: CommHook) -> None:
    with pytest.raises(HookError, match=f"the law '{law}' does not hold"):
        check_hook(hook, laws=[getattr(laws, law)])


def test_a_hook_whose_ranks_part_is_told_by_the_law_that_met_it() -> None:
    class Parts(Average):
        def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
            if turn.rank:
                yield all_reduce(torch.zeros(1))
            return (yield from super().reduce(grad, state, turn))

    with pytest.raises(HookError, match="CollectiveMismatch"):
        check_hook(Parts())


def test_randomness_without_a_seed_is_reported_as_such() -> None:
    with pytest.raises(HookError, match="the law 'repeatable' does not hold"):
        check_hook(Guesses())


def test_a_forgotten_share_is_reported_as_such() -> None:
    with pytest.raises(
        HookError, match=r"with 1 of 2 ranks that have inputs, .* Multiply a mean over all ranks by `turn.share`"
    ):
        check_hook(ForgetsDivisor())
