"""What `parity` trains, on one rank: an MLP on scikit-learn's digits, or a transformer on the standard library's
source. Only seed and rank determine weights and data.

Note [Long and short]
A hook that sends less may reach the same loss but take longer. Digits and Text are trained until convergence, so they show the
final loss of a hook; ShortText stops while the loss still falls with every step, so it shows what a hook costs on the way.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.world import RankContext
from gradwire.cli.demo.model import ALPHABET, SIZES, Shape, Transformer, even_windows, random_windows, standard_library
from gradwire.collectives import ReduceOp
from gradwire.groups import Group, SharedMemoryGroup
from gradwire.hooks.named import NAMED_HOOKS, NamedHook
from gradwire.interop import as_fsdp_reduce_scatter, from_process_group, fsdp_parameters
from gradwire.parallel import DistributedDataParallel


@dataclass(frozen=True, slots=True)
class Score:
    """A model's final score on held-out data: cross-entropy, and accuracy."""

    loss: float
    accuracy: float


Scores = Mapping[str, Sequence[Score]]
"""The results of all seeds, by the hook's name."""


class Task(ABC):
    """A model, its data and its optimizer. `words` describes them."""

    words: str
    steps: int
    """The default number of steps."""

    @abstractmethod
    def model(self, generator: torch.Generator) -> nn.Module:
        """A new model. Inputs in, one row of logits per target out."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """An optimizer for `model`."""

    @abstractmethod
    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Training inputs and targets."""

    @abstractmethod
    def exam(self) -> tuple[Tensor, Tensor]:
        """Held-out inputs and targets."""


class Digits(Task):
    """1797 images of digits, 8 x 8."""

    words = "scikit-learn's digits, MLP 64-128-128-10, SGD with momentum 0.9, 16 images per rank and step"
    steps = 2000

    def __init__(self) -> None:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]

        data = load_digits()
        inputs, answers = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))  # the same for every seed
        self._inputs, self._answers = inputs[order], answers[order]
        self._train = len(inputs) * 4 // 5

    def model(self, generator: torch.Generator) -> nn.Module:
        """Three linear layers."""
        layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
        with torch.no_grad():
            for p in layers.parameters():
                if p.dim() > 1:
                    p.normal_(0.0, (2 / p.shape[1]) ** 0.5, generator=generator)
                else:
                    p.zero_()
        return layers

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """16 pictures."""
        chosen = torch.randint(self._train, (16,), generator=generator)
        return self._inputs[chosen], self._answers[chosen]

    def exam(self) -> tuple[Tensor, Tensor]:
        """Every fifth image."""
        return self._inputs[self._train :], self._answers[self._train :]


class Text(Task):
    """A little Python source, character by character: so little that the model converges."""

    words = (
        "50 000 characters of the standard library's source, transformer of 1 layer and width 32, AdamW, "
        "2 x 32 characters per rank and step"
    )
    steps = 4500
    _shape = Shape(width=32, layers=1, heads=2, context=32)
    _windows = 2
    _length: int | None = 50_000

    def __init__(self) -> None:
        self._corpus = standard_library()

    def model(self, generator: torch.Generator) -> nn.Module:
        """The demo's model."""
        return Transformer(self._shape, len(ALPHABET), generator)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A few windows."""
        text = self._corpus.train[: self._length]
        windows = random_windows(text, self._windows, self._shape.context + 1, generator)
        return windows[:, :-1], windows[:, 1:]

    def exam(self) -> tuple[Tensor, Tensor]:
        """8192 characters of held-out modules."""
        windows = even_windows(self._corpus.held_out, 8192 // self._shape.context, self._shape.context + 1)
        return windows[:, :-1], windows[:, 1:]


class ShortText(Text):
    """All of it, for so short a time that the loss still falls with every step."""

    words = "source of the standard library, transformer of 2 layers and width 64, AdamW, 4 x 64 characters per rank and step"
    steps = 400
    _shape = SIZES["small"]
    _windows = 4
    _length = None


TASKS: Mapping[str, type[Task]] = MappingProxyType({"digits": Digits, "text": Text, "text-short": ShortText})
WARM_UP = 20


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, with which hooks, from how many seeds and for how many steps each."""

    task: str
    names: tuple[str, ...]
    seeds: int
    steps: int
    shards: bool = False
    """Whether FSDP2 shards the model over the ranks, with hooks in place of its reduce-scatter."""


