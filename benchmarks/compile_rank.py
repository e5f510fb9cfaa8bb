"""What each rank does in `compile`: one transformer, wrapped and compiled in each form, and steps in turns.

Note [Without overlap]
The figure to compare with is the same compiled model whose gradients are in a single bucket: it is launched after the last
gradient, so all communication follows the computation. Exposed communication is the extra time of a step over the same step
with the link's limits off, so that what a hook computes does not count. Without a link it is the extra time over a step under
`no_sync`. On CUDA steps follow each other as in training, where the host runs ahead of the device.
"""

from __future__ import annotations

import copy
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.utils.checkpoint import checkpoint

from benchmarks.models import GPT2, Shape
from benchmarks.peers import torch_world
from benchmarks.timing import Rounds, interleave
from benchmarks.world import RankContext
from gradwire.errors import InternalError
from gradwire.groups import C10dGroup, Group, SharedMemoryGroup
from gradwire.hooks.named import NAMED_HOOKS
from gradwire.interop import as_process_group, as_torch_hook
from gradwire.lab import Throttled
from gradwire.lab.throttle import Link
from gradwire.parallel import DistributedDataParallel

EAGER = "eager"
BARE = "bare"
INSIDE = "inside"
OUTSIDE = "outside"
BLOCKS = "blocks"
ONE_BUCKET = "one bucket"
TORCH = "torch"
FORMS = {
    EAGER: "DDP(m), not compiled",
    BARE: "compile(m), no DDP",
    INSIDE: "DDP(compile(m))",
    OUTSIDE: "compile(DDP(m))",
    BLOCKS: "DDP(compiled blocks)",
    ONE_BUCKET: "DDP(compile(m)), no overlap",
    TORCH: "torch: compile(DDP(m))",
}
_WITHOUT_OURS = (BARE, TORCH)
"""Forms that are compiled before there is a DDP of ours, since later graphs report gradients."""
BASE = ", base"
"""The step that exposed communication is counted from: see Note [Without overlap]."""
_ALL_IN_ONE_MB = 2**20
_CLOSE = {"cpu": 1e-4, "cuda": 0.05}
"""How far a gradient may be off, relative to the largest element: float32, and bfloat16 under autocast."""
_BLOCK = {"cpu": 1, "cuda": 8}
"""Timed steps in a row."""
_CHECKED_STEPS = 4
"""Steps before gradients are compared: buckets are rebuilt after the first, and the first finds that there is compiled code."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, over which link, and for how many steps."""

    shape: Shape
    batch: int
    hook: str
    mbit: float | None
    latency_ms: float
    checkpointing: bool
    backend: str
    device: str
    bucket_mb: float
    bucket_views: bool
    rounds: int
    forms: tuple[str, ...]

    @property
    def block(self) -> int:
        """How many steps of each form are timed in a row."""
        return _BLOCK[self.device]


@dataclass(frozen=True, slots=True)
class Measured:
    """What one rank has measured."""

    seconds: Mapping[str, tuple[float, ...]]
    difference: Mapping[str, float]
    """The largest difference of a gradient, averaged with `mean`, from the uncompiled model's."""
    graph_breaks: Mapping[str, int]
    elements: int


