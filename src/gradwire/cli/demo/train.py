"""What one rank of the demo does: the same model everywhere, a different part of the text, gradients averaged in every step.

An ordinary training loop around one call of `replicate`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.cli.demo.model import DemoJob, Transformer, decode, encode, even_windows, random_windows, standard_library
from gradwire.collectives import ReduceOp
from gradwire.groups import Group
from gradwire.parallel import replicate
from gradwire.parallel.divergence import digest, digests

_PROMPT = "def "
_SAMPLE = 160
_EXAM = 64
_LEARNING_RATE = 4e-3


@dataclass(frozen=True, slots=True)
class Trained:
    """The results on one rank. Losses are means over all ranks, in nats per character."""

    parameters: int
    first_loss: float
    last_loss: float
    held_out_loss: float
    unigram_entropy: float
    seconds: float
    tokens: int
    sample: str
    fingerprints: tuple[str, ...]

    @property
    def replicas_equal(self) -> bool:
        """Whether all ranks ended with the same parameters, bit for bit."""
        return len(set(self.fingerprints)) == 1


Watch = Callable[[int, Sequence[float], float], None]
"""Receives the training progress, on every rank: steps done, the losses of the last one by rank, and tokens per second."""


def train(job: DemoJob, group: Group, watch: Watch) -> Trained:
    """Train the job's model on this rank of `group`, together with all others."""
    corpus = standard_library()
    model = job.model()
    parameters = list(model.parameters())
    replica = replicate(model, group=group)
    started = time.perf_counter()
    losses = _learn(job, group, model, corpus.train, watch)
    seconds = time.perf_counter() - started
    replica.detach()
    # Rank 0 generates text after the last collective, so that no rank waits for it.
    held_out_loss, prints = _examine(group, model, corpus.held_out), fingerprints(group, parameters)
    drawn = torch.Generator().manual_seed(job.seed)
    return Trained(
        parameters=sum(p.numel() for p in parameters),
        first_loss=losses[0],
        last_loss=losses[-1],
        held_out_loss=held_out_loss,
        unigram_entropy=corpus.unigram_entropy(),
        seconds=seconds,
        tokens=_tokens_per_step(job, group) * job.steps,
        sample=decode(model.continue_text(encode(_PROMPT).long(), _SAMPLE, drawn)) if group.rank == 0 else "",
        fingerprints=prints,
    )


def _learn(job: DemoJob, group: Group, model: Transformer, text: Tensor, watch: Watch) -> list[float]:
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    warm_up = max(1, job.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warm_up) * (1.0 - 0.9 * step / job.steps)
    )
    # Every rank reads a different part of the text, or averaging gradients would be pointless.
    places = torch.Generator().manual_seed(job.seed * group.size + group.rank + 1)
    length = model.shape.context + 1
    started, losses = time.perf_counter(), []
    for step in range(1, job.steps + 1):
        optimizer.zero_grad()
        loss = model.loss(random_windows(text, job.batch_size, length, places))
        loss.backward()  # in which the gradients are averaged over all ranks
        optimizer.step()
        schedule.step()
        by_rank = _gather(group, loss.detach(), label="losses")
        losses.append(sum(by_rank) / group.size)
        watch(step, by_rank, step * _tokens_per_step(job, group) / (time.perf_counter() - started))
    return losses


def fingerprints(group: Group, tensors: Sequence[Tensor]) -> tuple[str, ...]:
    """A digest of the bits of each rank's `tensors`, in rank order, on every rank."""
    mine = digest(digests(tensors, torch.device("cpu")))
    return tuple(f"{value % 2**64:016x}" for value in _gather(group, mine, label="fingerprints"))


def _gather(group: Group, mine: Tensor, *, label: str) -> list[Any]:
    gathered = mine.new_empty(group.size)
    group.all_gather_into_tensor(gathered, mine.view(1), label=label)
    return gathered.tolist()


@torch.no_grad()
def _examine(group: Group, model: Transformer, text: Tensor) -> float:
    """The loss on the held-out text, of which each rank reads its share."""
    windows = even_windows(text, _EXAM * group.size, model.shape.context + 1)
    loss = model.loss(windows[group.rank :: group.size])
    group.all_reduce(loss, ReduceOp.AVG, label="held-out loss")
    return loss.item()


def _tokens_per_step(job: DemoJob, group: Group) -> int:
    return job.batch_size * job.shape.context * group.size
