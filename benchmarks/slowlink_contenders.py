"""The contenders of `slowlink`: torch's DDP with and without its own hooks, and gradwire's with each of ours.

A contender is a context manager that wraps a model, on a rank, over that rank's link. Uses torch.distributed through
`peers`.

Note [Who drops a process group]
torch's PowerSGD hook leaves callbacks behind that hold its process group and run in a thread of gloo. If the group is destroyed
while such a thread still holds one, the thread drops the last reference, waits for itself, and crashes the process with "Resource
deadlock avoided". So ranks keep torch's process groups until all contenders are done.

Note [Who comes last]
The same callbacks start that hook's next collective, in whichever of gloo's threads has finished the previous one. With several
buckets in flight two ranks may start them in a different order, and gloo then ends the process ("Received data size doesn't match
expected size"). The only remedy here is to run all other contenders first.
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

from benchmarks import peers
from benchmarks.torch_hooks import TORCH_HOOKS
from benchmarks.world import RankContext
from gradwire.events import BucketFull, RankEvent, StepEnded
from gradwire.groups import C10dGroup, Group, SharedMemoryGroup
from gradwire.hooks.named import NAMED_HOOKS, NamedHook
from gradwire.interop import as_process_group
from gradwire.lab import Throttled
from gradwire.parallel import DistributedDataParallel

REFERENCE = "torch"
_COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


@dataclass(frozen=True, slots=True)
class Simulated:
    """A simulated link: ranks share memory, and `Throttled` makes them wait."""

    mbit: float
    latency_ms: float


class Reductions:
    """How long buckets were reduced, from the first that is full to the last average of a step, and what was sent meanwhile."""

    def __init__(self, sent: Callable[[], float]) -> None:
        self.seconds = self.nbytes = 0.0
        self._sent = sent
        self._since: tuple[float, float] | None = None

    def __call__(self, event: RankEvent) -> None:
        """Listens to a model."""
        if self._since is None:
            self._since = event.time, self._sent()
        elif isinstance(event, StepEnded):
            self.seconds += event.time - self._since[0]
            self.nbytes += self._sent() - self._since[1]
            self._since = None


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A model over a link."""

    model: nn.Module
    sent: Callable[[], float]
    """The bytes that this rank has sent so far."""
    attach: Callable[[Any], object] = lambda optimizer: None
    """Attach the optimizer to the hook, if it needs one."""
    reductions: Reductions | None = None
    """What is known of them; of torch's DDP nothing."""
    keep: object = None
    """What must be kept alive until the rank ends: see Note [Who drops a process group]."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to train."""

    name: str
    words: str
    wrap: Callable[[nn.Module, RankContext, Simulated | None, str], AbstractContextManager[Wrapped]]
    every: int = 1
    """The number of steps after which all replicas are equal."""


def sent_over_link() -> float:
    """As counted by the system: with all headers, and everything else that is sent."""
    return float(_COUNTER.read_text())


def _group(context: RankContext, link: Simulated | None, name: str) -> Group:
    store = PrefixStore(f"{name} gradwire", context.store)
    if link is None:
        return C10dGroup.gloo(store, context.rank, context.size, timeout=context.timeout, name=name)
    inner = SharedMemoryGroup(store, context.rank, context.size, timeout=context.timeout, name=name)
    return Throttled(inner, mbit=link.mbit, latency_ms=link.latency_ms)


def _ours(hook: NamedHook) -> Contender:
    @contextmanager
    def wrap(model: nn.Module, context: RankContext, link: Simulated | None, key: str) -> Iterator[Wrapped]:
        group = _group(context, link, key)
        try:
            ddp = DistributedDataParallel(model, process_group=group)
            ddp.set_hook(hook.build())
            sent = (lambda: group.sent_bytes) if isinstance(group, Throttled) else sent_over_link
            attach: Callable[[Any], object] = ddp.attach_optimizer if hook.needs_optimizer else lambda optimizer: None
            reductions = Reductions(sent)
            ddp.replica.reducer.events.listen(reductions, only=(BucketFull, StepEnded))
            yield Wrapped(ddp, sent, attach, reductions)
            ddp.replica.detach()
        finally:
            group.close()

    return Contender(hook.name, f"gradwire: {hook.words}", wrap, hook.every)


def _torchs(name: str, words: str, register: Callable[[Any], object]) -> Contender:
    @contextmanager
    def wrap(model: nn.Module, context: RankContext, link: Simulated | None, key: str) -> Iterator[Wrapped]:
        if link is None:
            with peers.torch_world(
                "gloo", PrefixStore(key, context.store), context.rank, context.size, timeout=context.timeout
            ):
                ddp = nn.parallel.DistributedDataParallel(model)
                register(ddp)
                yield Wrapped(ddp, sent_over_link, keep=ddp.process_group)
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
    {c.name: c for c in (*_TORCHS, *(_ours(hook) for hook in NAMED_HOOKS.values()))}
)
"""All contenders by name; the reference is the first."""


def default_names() -> tuple[str, ...]:
    """The default contenders, the reference first, and last the one that may crash a rank: see Note [Who comes last]."""
    ours = ("mean", "quantize8", "quantize4", "quantize1", "power_sgd", "top_k", "diloco", "local4")
    return (REFERENCE, "torch-fp16", *ours, "torch-powersgd")
