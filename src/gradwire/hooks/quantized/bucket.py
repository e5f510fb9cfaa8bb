"""A bucket as quantised hooks take it: real numbers in one row."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.errors import UsageError
from gradwire.hooks.base import Turn


def as_real(grad: Tensor) -> Tensor:
    """The gradient, in its own memory, as real numbers in one row."""
    return torch.view_as_real(grad).view(-1) if grad.is_complex() else grad.view(-1)


def as_given(flat: Tensor, grad: Tensor) -> Tensor:
    """Such a row in the gradient's dtype."""
    if grad.is_complex():
        return torch.view_as_complex(flat.view(-1, 2)).to(grad.dtype)
    return flat.to(grad.dtype)


def refuse_sparse(hook: str, turn: Turn) -> UsageError:
    """What to raise where rows of an embedding meet a hook for dense gradients."""
    return UsageError(
        f"{hook} on {turn.spec}: sparse gradients are not quantised. Give their parameters mean(), "
        'by partition({"embedding.*": mean(), "*": ...}).'
    )
