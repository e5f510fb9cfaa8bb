"""Optimizers for hooks that keep the momentum: `SignSGD` for `decoupled_momentum`, and `Dion` for `dion`."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.errors import UsageError


class _PerParameter(torch.optim.Optimizer):
    """An optimizer that updates one parameter after another."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay"):
            value = defaults[name]
            if not (value >= 0 and math.isfinite(value)):
                raise UsageError(
                    f"{type(self).__name__}({name}={value}): negative or not finite. Pass a number of at least 0."
                )
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step; `closure`, if given, recomputes the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse or p.grad.is_complex():
                    kind = "sparse" if p.grad.is_sparse else "complex"
                    raise UsageError(
                        f"{type(self).__name__} on a parameter of shape {list(p.shape)}: its gradient is {kind}. Use another "
                        "optimizer."
                    )
                if group["weight_decay"]:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                self._update(p, p.grad, group)
        return loss

    @abstractmethod
    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Move `p`, whose weight decay is done."""


class SignSGD(_PerParameter):
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
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        p.add_(_sign(grad), alpha=-group["lr"])


class Dion(_PerParameter):
    """Dion (arXiv 2504.05295), with the hook `dion`, which keeps the momentum of matrices and returns the direction of their steps.

    A matrix of m x n, that is a parameter of two or more dimensions, moves by lr sqrt(m / n) along its direction. Vectors and
    scalars, and all parameters of a group with `algorithm="lion"`, are updated by Lion with `betas`, from their averaged gradients:
    the same lr suits all. Embeddings belong into such a group, and the hook must average them:

        model.set_hook(partition({"embedding.*": mean(), "*": dion(rank=64)}))
        Dion([{"params": matrices_and_vectors}, {"params": embedding.parameters(), "algorithm": "lion"}], lr=0.01)

    Without the hook a matrix moves along its plain gradient: in a world of several ranks the first such step warns.

    >>> p = torch.nn.Parameter(torch.ones(4, 1))
    >>> p.grad = torch.tensor([[0.5], [0.5], [-0.5], [0.5]])  # of unit length, as the hook returns it
    >>> Dion([p], lr=0.1).step()
    >>> p.data.T
    tensor([[0.9000, 0.9000, 1.1000, 0.9000]])
    """

    hook_ran: ClassVar[bool] = False
    """Whether the hook has reduced a matrix in this process."""
    _checked = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        *,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.95, 0.98),
        algorithm: str = "dion",
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "algorithm": algorithm})
        for group in self.param_groups:
            if group["algorithm"] not in ("dion", "lion"):
                raise UsageError(f"Dion(algorithm={group['algorithm']!r}): unknown. Pass 'dion' or 'lion'.")

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if p.dim() > 1 and group["algorithm"] == "dion" and p.numel():
            if not self._checked:
                self._checked = True
                self._warn_without_hook()
            p.add_(grad, alpha=-group["lr"] * math.sqrt(p.shape[0] / (p.numel() / p.shape[0])))
            return
        beta1, beta2 = group["betas"]
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p)
        p.add_(_sign(state["momentum"].lerp(grad, 1 - beta1)), alpha=-group["lr"])
        state["momentum"].lerp_(grad, 1 - beta2)

    def _warn_without_hook(self) -> None:
        if not Dion.hook_ran and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            warnings.warn(
                "Dion makes its first step, but no gradient of a matrix was reduced by the hook dion(rank), which computes the "
                "direction of the step: matrices move along their plain gradients. Call model.set_hook(hooks.dion(rank)) of "
                'gw.DistributedDataParallel, or give matrices that the hook leaves out algorithm="lion".',
                stacklevel=6,  # of step(), under two decorators of torch
            )


def _sign(t: Tensor) -> Tensor:
    """As torch.sign, but of NaN it is NaN."""
    return torch.where(t.isnan(), t, torch.sign(t))
