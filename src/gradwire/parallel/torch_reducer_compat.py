"""What torch's own code, and its tests, expect on a DDP model: a reducer and a logger, under torch's names."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.collectives import ReduceOp, all_reduce
from gradwire.events import Handle
from gradwire.hooks.base import CommHook
from gradwire.hooks.bucket import GradBucket
from gradwire.interop.defaults import backend_name
from gradwire.parallel.logging_data import StepStats
from gradwire.parallel.replica import Replica
from gradwire.policies import Graph


class ReducerCompat:
    """torch's C++ Reducer, as its Python callers see it."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def _run_allreduce_hook(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """Sum a bucket in place: what torch's built-in all-reduce does before its caller divides."""
        op = all_reduce(bucket.buffer(), op=ReduceOp.SUM, label=f"bucket {bucket.index()}")
        return self._replica.group.submit(op).get_future()

    def _run_comm_hook(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._replica.reducer.reductions.runner.start(bucket).wait())
        return future

    def prepare_for_backward(self, outputs: Any) -> None:
        """Average in the next backward from `outputs`, whose forward ran under no_sync(): torch's pipelining calls this."""
        self._replica.expect_backward(outputs)

    def _get_local_used_map(self) -> Tensor:
        return self._replica.reducer.used.counts

    def _ddp_graph_static(self) -> bool:
        """Whether the graph has been the same in all steps so far."""
        return self._replica.reducer.order.graph_seems_static

    def _rebuild_buckets(self) -> bool:
        return self._replica.reducer.rebuild()

    def _set_optimizer_in_backward(self) -> None:
        self._replica.reducer.leave_gradients = True

    def _install_post_backward_futures(self, futures: Any) -> None:
        self._replica.reducer.wait_at_end.extend(futures)

    def _remove_autograd_hooks(self) -> None:
        self._replica.detach()


_ENVIRONMENT = {
    "master_port": "MASTER_PORT",
    "master_addr": "MASTER_ADDR",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
}
_GLOO_ENVIRONMENT = {"gloo_socket_ifname": "GLOO_SOCKET_IFNAME", "gloo_device_transport": "GLOO_DEVICE_TRANSPORT"}
_DTYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
}


class Logger:
    """Collects what `_get_ddp_logging_data` returns."""

    def __init__(self, ddp: Any) -> None:
        self.stats = StepStats()
        self._listening: Handle | None = None
        self._replica = ddp.replica
        self._fixed = _construction_data(ddp)
        self._comm_hooks = ddp._comm_hooks
        self._error: str | None = None

    def forward_begins(self) -> None:
        """Listen to the reducer during sampled steps only."""
        sampled = self.stats.forward_begins()
        if sampled and self._listening is None:
            self._listening = self._replica.reducer.events.listen(self.stats.listen, only=StepStats.LISTENS_TO)
        elif not sampled and self._listening is not None:
            self._listening.remove()
            self._listening = None

    def forward_ends(self) -> None:
        """The time from here on counts as backward."""
        if self._listening is not None:
            self.stats.forward_ends()

    def joins_uneven_inputs(self) -> None:
        """The model trains with uneven inputs."""
        self._fixed["join_uneven_inputs"] = 1

    def set_error_and_log(self, error: str) -> None:
        """Record an error in the logging data."""
        self._error = error

    def data(self) -> dict[str, Any]:
        """The current logging data."""
        reducer = self._replica.reducer
        data = {**self._fixed, **self.stats.data()}
        error = self._error or reducer.iterations.last_error
        if error is not None:
            data |= {"has_error": 1, "error": error}
        if self._comm_hooks:
            data["comm_hook"] = _hook_name(*self._comm_hooks[0])
        data["static_graph"] = int(self._replica.graph is Graph.STATIC)
        data["has_rebuilt_buckets"] = int(reducer.order.rebuilt)
        data["num_buckets_reduced"] = reducer.reductions.number
        data["can_set_static_graph"] = reducer.order.graph_seems_static
        unused = reducer.order.unused_nbytes() if reducer.steps else 0
        if unused:
            data["unused_parameter_size"] = unused
        if reducer.order.rebuilt:
            data["rebuilt_bucket_sizes"] = _sizes(reducer)
            data["rebuilt_per_bucket_param_indices"] = ", ".join(" ".join(map(str, m)) for m in reducer.layout.members)
        if reducer.order.last_arrival:
            data["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, reducer.order.last_arrival))
        return data


def _hook_name(hook: Any, state: Any) -> str:
    if isinstance(hook, CommHook):
        return repr(hook) if state is None else str(state)
    return str(getattr(hook, "__qualname__", None) or type(hook).__qualname__)


def _sizes(reducer: Any) -> str:
    parameters = reducer.layout.parameters
    return ", ".join(str(sum(parameters[i].nbytes for i in m)) for m in reducer.layout.members)


def _construction_data(ddp: Any) -> dict[str, Any]:
    parameters = ddp.replica.reducer.layout.parameters
    dtypes = list(dict.fromkeys(_DTYPE_NAMES.get(p.dtype, str(p.dtype)) for p in parameters))
    name = backend_name(ddp.process_group)
    environment = _ENVIRONMENT | (_GLOO_ENVIRONMENT if name == "gloo" else {})
    data: dict[str, Any] = {key: os.environ.get(variable, "N/A") for key, variable in environment.items()}
    if name == "gloo":
        data["gloo_num_threads"] = 2
    data |= {
        "world_size": ddp.group.size,
        "rank": ddp.group.rank,
        "module_name": type(ddp.module).__name__,
        "device_ids": ", ".join(map(str, ddp.device_ids or [])),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "has_sync_bn": int(any(isinstance(m, nn.SyncBatchNorm) for m in ddp.module.modules())),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "backend_name": name,
        "iteration": 0,
        "dtypes": ", ".join(dtypes),
        "total_parameter_size_bytes": sum(p.nbytes for p in parameters),
        "num_parameter_tensors": len(parameters),
        "bucket_sizes": _sizes(ddp.replica.reducer),
        "initial_bucket_sizes": _sizes(ddp.replica.reducer),
    }
    return data
