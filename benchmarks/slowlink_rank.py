"""What each rank does in `slowlink`: train with one contender after another, and record the loss curve of each.

Note [What is timed]
Steps run in stretches between two evaluations. Ranks wait for each other before and after each stretch, at a barrier in a mapped
file, not over the link; the time between the two barriers counts, hence that of the slowest rank, and so do the bytes sent over the
link. Evaluations, and the communication about them, are not included. Neither is a warm-up on a tiny model, in which loops are
compiled.

Note [When the loss is reached]
The loss on fixed windows of held-out text is measured after each stretch. The target ("mark") is the final loss of the reference
plus a thousandth: sums in a different order already round differently. A contender has reached it when it first measures the
target or less; the same rule applies to the reference. If replicas diverge between exchanges, only evaluations right after an
exchange count, since before it there is no single model.

Note [Whether the link is busy]
While buckets are reduced, from the first that is full to the last average of a step, the link should carry as much as it can. How
much that is, is measured first: plain TCP, every host to the next one, all at once. Both are counted as the system counts them.

All contenders train the same model: weights, the order of the data and the optimizer depend only on the seed, the rank and the
step, never on the averaging.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore

from benchmarks.slowlink_contenders import CONTENDERS, Contender, Simulated, Wrapped, sent_over_link
from benchmarks.world import RankContext
from gradwire.cli.demo.model import (
    ALPHABET,
    SIZES as DEMO_SIZES,
    Corpus,
    Shape,
    Transformer,
    even_windows,
    random_windows,
    standard_library,
)

SIZES: Mapping[str, Shape] = MappingProxyType(
    {
        **DEMO_SIZES,
        "1m": Shape(width=128, layers=5, heads=4, context=64),
        "10m": Shape(width=384, layers=6, heads=6, context=64),
    }
)
"""`10m` has 10.7 million parameters, 43 MB of gradients; the others are for quick tests, and for other rates."""
_RATE_SECONDS = 2.0
_EXAM = 16
"""Windows of held-out text, on which the loss is measured."""
_WARM_UP = 5
"""Steps over which the learning rate rises."""


def start(size: str, seed: int) -> Transformer:
    """The model before the first step."""
    return Transformer(SIZES[size], len(ALPHABET), torch.Generator().manual_seed(seed))


class Learner:
    """One rank's model in training. `wrapped` is `model` as wrapped by a contender."""

    def __init__(
        self, model: Transformer, wrapped: nn.Module, corpus: Corpus, *, seed: int, batch: int, rate: float
    ) -> None:
        """`seed` draws the text that it reads: every rank reads its own."""
        self.model, self.wrapped = model, wrapped
        self.steps = 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / _WARM_UP))
        self._text, self._batch = corpus.train, batch
        self._places = torch.Generator().manual_seed(seed)
        self._length = model.shape.context + 1
        self._exam = even_windows(corpus.held_out, _EXAM, self._length)

    def step(self) -> None:
        """Forward, backward with its communication, optimizer."""
        self.optimizer.zero_grad()
        windows = random_windows(self._text, self._batch, self._length, self._places)
        _loss(self.wrapped, windows).backward()
        self.optimizer.step()
        self._schedule.step()
        self.steps += 1

    @torch.no_grad()
    def examine(self) -> float:
        """The loss, in nats per character, on the same windows of held-out text every time."""
        return float(_loss(self.model, self._exam))


def _loss(model: nn.Module, windows: Tensor) -> Tensor:
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


_TINY = "tiny"
_TRY = 3
_HAIR = 1e-3


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, by which contenders, and for how long. The reference ends after `steps`, or `seconds` if given; the others
    when they have reached its loss, or after `patience` times as many seconds or steps."""

    names: tuple[str, ...]
    size: str
    batch: int
    rate: float
    seed: int
    steps: int
    seconds: float | None
    exam_every: int
    patience: float
    link: Simulated | None
    """None if ranks are on hosts with real links."""

    def reader(self, rank: int) -> int:
        """The seed by which a rank draws the text that it reads."""
        return 1000 * self.seed + rank + 1


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a loss curve: after `steps`, which took `seconds` and made a rank send `nbytes`, the loss was `loss`."""

    steps: int
    seconds: float
    nbytes: float
    loss: float
    whole: bool = True
    """Whether all replicas were equal."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One contender's loss curve."""

    name: str
    points: tuple[Point, ...]
    busy: float | None = None
    """How much of what the link could carry was sent while buckets were reduced: see Note [Whether the link is busy]."""

    @property
    def last(self) -> Point:
        """Where it ended."""
        return self.points[-1]

    @property
    def step_seconds(self) -> float:
        """The mean time of a step."""
        return self.last.seconds / max(1, self.last.steps)

    @property
    def step_bytes(self) -> float:
        """The mean bytes that a rank sent per step."""
        return self.last.nbytes / max(1, self.last.steps)

    @property
    def mark(self) -> float:
        """The loss that others must reach, if this is the reference."""
        return self.last.loss * (1 + _HAIR)

    def reached(self, loss: float) -> Point | None:
        """Where it first had `loss` or less: see Note [When the loss is reached]."""
        return next((p for p in self.points if p.whole and p.steps and p.loss <= loss), None)


