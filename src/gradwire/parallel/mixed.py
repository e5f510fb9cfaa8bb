"""DDP's mixed precision: parameters, inputs and gradients in a narrow dtype during a step, full precision between steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from gradwire.hooks.base import CommHook
from gradwire.hooks.combine import chain
from gradwire.hooks.dense import cast, mean


class MixedPrecision:
    """Swaps parameters' data for narrow copies before forward and back when a bucket has been reduced."""

    def __init__(self, module: nn.Module, config: Any) -> None:
        self.config = config
        self._parameters = [p for p in module.parameters() if not getattr(p, "_ddp_ignored", False)]
        for parameter in self._parameters:
            parameter._fp_param = parameter.data  # type: ignore[attr-defined]  # torch's names: others look for them
            parameter._mp_param = torch.empty(0, dtype=config.param_dtype or parameter.dtype)  # type: ignore[attr-defined]
        if config.buffer_dtype is not None:
            for buffer in module.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.to(config.buffer_dtype)

    def narrow(self) -> None:
        """Before forward: every parameter computes in the narrow dtype."""
        dtype = self.config.param_dtype
        if dtype is None:
            return
        with torch.no_grad():
            for p in self._parameters:
                if p.dtype == dtype:
                    continue
                p._fp_param = p.data  # type: ignore[attr-defined]
                p._mp_param = p.data.to(dtype)  # type: ignore[attr-defined]
                if p.grad is not None:
                    p.grad.data = p.grad.to(dtype)
                p.data = p._mp_param  # type: ignore[attr-defined]

    def widen(self) -> None:
        """After backward: parameters and gradients are full precision again."""
        with torch.no_grad():
            for p in self._parameters:
                full = p._fp_param  # type: ignore[attr-defined]
                if p.data_ptr() != full.data_ptr() or p.dtype != full.dtype:
                    grad, p.grad = p.grad, None
                    p.data = full
                    if grad is not None:
                        p.grad = grad.to(full.dtype)
                    p._mp_param = torch.empty(0, dtype=p._mp_param.dtype)  # type: ignore[attr-defined]

    def hook(self) -> CommHook:
        """Reduce in the dtype the configuration names."""
        dtype = self.config.reduce_dtype
        return mean() if dtype is None or dtype == self.config.param_dtype else chain(cast(dtype), mean())

    def cast(self, values: Any) -> Any:
        """Inputs in the dtype that forward computes in."""
        dtype = self.config.param_dtype
        if dtype is None:
            return values
        return tree_map(lambda v: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v, values)
