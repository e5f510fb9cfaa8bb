"""gradwire's hooks inside FSDP2 (`torch.distributed.fsdp.fully_shard`), at its two extension points.

`set_all_reduce_hook`: after a module's gradients were reduced and scattered over its shards, the hook averages each rank's shard
over the replicas of the model. `set_custom_reduce_scatter`: the hook replaces the reduce-scatter itself.

Note [What a shard's bucket is]
FSDP passes its hook one flat tensor per module: this rank's shard of each parameter, each padded to the size of the largest shard.
That is the bucket that the hook sees. If the tensor has another length (some parameters got no gradient in this step) the bucket is
one unnamed row with a separate state, and a warning is given the first time.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradwire.collectives import ReduceOp
from gradwire.errors import UsageError
from gradwire.groups.base import Group
from gradwire.hooks.arguments import check_hooks
from gradwire.hooks.base import CommHook
from gradwire.hooks.bucket import BucketSpec, GradBucket
from gradwire.interop.checkpointed_hook import CheckpointedHook
from gradwire.interop.fsdp_checks import CheckedModule, FsdpChecks
from gradwire.interop.process_group_base import translate_reduce_op
from gradwire.reducer.buckets.layout import plain_name
from gradwire.reducer.hook.runner import HookRunner
from gradwire.reducer.model_events import ModelEvents


class FsdpReduction(CheckpointedHook):
    """One hook on the gradients of one FSDP module."""

    _doing: ClassVar[str]
    _advice: ClassVar[str]
    """What to do about a gradient that is not finite."""
    _scatters: ClassVar[bool]
    """Whether what it reduces has a row for each rank, and the result is this rank's."""

    def __init__(
        self, hook: CommHook, group: Group, named_parameters: Iterable[tuple[str, Tensor]], checks: FsdpChecks | None
    ) -> None:
        doing = self._doing
        check_hooks(doing, hook=hook)
        if hook.local:
            raise UsageError(
                f"{doing}({hook!r}): it averages parameters after the optimizer's step, not gradients. Use "
                "outer_steps_on_shards, or a hook that averages gradients."
            )
        named = [(plain_name(name), parameter) for name, parameter in named_parameters]
        parts = [(name, _shard_shape(name, p, doing)) for name, p in named]
        if self._scatters:
            parts = [(f"{name} (shard {r})", shape) for r in range(group.size) for name, shape in parts]
        like = named[0][1] if named else torch.empty(0, device="cpu")
        if parts:  # checked again with the first gradient, which may have another dtype
            hook.check(_bucket(parts, 0, like))
        self._parts: Sequence[tuple[str, tuple[int, ...]]] = parts
        self._rows = group.size if self._scatters else 1
        self._device = like.device
        self._runner = HookRunner(hook, group)
        self._events = ModelEvents(group)
        self._warned = False
        self._check: tuple[FsdpChecks, CheckedModule] | None = None
        if checks is not None:
            self._check = checks, checks.add(self._runner, parts, [p for _, p in named], self._advice)

    @torch.no_grad()
    def reduced(self, flat: Tensor) -> Tensor:
        """The average of `flat` over the group, or this rank's row of it; `flat` may be written to."""
        self._device = flat.device
        self._runner.states.next_step()
        # On CUDA this runs on FSDP's own stream, which the wait for each collective orders.
        runner, spec = self._runner, self._spec(flat)
        with self._events.reduction(spec, runner.step, hook=runner.name):
            return self._run(GradBucket(spec, flat, (), is_last=True))

    def _run(self, bucket: GradBucket) -> Tensor:
        reduce = self._runner.run if self._rows == 1 else self._runner.run_scattered
        if self._check is None:
            return reduce(bucket)
        checks, module = self._check
        return checks.run(module, bucket, reduce, self._row(bucket.spec), is_named=bucket.index() == 0)

    def _row(self, spec: BucketSpec) -> BucketSpec:
        """The part of a bucket that this rank gets."""
        if self._rows == 1:
            return spec
        each, more = divmod(len(spec.names), self._rows)
        if more:  # the bucket is one unnamed row
            return replace(spec, shapes=((spec.numel // self._rows,),))
        first = self._runner.group.rank * each
        return spec.select(range(first, first + each))

    def _spec(self, flat: Tensor) -> BucketSpec:
        parts = self._parts
        numel = sum(math.prod(shape) for _, shape in parts)
        if numel != flat.numel():
            if parts and not self._warned:
                self._warned = True
                warnings.warn(
                    f"{self._doing}: FSDP reduces {flat.numel()} elements, but the given parameters "
                    f"({', '.join(name for name, _ in parts)}) have {numel}. So the hook sees one unnamed row: no names, no "
                    "shapes, no state per parameter. Pass the parameters that get a gradient in every step, as "
                    "fsdp_parameters(model) yields them once parameters are frozen.",
                    stacklevel=2,
                )
            parts = ((f"{flat.numel()} elements", (flat.numel(),)),)
        return _bucket(parts, 0 if parts is self._parts else flat.numel(), flat)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._runner.hook!r}, {self._runner.group})"


class FsdpHook(FsdpReduction):
    """See `as_fsdp_hook`. Call it with the flat tensor, which is reduced in place."""

    _doing = "as_fsdp_hook"
    _advice = (
        "It is in that rank's shard, which holds the sum of all ranks that it shards with: look at the batches, losses and "
        "learning rates of these."
    )
    _scatters = False

    def __call__(self, flat: Tensor) -> None:
        """Average `flat` over the group, in place."""
        flat.copy_(self.reduced(flat))


def as_fsdp_hook(
    hook: CommHook,
    group: Group,
    *,
    named_parameters: Iterable[tuple[str, Tensor]] = (),
    checks: FsdpChecks | None = None,
) -> FsdpHook:
    """For `module.set_all_reduce_hook`: average the module's shards over `group`, the ranks that hold the same shards.

    The module is sharded over one dimension of a mesh, `fully_shard(module, mesh=mesh["shard"])`, and `group` is the other:
    `gw.from_process_group(mesh.get_group("replicate"))`. One hook per FSDP module, with the parameters that FSDP reduces together:
    `fsdp_parameters(model)` yields both. Without them nothing shows whether torch has averaged over the replicas itself, as with a
    2-D mesh or FSDP2's `replicate()`; with them that is refused.
    `checks`, one for all modules of the model, look for NaN and infinity.
    """
    return FsdpHook(hook, group, named_parameters, checks)


class FsdpReduceScatter(FsdpReduction):
    """See `as_fsdp_reduce_scatter`. It has the two methods of torch's `ReduceScatter`."""

    _doing = "as_fsdp_reduce_scatter"
    _advice = "It is in that shard. Look at that rank's batch, loss and learning rate."
    _scatters = True

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the full gradient, and for its shard."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Average the full gradient with the hook, and keep this rank's shard."""
        size = self._runner.group.size
        kind, factor = translate_reduce_op(op)
        if kind not in (ReduceOp.AVG, ReduceOp.SUM, ReduceOp.PREMUL_SUM) or async_op or group.size() != size:
            raise UsageError(
                f"{self._doing}: FSDP requests {op} over {group.size()} ranks, async_op={async_op}, but this hook "
                f"averages or sums over {size} ranks, synchronously. Pass the group that the module is sharded over."
            )
        output_tensor.copy_(self.reduced(input_tensor))
        if kind is not ReduceOp.AVG:
            output_tensor.mul_(size if factor is None else size * factor)


def as_fsdp_reduce_scatter(
    hook: CommHook,
    group: Group,
    *,
    named_parameters: Iterable[tuple[str, Tensor]] = (),
    checks: FsdpChecks | None = None,
) -> FsdpReduceScatter:
    """For `module.set_custom_reduce_scatter`: reduce the module's gradients over its shards with `hook`.

    Hooks that have a `reduce_scatter` send half of what they send elsewhere. Any other gives every rank the full average, of which
    FSDP keeps a shard: it pays off if it compresses more than twofold. `group` is the shards' group. `checks`, one for all modules
    of the model, look for NaN and infinity.
    """
    return FsdpReduceScatter(hook, group, named_parameters, checks)


def fsdp_parameters(model: nn.Module) -> Iterator[tuple[Any, list[tuple[str, nn.Parameter]]]]:
    """Every FSDP module in `model`, with the parameters that it reduces together, by full name.

    Those are the parameters that currently require grad: freeze parameters first, and call it again after a change. They are in
    FSDP's order, in which those of a module come after those of its children.
    """
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    owned: dict[Tensor, tuple[Any, list[tuple[str, nn.Parameter]]]] = {}
    for module in model.modules():
        if hasattr(module, "set_all_reduce_hook"):
            state: Any = module._get_fsdp_state()  # type: ignore[operator]
            # Modules that were passed to `fully_shard` as a list share a state. In older versions of torch it has one group.
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            infos = [parameter._module_info for group in filter(None, groups) for parameter in group.fsdp_params]
            together = [getattr(info.module, info.param_name) for info in infos]
            named = [(names[parameter], parameter) for parameter in together if parameter in names]
            owned.update((parameter, (module, named)) for _, parameter in named)
    yield from {id(owned[parameter][1]): owned[parameter] for parameter in names if parameter in owned}.values()


def _bucket(parts: Sequence[tuple[str, tuple[int, ...]]], index: int, like: Tensor) -> BucketSpec:
    return BucketSpec.of(index, [(name, torch.empty(shape, device="meta")) for name, shape in parts], like)


def _shard_shape(name: str, parameter: Tensor, doing: str) -> tuple[int, ...]:
    """The shape of the largest shard of a DTensor, to which FSDP pads all shards; for another tensor, its own shape."""
    placements = getattr(parameter, "placements", None)
    if placements is None:
        return tuple(parameter.shape)
    if any(placement.is_replicate() for placement in placements):
        advice = (
            'Shard it over a 1-D mesh, fully_shard(module, mesh=mesh["shard"]), and pass the hook the group of the other '
            "dimension; or let the hook be that group: gw.register_backend(name, hook=hook)."
            if len(placements) > 1
            else "Let the hook be the group of the mesh: gw.register_backend(name, hook=hook), and init_device_mesh(..., "
            "backend_override={dimension: name}); or use gw.replicate(model, group=group, hook=hook)."
        )
        raise UsageError(
            f"{doing}: {name} has placements {placements}, so torch itself averages over its replicas, before any hook. {advice}"
        )
    shape = list(parameter.shape)
    for size, placement in zip(parameter.device_mesh.shape, placements, strict=True):  # type: ignore[attr-defined]
        if placement.is_shard():
            shape[placement.dim] = -(-shape[placement.dim] // size)
    return tuple(shape)
