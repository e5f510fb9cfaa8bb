"""`DistributedDataParallel`: torch's class and constructor over our Replica. Flags are turned into policies in the constructor.

What exists only for torch's API is in `torch_reducer_compat.py` (the reducer and logger that torch's own code looks for),
`logging_data.py`, `mixed.py`, `delayed.py`, `join.py` and `manual.py`.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel.scatter_gather import gather as gather_outputs
from torch.nn.parallel.scatter_gather import scatter_kwargs

from gradwire.autograd.compiled.install import forward_begins
from gradwire.errors import GroupAndMeshGiven, HookAlreadyRegistered, NotPicklable, TrainingAlreadyStarted, UsageError
from gradwire.groups.base import Group
from gradwire.hooks.base import CommHook, Trait
from gradwire.hooks.combinators.chain import chain
from gradwire.hooks.dense import cast, mean
from gradwire.interop import as_process_group, from_process_group
from gradwire.interop.defaults import default_process_group, is_default, mesh_group
from gradwire.interop.in_backward import optimizer_in_backward_hook
from gradwire.parallel.buffer_hook import BufferHook
from gradwire.parallel.delayed_allreduce import Delayed
from gradwire.parallel.devices import check_devices, move_to
from gradwire.parallel.flags import Flags
from gradwire.parallel.join import UnevenInputs
from gradwire.parallel.manual import ManualFinalization
from gradwire.parallel.mixed_precision import MixedPrecision
from gradwire.parallel.replica import Replica, ReplicaPolicies
from gradwire.parallel.torch_reducer_compat import Logger, ReducerCompat
from gradwire.parallel.trainable import check_module
from gradwire.policies import Buffers, NonFinite
from gradwire.recorder.flight_recorder import RecordKind
from gradwire.reducer.hook.torch_hooks import check_torch_hook
from gradwire.runtime.dynamo import set_eval_frame, untraced_call, untraced_frame


class DistributedDataParallel(nn.Module, Joinable, ManualFinalization):
    """A module whose gradients are averaged over all ranks during backward: torch's class of that name.

    `process_group` is a torch process group or a gradwire Group; None means the group of `gw.init()`, else torch's default
    one. All other arguments are torch's.
    Beyond torch: `set_hook` swaps the communication hook between steps, `set_weight` weighs ranks by their batch,
    `nonfinite=NonFinite.RAISE` reports NaN and infinity in gradients by rank and parameter, and `register_comm_hook` also
    accepts partials, callable objects and gradwire's own hooks.
    """

    _active_ddp_module: Any = None
    _tracer: Any = None
    """Under `torch.compile(ddp)`, while this wrapper runs: Dynamo, which is to see nothing but the wrapped module."""

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
        nonfinite: NonFinite = NonFinite.PASS,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        check_module("DistributedDataParallel", module)
        if check_reduction:
            warnings.warn("`check_reduction` is deprecated and does nothing.", FutureWarning, stacklevel=2)
        flags = Flags(
            find_unused=find_unused_parameters,
            static=static_graph,
            views=gradient_as_bucket_view,
            broadcast_buffers=broadcast_buffers,
            forward_sync_buffers=forward_sync_buffers,
            cap_mb=bucket_cap_mb,
            cap_mb_list=tuple(bucket_cap_mb_list or ()),
            skip_unused=skip_all_reduce_unused_params,
            lazy_buckets=lazy_bucket_allocation,
        )
        self._set_group(process_group, device_mesh)
        self._flags = flags
        self.module = module
        self.dim = dim
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._delayed = Delayed.of(self, delay_all_reduce_named_params, param_to_hook_all_reduce)
        self.device_ids, self.output_device, self.device, self.device_type = check_devices(
            module, self.parameters_to_ignore, device_ids, output_device
        )
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.lazy_bucket_allocation = lazy_bucket_allocation
        self.nonfinite = nonfinite
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = mixed_precision
        self.forward_sync_buffers = flags.buffers is Buffers.EVERY_FORWARD
        self.bucket_bytes_cap = flags.bucket_bytes_cap
        self.bucket_bytes_cap_list = list(flags.bytes_cap_list)
        self.broadcast_bucket_size = 250 * 2**20
        self.require_backward_grad_sync = True
        self._comm_hooks: list[tuple[Any, Any]] = []
        self._fused_optimizers_checked = False
        self._mixed = None
        if mixed_precision is not None:
            self._mixed = MixedPrecision(module, mixed_precision, self.parameters_to_ignore)
        self._build(init_sync=init_sync)

    # -- construction --------------------------------------------------------------------------------------------------

    def _set_group(self, process_group: Any, device_mesh: Any) -> None:
        if process_group is not None and device_mesh is not None:
            raise GroupAndMeshGiven("Cannot specify both process_group and device_mesh arguments.")
        if device_mesh is not None:
            self.device_mesh = device_mesh
            process_group = mesh_group(device_mesh)
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
        self.replica = Replica(
            self.module,
            self.group,
            hook=None if self._mixed is None else self._mixed.hook(),
            policies=ReplicaPolicies(
                buckets=self._flags.buckets,
                graph=self._flags.graph,
                gradients=self._flags.gradients,
                buffers=self._flags.buffers,
                ignore=self.parameters_to_ignore,
                skip_unused=self._flags.skip_unused,
                nonfinite=self.nonfinite,
            ),
            sync_at_start=init_sync,
        )
        self._apply_manual()
        self.reducer = ReducerCompat(self.replica)
        self.logger = Logger(self)
        self._uneven = UnevenInputs(self.replica, weakref.ref(self))

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        return [p for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]

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
            raise HookAlreadyRegistered(
                "register_comm_hook or register_builtin_comm_hook can only be called once. Nothing was changed; "
                "set_hook swaps gradwire hooks between steps."
            )
        self.replica.use_hook(hook if isinstance(hook, CommHook) else (hook, state))
        self._comm_hooks.append((hook, state))

    def _log(self, error: Exception) -> None:
        if self.logger is not None:
            self.logger.set_error_and_log(f"{type(error).__name__}: {error}")

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Replace torch's two built-in hooks by our own."""
        builtin = {"ALLREDUCE": mean(), "FP16_COMPRESS": chain(cast(torch.float16), mean())}
        name = str(comm_hook_type).rpartition(".")[2]
        if name not in builtin:
            raise UsageError(f"built-in hook {comm_hook_type}: unknown. Known hooks: {', '.join(builtin)}.")
        self.register_comm_hook(comm_hook_type, builtin[name])

    def set_hook(self, hook: CommHook) -> None:
        """Use another gradwire hook from the next step on. Every rank calls it after the same step with an equal hook."""
        self.replica.set_hook(hook)
        self._comm_hooks[:] = [(hook, None)]  # the same list: the logger reads it

    def step_failed(self, error: BaseException) -> None:
        """Fail the step on all ranks because of an exception between forward and backward: see `Replica.step_failed`."""
        self.replica.step_failed(error)

    def hook_state_dict(self) -> dict[str, Any]:
        """The gradwire hook's state on this rank, by parameter name. Each rank saves its own: see `Replica.hook_state_dict`."""
        return self.replica.hook_state_dict()

    def load_hook_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore a saved hook state. Every rank calls it, between steps: see `Replica.load_hook_state_dict`."""
        self.replica.load_hook_state_dict(saved)

    def attach_optimizer(self, *optimizers: torch.optim.Optimizer) -> None:
        """Run the outer steps of hooks such as `hooks.diloco` after this optimizer's steps, and on CUDA have it skip steps whose
        gradients are not finite, if they are checked: see `Replica.attach_optimizer`."""
        self.replica.attach_optimizer(*optimizers)

    def finish_checks(self) -> None:
        """Wait for the check of the last step, if its result comes late. Every rank calls it: see `Replica.finish_checks`."""
        self.replica.finish_checks()

    @property
    def reads_late(self) -> bool:
        """Whether the check of the last step was left to the device: see `Replica.reads_late`."""
        return self.replica.reads_late

    @property
    def skipped_steps(self) -> int:
        """How many steps `nonfinite=NonFinite.SKIP` has skipped so far: see `Replica.skipped_steps`."""
        return self.replica.skipped_steps

    def outer_step(self) -> None:
        """Call this after each optimizer step if no optimizer is attached: see `Replica.outer_step`."""
        self.replica.outer_step()

    def average_parameters(self) -> None:
        """Average the parameters over all ranks, after a hook that lets them differ. Every rank calls it."""
        self.replica.average_parameters()

    def set_weight(self, weight: float) -> None:
        """Set the weight of this rank's gradient under `hooks.weighted_mean()`: usually the number of samples in its batch."""
        runner = self.replica.runner
        if runner.torch_hook is not None or Trait.WEIGHS not in runner.hook.traits:
            warnings.warn(
                f"set_weight({weight!r}) has no effect with the hook {runner.name}: all ranks count equally. Set the hook first: "
                "model.set_hook(gw.hooks.weighted_mean()).",
                UserWarning,
                stacklevel=2,
            )
        self.replica.weight = float(weight)

    def _register_buffer_comm_hook(self, state: Any, hook: Callable[..., Any], comm_hook_location: Any = None) -> None:
        """Synchronise buffers with `hook(state, {name: buffer})` instead of a broadcast from rank 0."""
        self.buffer_hook = BufferHook(hook, state, comm_hook_location)

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        from gradwire.interop.in_backward import register_fused_optimizer

        register_fused_optimizer(self, optim, *args, optim_params=optim_params, **kwargs)

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
        self._check_finalized()
        replica = self.replica
        replica.sync = self.require_backward_grad_sync
        if not self._fused_optimizers_checked:
            self._fused_optimizers_checked = True
            optimizer_in_backward_hook(self)
        if torch.is_grad_enabled() and replica.sync and self.logger is not None:
            self.logger.forward_begins()
        replica.reducer.iterations.record(RecordKind.FORWARD_BEGAN)
        with replica.recovery.failing_forward():
            self._uneven.before_forward(self)
            replica.rebuild()
            self._sync_buffers(BufferHook.BEFORE)
            if self._join_config.enable:
                self._uneven.announce_sync(replica.sync)
        if self.device_ids:
            inputs, kwargs = move_to(inputs, kwargs, torch.device(self.device_type, self.device_ids[0]))
        forward_begins(self.module)
        return inputs, kwargs

    @untraced_call
    def _post_forward(self, output: Any) -> Any:
        self._sync_buffers(BufferHook.AFTER)
        self.replica.sync = (
            self.require_backward_grad_sync
        )  # Lightning resets it if the module has run its backward itself
        output = self.replica.after_forward(output)
        if self.logger is not None:
            self.logger.forward_ends()
        return output if self._delayed is None else self._delayed.after_forward(output)

    def _sync_buffers(self, place: str) -> None:
        if not self.will_sync_module_buffers():
            return
        hook: BufferHook | None = getattr(self, "buffer_hook", None)
        if (hook.place if hook is not None else BufferHook.BEFORE) != place:
            return
        src = self._uneven.common_rank(True) if self._join_config.enable else 0
        if hook is None:
            self.replica.state.sync_buffers(src)
        else:
            hook.run(self.replica)

    def will_sync_module_buffers(self) -> bool:
        """Whether this forward makes buffers equal."""
        return self.replica.sync_buffers_next and self.forward_sync_buffers and bool(self.replica.state.named_buffers())

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without averaging; the first step outside averages the accumulated gradients."""
        return _NoSync(self)

    # -- uneven inputs ---------------------------------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[Any]:
        """Train with uneven inputs across ranks: a rank that has run out of inputs shadows the others' collectives."""
        return self._uneven.context(self, divide_by_initial_world_size, enable, throw_on_early_termination)

    def join_hook(self, **kwargs: Any) -> Any:
        """The hook that torch's Join runs on this model."""
        return self._uneven.hook(divide=kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """The device of Join's flags."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """The process group that reduces Join's flags."""
        return self.process_group

    # -- the rest of torch's API -----------------------------------------------------------------------------------------

    @property
    def broadcast_buffers(self) -> bool:
        """Whether buffers are made equal before every forward."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether the next forward makes buffers equal, if forwards do: not after one under no_sync."""
        return self.replica.sync_buffers_next

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        self.replica.sync_buffers_next = value

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The buffers that are synchronized."""
        return list(self.replica.state.named_buffers().values())

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The same by name."""
        return self.replica.state.named_buffers()

    @property
    def _distributed_rank(self) -> int:
        return self.group.rank

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self.replica.reducer.order.rebuilt

    @property
    def _authoritative_rank(self) -> int:
        return self._uneven.authoritative_rank

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """As in torch.nn.DataParallel."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """The inputs, moved to the device."""
        moved, moved_kwargs = move_to(inputs, kwargs, torch.device(self.device_type, device_id))
        return (moved,), (moved_kwargs,)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """As in torch.nn.DataParallel."""
        return gather_outputs(outputs, output_device, dim=self.dim)

    def train(self, mode: bool = True) -> DistributedDataParallel:
        """As in nn.Module."""
        super().train(mode)
        return self

    def _default_broadcast_coalesced(
        self, bufs: Any = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        from gradwire.parallel.broadcast import broadcast_coalesced

        tensors = self.modules_buffers if bufs is None else bufs
        size = self.broadcast_bucket_size if bucket_size is None else bucket_size
        broadcast_coalesced(self.group, tensors, buffer_size=size, src=authoritative_rank)

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self.replica.reducer.steps:
            error = TrainingAlreadyStarted(
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
        self.logger.stats.sample_rate = sample_rate

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """What the model was built with and how its steps went, under torch's names."""
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
        from gradwire.parallel.names import names_of

        return names_of(self.module, parameters, self.parameters_to_ignore)

    # -- copies and pickles ----------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if not is_default(self.process_group):
            raise NotPicklable(
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


class _NoSync(AbstractContextManager[None]):
    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp

    def __enter__(self) -> None:
        self._before = self._ddp.require_backward_grad_sync
        self._ddp.require_backward_grad_sync = False

    def __exit__(self, *_: object) -> None:
        self._ddp.require_backward_grad_sync = self._before
