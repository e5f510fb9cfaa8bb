"""Tensors on other devices: ranks share memory of the host only, so these are copied to it and back."""

from __future__ import annotations

import warnings

import torch

_WARNED: list[str] = []


def warn_of_copies(device: torch.device, size: int) -> None:
    """One warning for each process, when memory for a gradient bucket on a CUDA device is asked for."""
    if device.type != "cuda" or size == 1 or _WARNED:
        return
    text = (
        f"gradients on {device} are copied to the host and back in every step: shared memory, which carries them between the "
        f"{size} ranks, is the host's. Give every rank a GPU of its own, and gw.init() takes NCCL (`gradwire run --nproc gpu`)."
    )
    _WARNED.append(text)
    warnings.warn(text, RuntimeWarning, stacklevel=4)