def run_plan(plan: Plan, context: RankContext) -> Scores:
    """Run it on this rank, together with all others."""
    task = TASKS[plan.task]()
    scores: dict[str, list[Score]] = {name: [] for name in plan.names}
    for seed in range(plan.seeds):
        for name in plan.names:
            store = PrefixStore(f"{name} {seed}", context.store)
            with _group(store, context, shards=plan.shards) as group:
                scores[name].append(train(task, NAMED_HOOKS[name], seed, plan.steps, group, shards=plan.shards))
                context.barrier.wait()  # no rank closes while another is still working
            if context.rank == 0:
                context.report(sum(map(len, scores.values())))
    return scores


@contextmanager
def _group(store: Store, context: RankContext, *, shards: bool) -> Iterator[Group]:
    if not shards:
        with SharedMemoryGroup(store, context.rank, context.size, timeout=context.timeout) as group:
            yield group
        return
    limit = timedelta(seconds=context.timeout)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.size, timeout=limit)
    try:
        with from_process_group(dist.group.WORLD) as group:
            yield group
    finally:
        dist.destroy_process_group()


def _shard(model: nn.Module, hook: NamedHook, group: Group) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (group.size,)))
    for module, named in fsdp_parameters(model) if hook.name != "mean" else ():
        module.set_custom_reduce_scatter(as_fsdp_reduce_scatter(hook.build(), group, named_parameters=named))


def train(task: Task, hook: NamedHook, seed: int, steps: int, group: Group, *, shards: bool = False) -> Score:
    """Train on this rank, together with all others, and evaluate the result."""
    model = task.model(torch.Generator().manual_seed(seed))
    if shards:
        _shard(model, hook, group)
    ddp = None if shards else DistributedDataParallel(model, process_group=group)
    optimizer = task.optimizer(model)
    if ddp is not None:
        ddp.set_hook(hook.build())
        if hook.needs_optimizer:
            ddp.attach_optimizer(optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM_UP) * 0.5 * (1.0 + math.cos(math.pi * step / steps))
    )
    data = torch.Generator().manual_seed(10_000 * (seed + 1) + group.rank)  # every rank reads different data
    for _ in range(steps):
        inputs, answers = task.batch(data)
        optimizer.zero_grad()
        _loss(ddp or model, inputs, answers).backward()
        optimizer.step()
        schedule.step()
    if ddp is not None:
        ddp.replica.detach()
    return _examine(task, model, group)


def _loss(model: nn.Module, inputs: Tensor, answers: Tensor) -> Tensor:
    logits: Tensor = model(inputs)
    return F.cross_entropy(logits.flatten(0, -2), answers.flatten())


@torch.no_grad()
def _examine(task: Task, model: nn.Module, group: Group) -> Score:
    """Each rank evaluates its share of the held-out data."""
    inputs, answers = (t[group.rank :: group.size] for t in task.exam())
    logits = model(inputs).flatten(0, -2)
    right = (logits.argmax(-1) == answers.flatten()).sum()
    total = F.cross_entropy(logits, answers.flatten(), reduction="sum")
    sums = torch.stack([total.double(), right.double(), torch.tensor(float(answers.numel()), dtype=torch.float64)])
    group.all_reduce(sums, ReduceOp.SUM, label="exam")
    return Score(float(sums[0] / sums[2]), float(sums[1] / sums[2]))
