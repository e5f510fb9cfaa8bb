"""The state of a hook in torch.distributed.checkpoint (dcp)."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from gradwire.errors import UsageError
from gradwire.reducer.hook.runner import HookRunner


class CheckpointedHook:
    """What runs a hook, and is a Stateful of dcp: `dcp.save({"hook": this})` on every rank saves the state of every rank. A plain
    dict does not: dcp keeps one rank's copy of what all ranks save under the same key."""

    _runner: HookRunner
    _device: torch.device
    """Where states are loaded."""

    def hook_state_dict(self) -> dict[str, Any]:
        """The hook's state on this rank: see `Replica.hook_state_dict`."""
        return self._runner.state_dict()

    def load_hook_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore a saved state, of the same shards. Every rank of the group calls it, between steps."""
        self._load(saved, self._device)

    def _load(self, saved: Mapping[str, Any], device: torch.device) -> None:
        self._runner.load_state_dict(saved, device=device)  # first: if one rank cannot load, all ranks raise
        theirs, own = saved.get("rank", 0), self._runner.group.rank
        # Then this rank has saved a state too. (A new rank loads that of rank 0.)
        if theirs > own and saved.get("state"):
            warnings.warn(
                f"load_hook_state_dict of {self}: this is the state of rank {theirs} of the group, and this is rank {own}, so what "
                "belongs to one rank alone is not loaded. torch.distributed.checkpoint keeps one rank's copy of a dict: pass the "
                'object instead, dcp.save({"hook": hook}), or save a file for each rank.',
                stacklevel=3,
            )

    def state_dict(self) -> dict[str, Any]:
        """The same for `dcp.save({"hook": this, ...})`: under a key of this rank, as bytes, since a checkpoint is loaded into
        tensors that exist, and before the first step there are none."""
        saved = io.BytesIO()
        torch.save(self.hook_state_dict(), saved)
        return {self._checkpoint_key: saved.getvalue()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave; `dcp.load({"hook": this, ...})` calls it."""
        if self._checkpoint_key not in saved:
            raise UsageError(
                f"load_state_dict of {self}: there is no {self._checkpoint_key!r}, only {', '.join(map(repr, saved))}. Pass what "
                "state_dict() of the same rank gave."
            )
        self.load_hook_state_dict(torch.load(io.BytesIO(saved[self._checkpoint_key]), weights_only=True))

    @property
    def _checkpoint_key(self) -> str:
        return f"rank {dist.get_rank() if dist.is_initialized() else self._runner.group.rank}"
