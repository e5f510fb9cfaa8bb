"""`visible`: a stage for hooks inside `diloco`, which sends only what changes a parameter in the dtype of computation.

After PULSELoCo (arXiv 2602.03839): models are computed in bfloat16 and trained in float32, and most of the progress of a round of
fine-tuning is too small to change the bfloat16 value of its parameter. The next forward would not see it, so it can wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import UsageError
from gradwire.hooks.arguments import NamedStage
from gradwire.hooks.base import Reduction, Stage, Trait, Turn
from gradwire.hooks.composite import Reduce, Wrapped


@dataclass(frozen=True, slots=True, repr=False)
class Visible(Wrapped):
    dtype: torch.dtype

    made_by = "visible"
    dense_only = True
    adds = Trait.ANCHORED

    def around(self, reduce: Reduce, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        """Reduce the elements of the progress that change the anchor's value in `dtype`, and zeros for the others."""
        anchor = turn.anchor
        if anchor is None or anchor.numel() != grad.numel():
            raise UsageError(
                f"{self!r}: the parameters that these {grad.numel()} elements belong to are not known here. Use it in the hook of "
                "diloco(), and to the left of random_k() and outside hierarchical()."
            )
        unseen = anchor.to(self.dtype) == (anchor - grad).to(self.dtype)  # a NaN is always sent
        return (yield from reduce(grad.masked_fill(unseen, 0), state, turn))


def visible(dtype: torch.dtype) -> Stage:
    """Send only the elements that change the value of their parameter in `dtype`, such as torch.bfloat16. (arXiv 2602.03839)

    It belongs into the hook of `diloco`, where a gradient is a rank's progress since the anchor: an element is sent if the anchor
    minus it is another number in `dtype` than the anchor. Put `error_feedback()` to its left, which keeps the others until their
    sum is visible, and to its right a hook that does not send zeros:

        diloco(every=8, hook=chain(error_feedback(), visible(torch.bfloat16), threshold(value=0.0)))

    On the wire: as the inner hook; with `threshold`, for n ranks, (n - 1) (8 + 8 k) bytes for k visible elements.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(
            f"visible({dtype!r}): not a floating-point dtype. Pass that of the forward, e.g. torch.bfloat16."
        )
    return NamedStage(f"visible({dtype})", lambda inner: Visible(inner, dtype))
