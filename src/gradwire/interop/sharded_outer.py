"""Outer steps on shards: hooks such as `diloco` between islands of ranks, each of which shares one model by FSDP2.

Local SGD and DiLoCo are elementwise, so each rank runs them on its own shards, with the ranks that hold the same shards on other
islands. A parameter is in the fragment in which it would be without sharding.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gradwire.collectives import broadcast
from gradwire.errors import UsageError
from gradwire.groups.base import Group
from gradwire.hooks.arguments import check_hooks
from gradwire.hooks.base import CommHook
from gradwire.hooks.periodic.base import OuterHook
from gradwire.interop.checkpointed_hook import CheckpointedHook
from gradwire.reducer.buckets.layout import plain_name
from gradwire.reducer.hook.outer_optimizer import local
from gradwire.reducer.hook.runner import HookRunner


class ShardedOuterSteps(CheckpointedHook):
    """See `outer_steps_on_shards`."""

    def __init__(self, hook: OuterHook, group: Group, named: list[tuple[str, Tensor]]) -> None:
        self._device = named[0][1].device
        with torch.no_grad():
            for name, parameter in named:
                group.submit(broadcast(local(parameter.detach()), src=0, label=name)).wait()
        self._runner = HookRunner(hook, group, [(name, p) for name, p in named if p.requires_grad])

    def outer_step(self) -> None:
        """The optimizer has made a step. Called after each step of attached optimizers; call it yourself without one."""
        assert self._runner.outer is not None
        self._runner.outer.step_or_abort()

    def _step_begins(self, *_: object) -> None:
        if self._runner.outer is not None:
            self._runner.outer.training_begins()

    def average_parameters(self) -> None:
        """Average the parameters over all islands, after a hook that lets them differ. Every rank calls it."""
        self._runner.average_parameters()

    def close(self) -> None:
        """Do nothing any more after the optimizer's steps."""
        self._runner.close()

    def __repr__(self) -> str:
        return f"ShardedOuterSteps({self._runner.hook!r}, {self._runner.group})"


def outer_steps_on_shards(
    hook: CommHook, group: Group, named_parameters: Iterable[tuple[str, Tensor]], *optimizers: torch.optim.Optimizer
) -> ShardedOuterSteps:
    """Run the outer steps of `hook`, such as `diloco`, on an FSDP2 model after the steps of `optimizers`.

    `group` are the ranks that hold the same shards on the other islands: the model is sharded over one dimension of a mesh, or over
    two in an island of several hosts, and `group` is that of another dimension, over which FSDP does not average:
    `gw.from_process_group(mesh.get_group("island"))`. Parameters are made those of the first island. Keep the result. Without an
    optimizer, call its `outer_step()` after each step, and load checkpoints before you make it.

    Memory and bytes are those of the hook, for a shard. With `mean()` inside, the bits are those of an unsharded model.
    """
    check_hooks("outer_steps_on_shards", hook=hook)
    named = [(plain_name(name), p) for name, p in named_parameters]
    if not isinstance(hook, OuterHook):
        raise UsageError(
            f"outer_steps_on_shards({hook!r}): it has no outer steps. Pass a hook such as diloco(every=...), or use as_fsdp_hook."
        )
    if not any(p.requires_grad for _, p in named):
        raise UsageError(
            f"outer_steps_on_shards({hook!r}): no parameter requires a gradient. Pass model.named_parameters() of the model."
        )
    made = ShardedOuterSteps(hook, group, named)
    if optimizers:
        made._runner.attach_optimizer(optimizers, made.outer_step)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(made._step_begins)
    return made
