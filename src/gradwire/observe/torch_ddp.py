"""Records the forward passes of torch's own DistributedDataParallel, which scripts keep that do not call gradwire."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire.recorder import writer
from gradwire.recorder.format import RecordKind
from gradwire.recorder.writer import Member, Place


def is_torchs_own() -> bool:
    """Whether torch's name stands for torch's class: `gradwire run --replace-ddp` puts ours there, which records itself."""
    return DistributedDataParallel.__module__ == "torch.nn.parallel.distributed"


class ForwardRecords:
    """Records when a forward of torch's DDP begins and ends, until it is removed. Backward ends with the optimizer's step."""

    def __init__(self, rank: int) -> None:
        self._original: Any = DistributedDataParallel.forward
        self._step = -1
        original, member = self._original, Member(rank=rank)

        @functools.wraps(original)
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            recorder = writer.active
            if recorder is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return original(module, *args, **kwargs)
            self._step += 1
            recorder.put(RecordKind.FORWARD_BEGAN, member, place=Place(self._step))
            result = original(module, *args, **kwargs)
            recorder.put(RecordKind.FORWARD_ENDED, member, place=Place(self._step))
            return result

        self._own: Any = forward
        setattr(DistributedDataParallel, "forward", forward)  # noqa: B010

    def remove(self) -> None:
        """Stop recording."""
        if DistributedDataParallel.forward is self._own:
            setattr(DistributedDataParallel, "forward", self._original)  # noqa: B010
