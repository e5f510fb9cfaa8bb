"""Who takes part in `gradwire lab slowlink`: torch's DDP with and without its own hooks, and gradwire's with each of ours.

A contender is a function that makes, on a rank, a wrapped model over a link of that rank, and says how to take it apart.
Takes torch.distributed from `bench.peers`.

Note [Who drops a process group]
torch's PowerSGD hook leaves functions behind that hold its process group and run in a thread of gloo. If the group is destroyed
while such a thread still has one, the thread is the last to drop it, waits for itself, and takes the process down with "Resource
deadlock avoided". So ranks hold on to torch's process groups until all contenders are through.

Note [Who comes last]
The same functions start that hook's next collective, in whichever of gloo's threads has ended the one before. With several buckets
under way two ranks may start them in different order, and gloo then ends the process ("Received data size doesn't match expected
size"). Nothing can be done about that from here but to have everybody else through by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn
from torch._C._distributed_c10d import PrefixStore

from gradwire.cli.experiment import peers
from gradwire.cli.experiment.rank_context import RankContext
from gradwire.cli.experiment.recipes import RECIPES, Recipe
from gradwire.cli.experiment.torch_hooks import TORCH_HOOKS
from gradwire.groups import C10dGroup, Group, SharedMemoryGroup
from gradwire.interop import as_process_group
from gradwire.lab import Throttled
from gradwire.parallel import DistributedDataParallel

REFERENCE = "torch"
_COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


@dataclass(frozen=True, slots=True)
class Simulated:
    """A link that is not there: ranks share memory, and `Throttled` makes them wait."""

    mbit: float
    latency_ms: float


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A model over a link."""

    model: nn.Module
    sent: Callable[[], float]
    """The bytes that this rank has sent so far."""
    attach: Callable[[Any], object] = lambda optimizer: None
    """Tell the hook of the optimizer, where it wants to know it."""
    keep: object = None
    """What must not be dropped before the rank ends: see Note [Who drops a process group]."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to train."""

    name: str
    words: str
    wrap: Callable[[nn.Module, RankContext, Simulated | None, str], AbstractContextManager[Wrapped]]
    every: int = 1
    """After how many steps all replicas are equal."""


def _sent_over_link() -> float:
    """As the system counts them: with all headers, and what the other rank was told beside gradients."""
    return float(_COUNTER.read_text())


def _group(context: RankContext, link: Simulated | None, name: str) -> Group:
    store = PrefixStore(f"{name} gradwire", context.store)
    if link is None:
        return C10dGroup.gloo(store, context.rank, context.size, timeout=context.timeout, name=name)
    inner = SharedMemoryGroup(store, context.rank, context.size, timeout=context.timeout, name=name)
    return Throttled(inner, mbit=link.mbit, latency_ms=link.latency_ms)


def _ours(recipe: Recipe) -> Contender:
    @contextmanager
    def wrap(model: nn.Module, context: RankContext, link: Simulated | None, key: str) -> Iterator[Wrapped]:
        group = _group(context, link, key)
        try:
            ddp = DistributedDataParallel(model, process_group=group)
            ddp.set_hook(recipe.build())
            sent = (lambda: group.sent_bytes) if isinstance(group, Throttled) else _sent_over_link
            attach: Callable[[Any], object] = (
                ddp.attach_optimizer if recipe.steps_on_its_own else lambda optimizer: None
            )
            yield Wrapped(ddp, sent, attach)
            ddp.replica.detach()
        finally:
            group.close()

    return Contender(recipe.name, f"gradwire: {recipe.words}", wrap, recipe.every)


def _torchs(name: str, words: str, register: Callable[[Any], object]) -> Contender:
    @contextmanager
    def wrap(model: nn.Module, context: RankContext, link: Simulated | None, key: str) -> Iterator[Wrapped]:
        if link is None:
            with peers.gloo_world(PrefixStore(key, context.store), context.rank, context.size, timeout=context.timeout):
                ddp = nn.parallel.DistributedDataParallel(model)
                register(ddp)
                yield Wrapped(ddp, _sent_over_link, keep=ddp.process_group)
            return
        group = _group(context, link, key)
        assert isinstance(group, Throttled)
        process_group = as_process_group(group)
        try:
            ddp = nn.parallel.DistributedDataParallel(model, process_group=process_group)
            register(ddp)
            yield Wrapped(ddp, lambda: group.sent_bytes)
        finally:
            group.close()

    return Contender(name, f"torch DDP: {words}", wrap)


def _nothing(ddp: Any) -> None:
    """torch's own all-reduce."""


def _register(name: str) -> Callable[[Any], object]:
    return lambda ddp: ddp.register_comm_hook(*TORCH_HOOKS[name](ddp.process_group))


_TORCHS = (
    _torchs(REFERENCE, "dense float32", _nothing),
    _torchs("torch-fp16", "its fp16_compress_hook", _register("torch-fp16")),
    _torchs("torch-powersgd", "its powerSGD_hook, rank 4, from step 3 on", _register("torch-powersgd")),
)
CONTENDERS: Mapping[str, Contender] = MappingProxyType(
    {c.name: c for c in (*_TORCHS, *(_ours(recipe) for recipe in RECIPES.values()))}
)
"""All contenders by name; the reference is the first."""


def default_names() -> tuple[str, ...]:
    """Who takes part unless told otherwise, the reference first, and last who may end a rank: see Note [Who comes last]."""
    ours = ("mean", "quantize8", "quantize4", "quantize1", "power_sgd", "top_k", "diloco", "local4")
    return (REFERENCE, "torch-fp16", *ours, "torch-powersgd")