def run_forms(plan: Plan, context: RankContext) -> Measured:
    """Train on this rank, together with all others."""
    device = torch.device(plan.device)
    if device.type == "cuda":
        device = torch.device("cuda", context.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    start = _model(plan).to(device)
    torch.manual_seed(1 + context.rank)  # every rank reads different data
    inputs = torch.randint(plan.shape.symbols, (plan.batch, plan.shape.context + 1), device=device)
    with _world(plan, context, device) as world:
        forms = _forms(plan, start, world, inputs, context.report)
        expected = forms[EAGER].gradients
        steps: dict[str, Callable[[], None]] = {}
        for name, form in forms.items():  # what is compared is timed in succession: the machine's load changes
            steps[name] = _step(form.call, form.model, inputs)
            if name != BARE:
                steps[name + BASE] = _base(steps[name], form.model, world)
        gc.collect()
        series = interleave(
            steps,
            Rounds(plan.rounds, block=plan.block, lead_in=1, warm_up=2),
            fence=lambda: _fence(context, device),
            after_round=context.report if context.rank == 0 else None,
        )
        context.barrier.wait()  # no rank closes while another is still working
        for form in forms.values():
            if isinstance(form.model, DistributedDataParallel):
                form.model.replica.detach()
    return Measured(
        {name: one.seconds for name, one in series.items()},
        # Without DDP, gradients are of one rank.
        {name: _difference(name, form.gradients, expected) for name, form in forms.items() if name != BARE},
        {name: form.graph_breaks for name, form in forms.items()},
        sum(p.numel() for p in start.parameters()),
    )


@dataclass(frozen=True, slots=True)
class _Form:
    """A model in one of the forms, after its first steps."""

    model: Any
    call: Any
    gradients: list[Tensor]
    graph_breaks: int


def _forms(plan: Plan, start: GPT2, world: _World, inputs: Tensor, report: Callable[[int], object]) -> dict[str, _Form]:
    forms: dict[str, _Form] = {}
    for name in sorted(dict.fromkeys([EAGER, *plan.forms]), key=lambda name: name not in _WITHOUT_OURS):
        before = _graph_breaks()
        model, call = _FORMS[name](copy.deepcopy(start), world, plan)
        for _ in range(_CHECKED_STEPS):
            _step(call, model, inputs)()
            report(0)
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        forms[name] = _Form(model, call, gradients, _graph_breaks() - before)
        _set_hook(model, world, plan.hook)
    return forms


def _difference(form: str, found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference of any element. Raises if it is no rounding."""
    largest = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    scale = max(float(b.abs().max()) for b in expected)
    if not largest <= _CLOSE[expected[0].device.type] * scale:
        raise InternalError(
            f"compile: {FORMS[form]} computes other gradients than the uncompiled model: {largest:.3g} off."
        )
    return largest


def _model(plan: Plan) -> GPT2:
    model = GPT2(plan.shape)
    if plan.checkpointing:
        model.blocks = nn.ModuleList(_Checkpointed(block) for block in model.blocks)
    return model


class _Checkpointed(nn.Module):
    """A block whose activations are computed again in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Any:
        """The block's result."""
        return checkpoint(self.block, x, use_reentrant=False)


@dataclass(frozen=True, slots=True)
class _World:
    """What connects the ranks."""

    group: Group
    process_group: Any
    """The same, for torch's DDP."""

    @property
    def link(self) -> Link | None:
        """This rank's link, if there is one."""
        return self.group.link if isinstance(self.group, Throttled) else None


@contextmanager
def _world(plan: Plan, context: RankContext, device: torch.device) -> Iterator[_World]:
    store, name = PrefixStore("gradwire", context.store), "compile"
    if device.type == "cuda" and plan.mbit is None and context.size <= torch.cuda.device_count():
        with torch_world("cpu:gloo,cuda:nccl", store, context.rank, context.size, timeout=context.timeout):
            group: Group = C10dGroup(dist.group.WORLD, name=name)
            yield _World(group, dist.group.WORLD)
            group.close()
        return
    kind = (
        C10dGroup.gloo if device.type == "cuda" else SharedMemoryGroup
    )  # NCCL takes one rank per device, and no Throttled
    group = kind(store, context.rank, context.size, timeout=context.timeout, name=name)
    if plan.mbit is not None:
        group = Throttled(group, mbit=plan.mbit, latency_ms=plan.latency_ms)
    try:
        yield _World(group, as_process_group(group))
    finally:
        group.close()


# -- the forms: each returns the DDP, and what is called -------------------------------------------------------------------------


def _ours(model: nn.Module, world: _World, plan: Plan, bucket_mb: float | None = None) -> DistributedDataParallel:
    return DistributedDataParallel(
        model,
        process_group=world.group,
        bucket_cap_mb=bucket_mb or plan.bucket_mb,
        gradient_as_bucket_view=plan.bucket_views,
    )


def _eager(model: nn.Module, world: _World, plan: Plan) -> tuple[Any, Any]:
    ddp = _ours(model, world, plan)
    return ddp, ddp


def _with_own_code(model: Any) -> Any:
    """Dynamo has one graph for all models whose forward has the same code."""
    forward = model.forward.__func__
    model.forward = MethodType(FunctionType(forward.__code__.replace(), forward.__globals__), model)
    return model


def _bare(model: nn.Module, world: _World, plan: Plan) -> tuple[Any, Any]:
    return model, torch.compile(_with_own_code(model), backend=plan.backend, fullgraph=True)


def _inside(model: nn.Module, world: _World, plan: Plan, bucket_mb: float | None = None) -> tuple[Any, Any]:
    compiled: Any = torch.compile(model, backend=plan.backend, fullgraph=True)
    ddp = _ours(compiled, world, plan, bucket_mb)
    return ddp, ddp


def _outside(model: nn.Module, world: _World, plan: Plan) -> tuple[Any, Any]:
    ddp = _ours(model, world, plan)
    return ddp, torch.compile(ddp, backend=plan.backend, fullgraph=True)


def _blocks(model: Any, world: _World, plan: Plan) -> tuple[Any, Any]:
    for block in model.blocks:
        block.compile(backend=plan.backend, fullgraph=True)
    return _eager(model, world, plan)


def _torch(model: nn.Module, world: _World, plan: Plan) -> tuple[Any, Any]:
    """torch has Dynamo split the graph at buckets, so it takes no `fullgraph`."""
    ddp = nn.parallel.DistributedDataParallel(
        model,
        process_group=world.process_group,
        bucket_cap_mb=plan.bucket_mb,
        gradient_as_bucket_view=plan.bucket_views,
    )
    return ddp, torch.compile(ddp, backend=plan.backend)


_FORMS: Mapping[str, Callable[[Any, _World, Plan], tuple[Any, Any]]] = {
    EAGER: _eager,
    BARE: _bare,
    INSIDE: _inside,
    OUTSIDE: _outside,
    BLOCKS: _blocks,
    ONE_BUCKET: functools.partial(_inside, bucket_mb=_ALL_IN_ONE_MB),
    TORCH: _torch,
}


def _set_hook(model: Any, world: _World, name: str) -> None:
    if name == "mean" or isinstance(model, GPT2):
        return
    hook = NAMED_HOOKS[name].build()
    if isinstance(model, DistributedDataParallel):
        model.set_hook(hook)
    else:
        model.register_comm_hook(None, as_torch_hook(hook, world.group, named_parameters=model.named_parameters()))


def _step(call: Any, model: nn.Module, inputs: Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=inputs.is_cuda):
            loss = call(inputs)
        loss.backward()

    return step


def _base(step: Callable[[], None], model: Any, world: _World) -> Callable[[], None]:
    """`step`, without the communication that may be exposed."""

    def base() -> None:
        with model.no_sync() if world.link is None else world.link.unlimited():
            step()

    return base


def _fence(context: RankContext, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    context.barrier.wait()


def _graph_breaks() -> int:
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else sum(utils.counters["graph_break"].values())
