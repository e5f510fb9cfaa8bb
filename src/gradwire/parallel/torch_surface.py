"""What torch's code, and its tests, expect on a DDP model: methods and attributes under torch's names, and a reducer.

`DistributedDataParallel` inherits it. Nothing here is needed to train.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from gradwire.collectives import ReduceOp, all_reduce
from gradwire.errors import UsageError, UsageRuntimeError, UsageTypeError
from gradwire.groups.base import Group
from gradwire.hooks.bucket import GradBucket
from gradwire.hooks.dense import cast, chain, mean
from gradwire.parallel.join import UnevenInputs
from gradwire.parallel.logging_data import Logger
from gradwire.parallel.module_state import broadcast_coalesced
from gradwire.parallel.replica import Replica
from gradwire.parallel.torch_arguments import move_to
from gradwire.reducer.machine import State


def _alias(path: str) -> Any:
    """Another name for what is at `path`, to read and to set."""
    owner, _, name = path.rpartition(".")
    return property(attrgetter(path), lambda ddp, value: setattr(attrgetter(owner)(ddp) if owner else ddp, name, value))


class TorchSurface:
    """The part of torch's class that torch's own code calls, and users hardly ever."""

    module: nn.Module
    group: Group
    replica: Replica
    logger: Logger | None
    device_type: str
    dim: int
    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    broadcast_bucket_size = 250 * 2**20
    parameters_to_ignore: set[str]
    register_comm_hook: Callable[..., None]
    buffer_hook: Callable[..., Any] | None = None
    """Called with the buffers in place of their broadcast. Futures it returns are waited for at the end of backward."""
    _syncs_buffers = "PRE_FORWARD"
    _uneven: UnevenInputs
    _set_group: Callable[[Any, Any], None]
    _active_ddp_module: Any = None

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        return [p for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]

    def _log(self, error: Exception) -> None:
        if self.logger is not None:
            self.logger.error = f"{type(error).__name__}: {error}"

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        builtin = {"ALLREDUCE": mean(), "FP16_COMPRESS": chain(cast(torch.float16), mean())}
        name = str(comm_hook_type).rpartition(".")[2]
        if name not in builtin:
            raise UsageError(f"built-in hook {comm_hook_type}: unknown. Known hooks: {', '.join(builtin)}.")
        self.register_comm_hook(comm_hook_type, builtin[name])

    def _register_buffer_comm_hook(self, state: Any, hook: Callable[..., Any], comm_hook_location: Any = None) -> None:
        if not callable(hook):
            raise UsageTypeError(f"buffer hook: {hook!r} is not callable. Pass a function hook(state, named_buffers).")
        self.buffer_hook = partial(hook, state)
        self._syncs_buffers = getattr(comm_hook_location, "name", str(comm_hook_location or "POST_FORWARD"))

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        from torch.distributed.algorithms._optimizer_overlap.optimizer_overlap import _as_overlapped_optim

        overlapped = _as_overlapped_optim(optim, optim_params, *args, **kwargs)
        try:
            overlapped.register_ddp(self)
        except NotImplementedError as error:
            raise UsageRuntimeError(f"{optim} does not support overlapped DDP.") from error

    def _adopt_optimizers_in_backward(self) -> None:
        """Step optimizers that torch's `_apply_optimizer_in_backward` has given to parameters when their buckets are reduced."""
        parameters = [p for p in self._module_parameters if hasattr(p, "_in_backward_optimizers")]
        if not parameters:
            return
        from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import _apply_optim_in_backward_hook
        from torch.distributed.optim import apply_optimizer_in_backward

        # They were registered to step as soon as a gradient is ready; now they wait for its average.
        handles = apply_optimizer_in_backward.param_to_optim_hook_handle_map
        for parameter in self._module_parameters:
            for handle in handles.get(parameter, []):
                handle.remove()
        hook = _apply_optim_in_backward_hook(gradient_is_bucket_view=self.gradient_as_bucket_view)
        self.register_comm_hook(weakref.ref(self), hook)
        self.replica.reducer.leave_gradients = True

    def join_hook(self, **kwargs: Any) -> Any:
        return self._uneven.hook(divide=kwargs.get("divide_by_initial_world_size", True))

    join_device = _alias("device")
    join_process_group = _alias("process_group")
    broadcast_buffers = _alias("forward_sync_buffers")
    require_forward_param_sync = _alias("replica.sync_buffers_next")
    """Whether the next forward makes buffers equal, if forwards do: not after one under no_sync."""
    _has_rebuilt_buckets = _alias("replica.reducer.order.rebuilt")
    _authoritative_rank = _alias("_uneven.authoritative_rank")

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        return self.replica.state.named_buffers()

    @property
    def modules_buffers(self) -> list[Tensor]:
        return list(self.named_module_buffers.values())

    @property
    def is_multi_device_module(self) -> bool:
        return len({p.device for p in self._module_parameters}) > 1

    # Subclasses that have a forward of their own call these three.

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        moved, moved_kwargs = move_to(inputs, kwargs, torch.device(self.device_type, device_id))
        return (moved,), (moved_kwargs,)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return gather(outputs, output_device, dim=self.dim)

    def _default_broadcast_coalesced(
        self, bufs: Any = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        tensors = self.modules_buffers if bufs is None else bufs
        size = self.broadcast_bucket_size if bucket_size is None else bucket_size
        broadcast_coalesced(self.group, tensors, buffer_size=size, src=authoritative_rank)

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self.replica.reducer.steps:
            error = UsageRuntimeError(
                "set_static_graph() should be called before training loop starts, and after the model was built."
            )
            self._log(error)
            raise error
        self.static_graph = True
        self.replica.become_static()
        if self.find_unused_parameters:
            warnings.warn(
                "find_unused_parameters has no effect with a static graph, which detects them anyway.", stacklevel=2
            )

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise UsageError("DDP runtime logging sample rate should be equal or greater than 1")
        assert self.logger is not None
        self.logger.sample_rate = sample_rate

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        assert self.logger is not None
        return self.logger.data()

    def _remove_autograd_hooks(self) -> None:
        self.replica.detach()

    def _check_reducer_finalized(self) -> None:
        self.replica.check_finished()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        self.replica.sink_clones = val

    def _update_process_group(self, new_process_group: Any) -> None:
        self._set_group(new_process_group, None)
        self.replica.move_to_group(self.group)
        self.replica.runner.average_parameters()
        self.replica.runner.start_over()

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        """The model whose graph Dynamo splits: none of ours. Dynamo asks the class that has torch's name."""
        return cls._active_ddp_module

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, params_and_buffers_to_ignore: Any) -> None:
        """Leave these parameters and buffers, by full name, to the caller."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        specs = self.replica.reducer.layout.parameters
        return list(self.replica.parameters), [s.sparse for s in specs]

    def _build_debug_param_to_name_mapping(self, parameters: Any) -> dict[int, str]:
        """The name of each of `parameters` by its index. A parameter with two names gets the last."""
        place = {id(p): i for i, p in enumerate(parameters)}
        names: dict[int, str] = {}
        parts = self.module.named_modules()  # each once, as for `ignore`
        for name, parameter in (one for prefix, part in parts for one in part.named_parameters(prefix, recurse=False)):
            if name in self.parameters_to_ignore or not parameter.requires_grad:
                continue
            if id(parameter) not in place:
                raise UsageError(
                    f"Param with name {name} found in module parameters, but not DDP parameters. It was added after the model "
                    "was replicated; replicate it again."
                )
            names[place[id(parameter)]] = name
        if len(names) != len(place):
            raise UsageError(
                "Expected param to name mapping to cover all parameters, but got conflicting lengths: "
                f"{len(place)} vs {len(names)}. Parameters were removed from the module after it was replicated."
            )
        return names


class ManualFinalization:
    """The caller, not the end of backward, waits for the reductions (torch 2.15's DDP). Whatever runs between the last gradient and
    `finalize_backward()` overlaps with the communication of the last buckets."""

    replica: Replica
    logger: Any
    mixed_precision: Any
    require_backward_grad_sync: bool
    _manual = False

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether every synchronized backward has to be followed by `finalize_backward()`. Set it between steps."""
        return self._manual

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        doing = f"require_manual_backward_finalization = {required}"
        if self.logger is None:
            if required:
                raise UsageRuntimeError(
                    f"{doing}: all parameters are in delay_all_reduce_named_params, which has no buckets."
                )
            return
        if self.replica.reducer.machine.in_backward:
            raise UsageRuntimeError(f"{doing}: a backward is not finalized yet. Set it before a forward.")
        self._manual = bool(required)
        self.replica.reducer.manual = self._manual

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether `finalize_backward()` must not be called before the next backward has returned. To be read after forward. True
        while buckets or a static graph are still to be learned, and with mixed precision. Otherwise it may be called from a
        backward hook, once all gradients are ready."""
        if not self._manual:
            return False
        order, used = self.replica.reducer.order, self.replica.reducer.used
        rebuild_due = order.limits is not None and not order.rebuilt
        return self.mixed_precision is not None or rebuild_due or used.learning

    def finalize_backward(self) -> None:
        """Wait for the reductions of this step and put the averages into `.grad`: once for each synchronized backward."""
        if not self._manual:
            raise UsageRuntimeError(
                "finalize_backward(): backward finalizes automatically. Set require_manual_backward_finalization = True first."
            )
        if not self.require_backward_grad_sync:
            raise UsageRuntimeError(
                "finalize_backward() under no_sync(): nothing is reduced there. Call it after the step outside."
            )
        reducer = self.replica.reducer
        reducer.catch_up()
        machine = reducer.machine
        if machine.state is not State.LAUNCHED:
            why = "there is no reduction to finalize. Call it once after each synchronized backward"
            if machine.state is State.RUNNING:
                names = ", ".join(machine.names[i] for i in machine.missing())
                why = f"not all buckets are ready; there is no gradient yet for {names}"
            raise UsageRuntimeError(f"finalize_backward(): {why}.")
        reducer.finish()

    def _check_finalized(self) -> None:
        """Before a forward: the last backward must have been finalized. It still can be, so nothing is changed."""
        if self._manual and self.replica.reducer.machine.complete:
            raise UsageRuntimeError(
                "forward: the last backward is not finalized. Call finalize_backward() before the next forward."
            )


class ReducerCompat:
    """torch's C++ Reducer, as its Python callers see it."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def _run_allreduce_hook(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """Sum a bucket in place: what torch's built-in all-reduce does before its caller divides."""
        op = all_reduce(bucket.buffer(), op=ReduceOp.SUM, label=f"bucket {bucket.index()}")
        return self._replica.group.submit(op).get_future()

    def prepare_for_backward(self, outputs: Any) -> None:
        """Average in the next backward from `outputs`, whose forward ran under no_sync(): torch's pipelining calls this."""
        self._replica.expect_backward(outputs)

    def _get_local_used_map(self) -> Tensor:
        return self._replica.reducer.used.counts

    def _ddp_graph_static(self) -> bool:
        return self._replica.reducer.order.graph_seems_static

    def _rebuild_buckets(self) -> bool:
        """Lightning calls it before `manual_backward`."""
        return self._replica.reducer.rebuild()
