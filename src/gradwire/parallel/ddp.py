"""`DistributedDataParallel`: torch's class and constructor over our Replica. Flags are turned into policies in the constructor.

Methods that only torch's own code calls are in `torch_surface.py`, those that control the hook in `hook_controls.py`.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.algorithms.join import Joinable

from gradwire.errors import HookError, UsageError, UsageRuntimeError
from gradwire.groups.base import Group
from gradwire.hooks.base import CommHook
from gradwire.interop import as_process_group, from_process_group
from gradwire.interop.default_group import default_process_group, is_default
from gradwire.parallel.hook_controls import HookControls
from gradwire.parallel.join import UnevenInputs
from gradwire.parallel.logging_data import Logger
from gradwire.parallel.mixed_precision import MixedPrecision
from gradwire.parallel.replica import Replica, ReplicaPolicies
from gradwire.parallel.torch_arguments import Delayed, buckets_policy, buffers_policy, check_devices, move_to
from gradwire.parallel.torch_surface import ManualFinalization, ReducerCompat, TorchSurface
from gradwire.parallel.trainable import check_module
from gradwire.policies import Buffers, Gradients, Graph, MiB, NonFinite
from gradwire.reducer.hook.torch_hooks import check_torch_hook
from gradwire.runtime.dynamo import set_eval_frame, untraced_call, untraced_frame


class DistributedDataParallel(TorchSurface, ManualFinalization, HookControls, nn.Module, Joinable):
    """A module whose gradients are averaged over all ranks during backward: torch's class of that name.

    `process_group` is a torch process group or a gradwire Group; None means the group of `gw.init()`, else torch's default
    one. All other arguments are torch's.
    Beyond torch: `set_hook` swaps the communication hook between steps, `set_weight` weighs ranks by their batch,
    `nonfinite=NonFinite.RAISE` reports NaN and infinity in gradients by rank and parameter, and `register_comm_hook` also
    accepts partials, callable objects and gradwire's own hooks.
    """

    _tracer: Any = None
    """Under `torch.compile(ddp)`, while this wrapper runs: Dynamo, which is to see nothing but the wrapped module."""

    default_hook: ClassVar[CommHook | None] = None
    """The hook of models that choose none: see `gradwire run --replace-ddp --hook`."""

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        nonfinite: NonFinite | None = None,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        check_module("DistributedDataParallel", module)
        if check_reduction:
            warnings.warn("`check_reduction` is deprecated and does nothing.", FutureWarning, stacklevel=2)
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.lazy_bucket_allocation = lazy_bucket_allocation
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self._buffers_policy = buffers_policy(broadcast_buffers, forward_sync_buffers)
        self.forward_sync_buffers = self._buffers_policy is Buffers.EVERY_FORWARD
        self._buckets_policy = buckets_policy(bucket_cap_mb, bucket_cap_mb_list, lazy=lazy_bucket_allocation)
        self.bucket_bytes_cap_list = [int(mb * MiB) for mb in bucket_cap_mb_list or ()]
        cap_mb = 25 if bucket_cap_mb is None else bucket_cap_mb
        self.bucket_bytes_cap = max(self.bucket_bytes_cap_list, default=int(cap_mb * MiB))
        self.require_backward_grad_sync = True
        self._set_group(process_group, device_mesh)
        self.module = module
        self.dim = dim
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._delayed = Delayed.of(self, delay_all_reduce_named_params, param_to_hook_all_reduce)
        self.device_ids, self.output_device, self.device, self.device_type = check_devices(
            module, self.parameters_to_ignore, device_ids, output_device
        )
        self.batched_grad_copy = batched_grad_copy
        self.nonfinite = nonfinite
        self.mixed_precision = mixed_precision
        self._mixed: MixedPrecision | None = None
        if mixed_precision is not None:
            self._mixed = MixedPrecision(module, mixed_precision, self.parameters_to_ignore)
        self._comm_hooks: list[tuple[Any, Any]] = []
        self._fused_optimizers_checked = False
        self._build(init_sync=init_sync)

    # -- construction --------------------------------------------------------------------------------------------------

    def _set_group(self, process_group: Any, device_mesh: Any) -> None:
        if process_group is not None and device_mesh is not None:
            raise UsageRuntimeError("Cannot specify both process_group and device_mesh arguments.")
        if device_mesh is not None:
            if device_mesh.ndim != 1:
                raise UsageRuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
            self.device_mesh = device_mesh
            process_group = device_mesh.get_group(mesh_dim=0)
        if isinstance(process_group, Group):
            self.group: Group = process_group
            self.process_group = as_process_group(process_group)
        else:
            self.process_group = default_process_group() if process_group is None else process_group
            self.group = from_process_group(self.process_group)

    def _build(self, *, init_sync: bool) -> None:
        self.logger: Logger | None = None
        if self._delayed is not None and self._delayed.covers(self.module, self.parameters_to_ignore):
            return
        graph = Graph.FIND_UNUSED if self.find_unused_parameters else Graph.ALL_USED
        if self.static_graph:  # takes precedence over searching, as in torch
            graph = Graph.STATIC
        self.replica = Replica(
            self.module,
            self.group,
            hook=self.default_hook if self._mixed is None else self._mixed.hook(),
            policies=ReplicaPolicies(
                buckets=self._buckets_policy,
                graph=graph,
                gradients=Gradients.VIEWS if self.gradient_as_bucket_view else Gradients.COPIES,
                buffers=self._buffers_policy,
                ignore=self.parameters_to_ignore,
                skip_unused=self.skip_all_reduce_unused_params,
                nonfinite=self.nonfinite,
            ),
            sync_at_start=init_sync,
        )
        self.replica.reducer.manual = self._manual
        self.reducer = ReducerCompat(self.replica)
        self.logger = Logger(self)
        self._uneven = UnevenInputs(self.replica, weakref.ref(self))

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[..., Any] | CommHook) -> None:
        """Reduce every bucket with `hook(state, bucket)`, a torch-style hook, or with a gradwire hook. Can be called once."""
        if not isinstance(hook, CommHook):
            try:
                check_torch_hook(hook)
            except UsageError as error:
                self._log(error)
                raise
        if self._comm_hooks:
            raise HookError(
                "register_comm_hook or register_builtin_comm_hook can only be called once. Nothing was changed; "
                "set_hook swaps gradwire hooks between steps."
            )
        self.replica.use_hook(hook if isinstance(hook, CommHook) else (hook, state))
        self._comm_hooks.append((hook, state))

    def set_hook(self, hook: CommHook) -> None:
        """Use another gradwire hook from the next step on. Every rank calls it after the same step with an equal hook."""
        super().set_hook(hook)
        self._comm_hooks[:] = [(hook, None)]  # the same list: the logger reads it

    # -- a step --------------------------------------------------------------------------------------------------------

    @untraced_frame
    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """As in nn.Module. Under `torch.compile(ddp)` the wrapped module is compiled, and what surrounds it runs eagerly."""
        if torch.compiler.is_dynamo_compiling():  # Dynamo has inlined this call into a compiled function
            return super().__call__(*inputs, **kwargs)
        tracer = set_eval_frame(None)
        if tracer is None:
            return super().__call__(*inputs, **kwargs)
        self._tracer = tracer
        try:
            return super().__call__(*inputs, **kwargs)
        finally:
            self._tracer = None
            set_eval_frame(tracer)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the wrapped module in place, as `nn.Module.compile`."""
        self.module.compile(*args, **kwargs)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward, with the replica's work before and after it."""
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            if self._delayed is not None and self.logger is None:
                return self._delayed.after_forward(self._compute(inputs, kwargs))
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self._run_module(inputs, kwargs))

    def _run_module(self, inputs: Any, kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # Dynamo does not resume inside `try`
            return self._compute(inputs, kwargs)
        try:
            return self._compute(inputs, kwargs)
        except BaseException as error:
            self.replica.forward_failed(error)
            raise

    def _compute(self, inputs: Any, kwargs: Any) -> Any:
        if self._mixed is None:
            return self._call_module(*inputs, **kwargs)
        return self._mixed.forward(self.module, self._call_module, inputs, kwargs)

    def _call_module(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._tracer is None:
            return self.module(*inputs, **kwargs)
        set_eval_frame(self._tracer)
        try:
            return self.module(*inputs, **kwargs)
        finally:
            set_eval_frame(None)

    @untraced_call
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        replica = self.replica
        if replica.recomputing:
            return self._moved(inputs, kwargs)
        self._check_finalized()
        replica.sync = self.require_backward_grad_sync
        if not self._fused_optimizers_checked:
            self._fused_optimizers_checked = True
            self._adopt_optimizers_in_backward()
        if torch.is_grad_enabled() and replica.sync and self.logger is not None:
            self.logger.forward_begins()
        replica.before_forward(self._exchange)
        return self._moved(inputs, kwargs)

    def _exchange(self) -> None:
        self._uneven.before_forward(self)
        self.replica.rebuild()
        self._sync_buffers("PRE_FORWARD")
        if self._join_config.enable:
            self._uneven.announce_sync(self.replica.sync)

    def _moved(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        if self.device_ids:
            return move_to(inputs, kwargs, torch.device(self.device_type, self.device_ids[0]))
        return inputs, kwargs

    @untraced_call
    def _post_forward(self, output: Any) -> Any:
        if self.replica.recomputing:
            return output
        self._sync_buffers("POST_FORWARD")
        # Once more, as Lightning resets it if the module has run its backward itself.
        self.replica.sync = self.require_backward_grad_sync
        output = self.replica.after_forward(output)
        if self.logger is not None:
            self.logger.forward_ends()
        return output if self._delayed is None else self._delayed.after_forward(output)

    def _sync_buffers(self, place: str) -> None:
        if place != self._syncs_buffers or not self.will_sync_module_buffers():
            return
        src = self._uneven.common_rank(True) if self._join_config.enable else 0
        if self.buffer_hook is None:
            self.replica.state.sync_buffers(src)
        elif (futures := self.buffer_hook(self.replica.state.named_buffers())) is not None:
            self.replica.reducer.wait_at_end.extend(futures)

    def will_sync_module_buffers(self) -> bool:
        return self.replica.sync_buffers_next and self.forward_sync_buffers and bool(self.replica.state.named_buffers())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging; the first step outside averages the accumulated gradients."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # -- uneven inputs ---------------------------------------------------------------------------------------------------

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> AbstractContextManager[Any]:
        """Train with uneven inputs across ranks: a rank that has run out of inputs shadows the others' collectives."""
        return self._uneven.context(self, divide_by_initial_world_size, enable, throw_on_early_termination)

    # -- copies and pickles ----------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if not is_default(self.process_group):
            raise UsageRuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, when "
                "you have called init_process_group and have not passed process_group argument to DDP constructor."
            )
        state = copy.copy(self.__dict__)
        if "replica" in state:
            state["_settings"] = self.replica.settings()
        for name in ("process_group", "group", "replica", "reducer", "logger", "_uneven"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        settings = state.pop("_settings", None)
        super().__setstate__(state)
        self._set_group(None, None)
        self._build(init_sync=False)
        if settings is not None:
            self.replica.restore(settings)


# `isinstance(model, torch.nn.parallel.DistributedDataParallel)` is True: see "A virtual subclass of torch's DDP" in design.md.
nn.parallel.DistributedDataParallel.register(DistributedDataParallel)
