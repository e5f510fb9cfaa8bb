"""error_feedback: what was not sent is sent later, in place, without keeping NaN; the same bits compiled or not."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.collectives import ReduceOp, all_reduce
from gradwire.errors import UsageTypeError
from gradwire.hooks import (
    BucketSpec,
    CommHook,
    Reduced,
    Reduction,
    Turn,
    cast,
    chain,
    error_feedback,
    mean,
    quantize,
    top_k,
)
from gradwire.hooks.combinators import feedback
from gradwire.runtime import jit
from gradwire.testing import check_hook, simulate
from gradwire.testing.laws import Gathered
from gradwire.testing.simulate import one_parameter


class Whole(CommHook):
    """Sends integers only."""

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        sent = grad.trunc()
        value = sent.clone()
        yield all_reduce(value, op=ReduceOp.AVG)
        return Reduced(value * turn.share, sent)


def run(
    hook: CommHook, gradients: list[list[float]], steps: int, dtype: torch.dtype = torch.float32
) -> list[list[float]]:
    states: Any = None
    values = []
    for step in range(steps):
        done = simulate(hook, [torch.tensor(g, dtype=dtype) for g in gradients], states=states, step=step)
        states = done.states
        values.append(done.reduced[0].value.tolist())
    return values


def test_the_residual_is_sent_once_it_is_large_enough() -> None:
    assert run(chain(error_feedback(), Whole()), [[0.5, 1.25]], 4) == [[0.0, 1.0], [1.0, 1.0], [0.0, 1.0], [1.0, 2.0]]


@pytest.mark.parametrize("hook", [Whole(), quantize(bits=8)], ids=repr)  # one that has kernels for feedback
def test_a_residual_that_decays_is_a_momentum_of_what_was_not_sent(hook: CommHook) -> None:
    fed = chain(error_feedback(decay=0.5), hook)
    check_hook(fed)
    assert repr(fed) == f"error_feedback(decay=0.5) > {hook!r}"
    assert repr(error_feedback(decay=0.5)) == "error_feedback(decay=0.5)"
    assert fed.structure == chain(error_feedback(), hook).structure
    state = fed.init(one_parameter(torch.zeros(1)))
    state["residual"].fill_(0.5)
    done = simulate(fed, [torch.tensor([1.0])], states=[state], donated=True)
    assert float(done.reduced[0].sent + state["residual"]) == pytest.approx(1.25)
    if hook.scatters:
        spec = one_parameter(torch.zeros(512))
        whole, scattered = (fed.init(spec) for _ in range(2))
        for state, form in ((whole, fed), (scattered, Gathered(fed))):
            state["residual"].copy_(torch.linspace(-1, 1, 512))
            simulate(form, [torch.randn(512, generator=torch.Generator().manual_seed(0))], states=[state], donated=True)
        torch.testing.assert_close(scattered["residual"], whole["residual"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_every_dtype_obeys_the_laws(dtype: torch.dtype) -> None:
    """On one rank, and on more than two, in float32 only."""
    more: dict[str, Any] = {} if dtype is torch.float32 else {"world_sizes": (2,)}
    check_hook(chain(error_feedback(), mean()), dtype=dtype, **more)
    if not dtype.is_complex:
        check_hook(chain(error_feedback(), top_k(ratio=0.2)), dtype=dtype, world_sizes=(2,))


@pytest.mark.parametrize(("dtype", "small"), [(torch.bfloat16, 2.0**-10), (torch.float16, 2.0**-13)], ids=str)
def test_small_errors_of_narrow_gradients_are_not_rounded_away(dtype: torch.dtype, small: float) -> None:
    hook = chain(error_feedback(), Whole())
    done = simulate(hook, [torch.tensor([0.99], dtype=dtype)])
    sent = 0.0
    for step in range(1, 100):
        done = simulate(hook, [torch.tensor([small], dtype=dtype)], states=done.states, step=step)
        sent += done.reduced[0].value.item()
    assert sent == 1.0


def test_the_residual_of_narrow_gradients_is_wide_and_is_saved_so() -> None:
    hook = chain(error_feedback(), Whole())
    done = simulate(hook, [torch.tensor([1.5], dtype=torch.bfloat16)])
    assert done.reduced[0].value.dtype == torch.bfloat16
    spec = BucketSpec(0, ("p",), ((1,),), ((1,),), torch.bfloat16, torch.device("cpu"))
    saved = hook.save(done.states[0], spec)["p"]["residual"]
    assert saved.dtype == torch.float32
    assert hook.save(hook.load({"p": {"residual": saved}}, spec), spec)["p"]["residual"].tolist() == [0.5]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_step_leaves_no_residual(bad: float) -> None:
    hook = chain(error_feedback(), cast(torch.bfloat16), mean())
    first = simulate(hook, [torch.tensor([1.0, bad])])
    assert not first.reduced[0].value[1].isfinite()
    second = simulate(hook, [torch.tensor([1.0, 2.0])], states=first.states, step=1)
    assert second.reduced[0].value.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_same_bits_without_numba(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = torch.randn(1001, dtype=dtype)
    wanted[7], wanted[8], wanted[9] = float("nan"), float("inf"), 1e-42
    sent = wanted.bfloat16().to(dtype)
    compiled, plain = wanted.clone(), wanted.clone()
    feedback._keep_unsent(compiled, sent)
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(feedback, "_subtract", jit.loop(feedback._subtract._function))
    jit._njit.cache_clear()
    try:
        feedback._keep_unsent(plain, sent)
    finally:
        jit._njit.cache_clear()
    assert torch.equal(compiled, plain)
    assert plain.isfinite().all()


def test_a_hook_as_argument_is_an_error_that_shows_what_to_write() -> None:
    with pytest.raises(UsageTypeError, match=r"takes no hook. Use chain\(error_feedback\(\), mean\(\)\)"):
        error_feedback(mean())
