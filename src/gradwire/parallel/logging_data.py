"""DDP's logging data: what a model was built with and how its steps went, under torch's names.

Times are from events that the reducer emits anyway, sampled as in torch: the first ten steps, then every `sample_rate`-th.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn

from gradwire.events import BackwardEnded, BucketLaunched, BucketReduced, Event, Handle, StepEnded
from gradwire.hooks.base import CommHook
from gradwire.interop.default_group import backend_name
from gradwire.policies import Graph
from gradwire.reducer import BucketLayout
from gradwire.runtime.threads import weakly

_FIRST_STEPS = 10


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


_LISTENS_TO = (BackwardEnded, BucketLaunched, BucketReduced, StepEnded)
"""Not GradientReady, which would require a hook call for every gradient."""


class Logger:
    """Collects what `_get_ddp_logging_data` returns. Times of steps are in nanoseconds."""

    def __init__(self, ddp: Any) -> None:
        self.sample_rate = 100
        self._iteration = -1
        self._samples = 0
        self._last: dict[str, int] = {}
        self._totals: dict[str, int] = {}
        self._now: dict[str, float] = {}
        self._listening: Handle | None = None
        self._replica = ddp.replica
        self.fixed = _construction_data(ddp)
        """What does not change from step to step."""
        self._comm_hooks = ddp._comm_hooks
        self.error: str | None = None

    def forward_begins(self) -> None:
        """Listen to the reducer during sampled steps only."""
        self._iteration += 1
        self._now = {"forward": time.perf_counter()}
        sampled = self._iteration < _FIRST_STEPS or self._iteration % self.sample_rate == 0
        if sampled and self._listening is None:
            self._listening = self._replica.reducer.events.listen(weakly(self._listen), only=_LISTENS_TO)
        elif not sampled and self._listening is not None:
            self._listening.remove()
            self._listening = None

    def forward_ends(self) -> None:
        """The time from here on counts as backward."""
        self._now["backward"] = time.perf_counter()

    def _listen(self, event: Event) -> None:
        now = self._now
        if isinstance(event, BucketLaunched):
            now.setdefault("launched", event.time)
        elif isinstance(event, BackwardEnded | BucketReduced):
            now["computed" if isinstance(event, BackwardEnded) else "reduced"] = event.time
        elif "forward" in now:
            self._close()

    def _close(self) -> None:
        now = self._now
        begin = now.get("backward", now["forward"])
        computed, launched = now.get("computed", begin), now.get("launched", begin)
        reduced = now.get("reduced", computed)
        spans = {
            "forward_compute_time": (now["forward"], begin),
            "backward_compute_time": (begin, computed),
            "backward_comm_time": (launched, reduced),
        }
        self._samples += 1
        self._last = {"iteration": self._iteration}
        for name, (start, end) in spans.items():
            self._last |= {f"{name}_start": int(start * 1e9), f"{name}_end": int(end * 1e9)}
            self._last[name] = max(1, int((end - start) * 1e9))
        overlap = max(0.0, min(computed, reduced) - launched)
        self._last["backward_compute_comm_overlap_time"] = int(overlap * 1e9)
        for name in (*spans, "backward_compute_comm_overlap_time"):
            self._totals[name] = self._totals.get(name, 0) + self._last[name]

    def data(self) -> dict[str, Any]:
        """The current logging data."""
        reducer = self._replica.reducer
        order, layout = reducer.order, reducer.layout
        averages = {f"avg_{name}": total // self._samples for name, total in self._totals.items()}
        data = {**self.fixed, **self._last, **averages}
        error = self.error or reducer.iterations.last_error
        if error is not None:
            data |= {"has_error": 1, "error": error}
        if self._comm_hooks:
            data["comm_hook"] = _hook_name(*self._comm_hooks[0])
        data["static_graph"] = int(self._replica.graph is Graph.STATIC)
        data["has_rebuilt_buckets"] = int(order.rebuilt)
        data["num_buckets_reduced"] = reducer.reductions.number
        data["can_set_static_graph"] = order.graph_seems_static
        if reducer.steps and (unused := order.unused_nbytes()):
            data["unused_parameter_size"] = unused
        if order.rebuilt:
            data["rebuilt_bucket_sizes"] = _sizes(layout)
            data["rebuilt_per_bucket_param_indices"] = ", ".join(" ".join(map(str, m)) for m in layout.members)
        if order.last_arrival:
            data["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, order.last_arrival))
        return data


def _hook_name(hook: Any, state: Any) -> str:
    if isinstance(hook, CommHook):
        return repr(hook) if state is None else str(state)
    return str(getattr(hook, "__qualname__", None) or type(hook).__qualname__)


def _sizes(layout: BucketLayout) -> str:
    return ", ".join(str(sum(layout.parameters[i].nbytes for i in m)) for m in layout.members)


def _construction_data(ddp: Any) -> dict[str, Any]:
    layout = ddp.replica.reducer.layout
    parameters = layout.parameters
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
        "bucket_sizes": _sizes(layout),
        "initial_bucket_sizes": _sizes(layout),
    }
    return data
