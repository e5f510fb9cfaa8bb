"""torch's Join for uneven inputs, re-exported, and what a joined rank does while others still train.

A rank that has run out of inputs shadows the others' collectives: buffers, the question whether this step synchronises, one
reduction of zeros per bucket, the map of used parameters.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch.distributed.algorithms.join import Join, Joinable, JoinHook


class Shadow(Protocol):
    """What a model must offer to be joined."""

    def shadow_step(self) -> None:
        """Match the collectives of one step of the ranks that still have inputs."""

    def sync_final(self, is_last_joiner: bool) -> None:
        """Make everybody's parameters those of a rank that joined last."""


class ShadowHook(JoinHook):
    """Runs `shadow_step` until all ranks have joined, then `sync_final`."""

    def __init__(self, model: Shadow) -> None:
        self._model = model

    def main_hook(self) -> None:
        """One step of the others."""
        self._model.shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have joined."""
        self._model.sync_final(is_last_joiner)


def notify(model: Joinable) -> Any:
    """Tell the join context that this rank still has inputs; the Work of its count of such ranks, if there is a context."""
    return Join.notify_join_context(model)


__all__ = ["Join", "JoinHook", "Joinable", "Shadow", "ShadowHook", "notify"]