@dataclass(frozen=True, slots=True)
class News:
    """Rank 0: a contender's progress, and its whole curve once it is done."""

    name: str
    point: Point
    curve: Curve | None


def run_contenders(plan: Plan, context: RankContext) -> list[Curve]:
    """Train on this rank, together with all others: every contender's curve."""
    corpus = standard_library()
    curves: list[Curve] = []
    kept: list[object] = []
    rate = link_rate(context) if plan.link is None else plan.link.mbit * 1e6 / 8
    for name in plan.names:
        contender = CONTENDERS[name]
        _try(plan, contender, corpus, context, kept)
        curves.append(_run(plan, contender, corpus, context, kept, curves[0] if curves else None, rate))
    return curves


def link_rate(context: RankContext) -> float:
    """The bytes per second that this host's link carries: see Note [Whether the link is busy]."""
    store = context.store
    assert isinstance(store, TCPStore)  # as it is where ranks are on hosts
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((store.host, store.port))  # a datagram socket: nothing is sent
        here = probe.getsockname()[0]
    with socket.create_server((here, 0)) as server:
        store.set(f"link {context.rank}", f"{here} {server.getsockname()[1]}")
        there, port = store.get(f"link {(context.rank + 1) % context.size}").decode().split()
        with socket.create_connection((there, int(port)), context.timeout) as out, server.accept()[0] as came:
            end = time.perf_counter() + 2 * _RATE_SECONDS

            def send() -> None:
                while time.perf_counter() < end:
                    out.sendall(bytes(1 << 18))
                out.shutdown(socket.SHUT_WR)

            def receive() -> None:
                while came.recv(1 << 18):
                    pass

            threads = [threading.Thread(target=target) for target in (send, receive)]
            for thread in threads:
                thread.start()
            time.sleep(_RATE_SECONDS / 2)  # until the connection has its speed
            begin, sent = time.perf_counter(), sent_over_link()
            time.sleep(_RATE_SECONDS)
            rate = (sent_over_link() - sent) / (time.perf_counter() - begin)
            for thread in threads:
                thread.join()
    context.report(None)
    return rate


def _try(plan: Plan, contender: Contender, corpus: Corpus, context: RankContext, kept: list[object]) -> None:
    """A few steps of a tiny model: see Note [What is timed]."""
    model = start(_TINY, plan.seed)
    with contender.wrap(model, context, plan.link, f"{contender.name} try") as wrapped:
        kept.append(wrapped.keep)
        learner = Learner(model, wrapped.model, corpus, seed=plan.reader(context.rank), batch=1, rate=plan.rate)
        wrapped.attach(learner.optimizer)
        for _ in range(_TRY):
            learner.step()
        context.barrier.wait()  # no rank closes while another is still working
    context.report(None)


def _run(
    plan: Plan,
    contender: Contender,
    corpus: Corpus,
    context: RankContext,
    kept: list[object],
    reference: Curve | None,
    rate: float,
) -> Curve:
    model = start(plan.size, plan.seed)
    with contender.wrap(model, context, plan.link, contender.name) as wrapped:
        kept.append(wrapped.keep)
        learner = Learner(
            model, wrapped.model, corpus, seed=plan.reader(context.rank), batch=plan.batch, rate=plan.rate
        )
        wrapped.attach(learner.optimizer)
        points = [Point(0, 0.0, 0.0, learner.examine())]
        over = False
        while not over:
            points.append(_stretch(plan, contender, wrapped, learner, context, points[-1]))
            over = _agree(
                context, f"{contender.name} {learner.steps}", _is_over(plan, points, contender.name, reference)
            )
            found = wrapped.reductions
            busy = found.nbytes / (rate * found.seconds) if found is not None and found.seconds else None
            if context.rank == 0:
                done = Curve(contender.name, tuple(points), busy) if over else None
                context.report(News(contender.name, points[-1], done))
        context.barrier.wait()
    return Curve(contender.name, tuple(points), busy)


def _stretch(
    plan: Plan, contender: Contender, wrapped: Wrapped, learner: Learner, context: RankContext, before: Point
) -> Point:
    context.barrier.wait()
    begin, sent = time.perf_counter(), wrapped.sent()
    for _ in range(plan.exam_every):
        learner.step()
    context.barrier.wait()
    seconds, nbytes = time.perf_counter() - begin, wrapped.sent() - sent
    whole = learner.steps % contender.every == 0
    return Point(learner.steps, before.seconds + seconds, before.nbytes + nbytes, learner.examine(), whole)


def _is_over(plan: Plan, points: Sequence[Point], name: str, reference: Curve | None) -> bool:
    here = points[-1]
    if reference is None:
        return here.steps >= plan.steps if plan.seconds is None else here.seconds >= plan.seconds
    if Curve(name, tuple(points)).reached(reference.mark) is not None:
        return True
    end = reference.last
    return here.seconds >= plan.patience * end.seconds or here.steps >= plan.patience * end.steps


def _agree(context: RankContext, key: str, over: bool) -> bool:
    """Rank 0's decision, on every rank."""
    if context.rank == 0:
        context.store.set(f"over {key}", "yes" if over else "no")
    return bytes(context.store.get(f"over {key}")) == b"yes"
