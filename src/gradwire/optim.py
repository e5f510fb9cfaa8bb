"""`SignSGD`: the optimizer for the hook `decoupled_momentum`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import UsageError


class SignSGD(torch.optim.Optimizer):
    """Step every element by the same amount, along the gradient's sign: p = (1 - lr weight_decay) p - lr sign(grad).

    It has no state: the momentum is in the hook, before the average. An element whose gradient is zero does not move; one whose
    gradient is NaN becomes NaN. (signSGD, arXiv 1802.04434; with `decoupled_momentum`, arXiv 2411.19870)

    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> p.grad = torch.tensor([-0.3, 7.0])
    >>> SignSGD([p], lr=0.5).step()
    >>> p.data
    tensor([1.5000, 1.5000])
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, *, weight_decay: float = 0.0) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not (value >= 0 and math.isfinite(value)):
                raise UsageError(f"SignSGD({name}={value}): negative or not finite. Pass a number of at least 0.")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step; `closure`, if given, recomputes the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    _step(p, p.grad, group["lr"], group["weight_decay"])
        return loss


def _step(p: Tensor, grad: Tensor, lr: float, weight_decay: float) -> None:
    if grad.is_sparse or grad.is_complex():
        kind = "sparse" if grad.is_sparse else "complex"
        raise UsageError(
            f"SignSGD on a parameter of shape {list(p.shape)}: its gradient is {kind}. Use another optimizer."
        )
    if weight_decay:
        p.mul_(1 - lr * weight_decay)
    sign = torch.sign(grad)
    p.add_(torch.where(grad.isnan(), grad, sign), alpha=-lr)
