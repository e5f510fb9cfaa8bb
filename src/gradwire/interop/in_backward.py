"""Optimizers that step inside backward, as torch arranges them: `_apply_optimizer_in_backward` and fused optimizers.

torch implements both as communication hooks that use the model's reducer; they run unchanged on ours.
"""

from __future__ import annotations

import weakref
from typing import Any

from gradwire.errors import OverlapNotSupported


def optimizer_in_backward_hook(ddp: Any) -> None:
    """If parameters have their own optimizers, step each one only when its bucket has been reduced."""
    parameters = [p for p in ddp._module_parameters if hasattr(p, "_in_backward_optimizers")]
    if not parameters:
        return
    from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import _apply_optim_in_backward_hook
    from torch.distributed.optim import apply_optimizer_in_backward

    # They were registered to step as soon as a gradient is ready; now they wait for its average.
    handles = apply_optimizer_in_backward.param_to_optim_hook_handle_map
    for parameter in ddp._module_parameters:
        for handle in handles.get(parameter, []):
            handle.remove()
    hook = _apply_optim_in_backward_hook(gradient_is_bucket_view=ddp.gradient_as_bucket_view)
    ddp.register_comm_hook(weakref.ref(ddp), hook)
    ddp.reducer._set_optimizer_in_backward()


def register_fused_optimizer(ddp: Any, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
    """Run a functional form of `optim` on each parameter right after its reduction."""
    from torch.distributed.algorithms._optimizer_overlap.optimizer_overlap import _as_overlapped_optim

    overlapped = _as_overlapped_optim(optim, optim_params, *args, **kwargs)
    try:
        overlapped.register_ddp(ddp)
    except NotImplementedError as error:
        raise OverlapNotSupported(f"{optim} does not support overlapped DDP.") from error
