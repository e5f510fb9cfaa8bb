"""Error feedback: what a lossy hook did not send in one step is added to the next step's gradient.

After Seide et al. 2014 (1-bit SGD) and Karimireddy et al. 2019 (arXiv 1901.09847), who prove convergence: errors do not
accumulate, because each is corrected a step later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import UsageTypeError
from gradwire.hooks.arguments import NamedStage, checks_arguments, refuse_traits
from gradwire.hooks.base import CommHook, Reduced, Reduction, Stage, Trait, Turn
from gradwire.hooks.composite import Composite, Reduce, Wrapped
from gradwire.hooks.numerics.elementwise import GPU_KERNELS, drop_nonfinite_
from gradwire.runtime.jit import kernels, loop

_REFUSED = {
    Trait.REMEMBERS: "the inner hook already keeps what it did not send, so it would be sent twice. Remove one of them.",
    Trait.VOTES: "the error of a vote cannot be fed back, and the residual would grow from step to step. Remove "
    'error_feedback(), or use a hook that averages, such as sign(scale="mean").',
    Trait.LOCAL: "it leaves gradients on their rank, so there is no error to feed back.",
    Trait.WEIGHS: "it multiplies what a rank sends by its share of all samples, which would count as an error and be fed back, "
    "growing from step to step. Remove error_feedback(), or multiply each rank's loss by its share and use mean().",
    Trait.DISTORTS: "a stage inside changes gradients on purpose, and the change would be undone in the next step. Put clip() "
    "and add_noise() to the left of error_feedback().",
}


@dataclass(frozen=True, slots=True, repr=False)
class ErrorFeedback(Composite, Wrapped):
    decay: float = 1.0

    made_by = "error_feedback"
    dense_only = True
    adds = Trait.REMEMBERS
    traits = Wrapped.traits
    tensors = owes = ("residual",)

    @property
    def parts(self) -> Mapping[str, CommHook]:
        return {"inner": self.inner}

    def __post_init__(self) -> None:
        refuse_traits(f"error_feedback() around {self.inner!r}", self.inner, _REFUSED)

    def around(self, reduce: Reduce, grad: Tensor, state: dict[str, Any], turn: Turn) -> Reduction:
        """Reduce the gradient plus the residual; the new residual is what was not sent of it."""
        residual, inner = state["residual"], state["inner"]
        if self.decay != 1:
            residual.mul_(self.decay)
        if self.inner.adds_residual(grad, residual, inner, turn):
            return (yield from reduce(grad, inner, replace(turn, residual=residual)))
        # In place: the sum replaces the residual, and the new residual the sum, so that no memory is allocated.
        wanted = residual.add_(grad)
        # The rounding of 16-bit gradients is part of the residual, which is float32; otherwise `rounded` is `wanted` itself.
        rounded = wanted.to(grad.dtype)
        room = grad if turn.donated and self.inner.uses_room else None
        value, sent = yield from reduce(rounded, inner, replace(turn, donated=False, room=room))
        value, sent = (t.clone() if _shares(t, wanted) else t for t in (value, sent))
        _keep_unsent(wanted, sent)
        return Reduced(value, sent)

    def capture_key(self, turn: Turn) -> Any:
        return self.inner.capture_key(turn)

    def __repr__(self) -> str:
        return f"{_call(self.decay)} > {self.inner!r}"


def _call(decay: float) -> str:
    return "error_feedback()" if decay == 1 else f"error_feedback(decay={decay})"


def _keep_unsent(wanted: Tensor, sent: Tensor) -> None:
    """`wanted -= sent`, then `drop_nonfinite_`; in one pass if numba, or on CUDA Triton, is available."""
    whole = wanted.is_cuda and wanted.dtype == torch.float32 and sent.is_contiguous()
    if whole and (triton := kernels(GPU_KERNELS)) is not None:
        triton.keep_unsent(wanted, sent)
        return
    fits = wanted.is_cpu and wanted.dtype in _COMPILED and sent.dtype == wanted.dtype and sent.is_contiguous()
    fast = _subtract.compiled() if fits else None
    if fast is None:
        drop_nonfinite_(wanted.sub_(sent))
    else:
        fast(wanted.numpy(), sent.view(-1).numpy())


_COMPILED = (torch.float32, torch.float64)


@loop
def _subtract(wanted: Any, sent: Any) -> None:
    for i in range(wanted.shape[0]):
        owed = wanted[i] - sent[i]
        wanted[i] = owed if owed - owed == 0 else wanted.dtype.type(0)


def _shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@checks_arguments(decay="(0, 1]")
def error_feedback(*hooks: object, decay: float = 1.0) -> Stage:
    """Add what was not sent in a step to the next step's gradient. On the wire: as the inner hook.

    Every lossy hook (quantize, sign, top_k, random_k, threshold, power_sgd) needs it. Memory: one tensor of the bucket's size, in
    float32 for 16-bit gradients. The residual belongs to its rank: a rank that joins later starts with zeros. Non-finite values are
    not kept, so a NaN affects one step. The finite rest of a step that a loss scaler skips is kept, and sent at the old scale.
    With a `decay` below 1 the residual is multiplied by it in each step: it acts as a momentum, and old errors are forgotten.
    """
    if hooks:
        given = ", ".join(map(repr, hooks))
        raise UsageTypeError(
            f"error_feedback({given}): it is a stage, which takes no hook. Use chain(error_feedback(), {given})."
        )
    return NamedStage(_call(decay), lambda inner: ErrorFeedback(inner, decay))
