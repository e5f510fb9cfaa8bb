"""torch's own communication hooks, with their settings, for comparison with ours. Imported only where they are measured, since
some are slow to import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

Hook = tuple[Any, Callable[[Any, Any], Any]]
"""The arguments of `register_comm_hook`: a state, and a function of it and a bucket."""


DENSE_STEPS = 2
"""Steps of `power_sgd` before it compresses."""


def fp16(process_group: Any) -> Hook:
    """`fp16_compress_hook`."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return process_group, default_hooks.fp16_compress_hook


def bf16(process_group: Any) -> Hook:
    """`bf16_compress_hook`."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return process_group, default_hooks.bf16_compress_hook


def allreduce(process_group: Any) -> Hook:
    """`allreduce_hook`."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return process_group, default_hooks.allreduce_hook


def quantize(process_group: Any) -> Hook:
    """`quantization_pertensor_hook`: 8 bits, one scale for the bucket."""
    from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks

    return process_group, quantization_hooks.quantization_pertensor_hook


def quantize_channels(process_group: Any) -> Hook:
    """`quantization_perchannel_hook`: 8 bits, a scale for every 512 elements."""
    from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks

    return process_group, quantization_hooks.quantization_perchannel_hook


def power_sgd(process_group: Any) -> Hook:
    """`powerSGD_hook` with rank 4, from the third step on, the first that it allows with error feedback; before that, dense."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(process_group, matrix_approximation_rank=4, start_powerSGD_iter=DENSE_STEPS)
    return state, powerSGD_hook.powerSGD_hook


# Its batched_powerSGD_hook is not here: it fails an assertion of its own when it first compresses (torch 2.11 to 2.13).
TORCH_HOOKS: Mapping[str, Callable[[Any], Hook]] = MappingProxyType(
    {
        "torch-allreduce": allreduce,
        "torch-fp16": fp16,
        "torch-bf16": bf16,
        "torch-powersgd": power_sgd,
    }
)
NCCL_HOOKS: Mapping[str, tuple[Callable[[Any], Hook], Callable[[int], float]]] = MappingProxyType(
    {
        "torch-quantize": (quantize, lambda numel: numel + 8),
        "torch-quantize-channels": (quantize_channels, lambda numel: (numel // 512 + 1) * (512 + 8)),
    }
)
"""Those that read the result of an all-gather in a form that only NCCL returns, so they run on neither gloo nor a group in Python;
with the bytes that a rank sends to each of the others: one byte per element, and a scale and a zero point as float32."""
LEFT_OUT = (
    "torch's quantization hooks run only on CUDA: they read an all-gather's result in a form that only NCCL returns."
)
