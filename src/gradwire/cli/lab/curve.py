"""What each rank does in `gradwire lab slowlink`: train with one contender after another, and record the loss curve of each.

Note [What is timed]
Steps are taken in stretches between two examinations. Ranks meet before and after each stretch, at counters in a mapped file and
not over the link; the time between the two barriers counts, hence that of the slowest rank, and so do the bytes that have left
the link. Examinations, and what ranks tell each other about them, lie outside. So does a first try on a tiny model, in which
loops are compiled.

Note [When the loss is reached]
The loss on fixed windows of unseen text is measured after each stretch. The loss at which the reference ended, and a thousandth
of it, is the mark: the thousandth, because sums in another order already give other roundings. Who measures the mark or less for
the first time has reached it, the reference by the same rule. Where replicas are apart between exchanges
only examinations right after an exchange count, since before it there is no one model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.cli.demo.text import Corpus, standard_library
from gradwire.cli.experiment.rank_context import RankContext
from gradwire.cli.lab.contenders import CONTENDERS, Contender, Simulated, Wrapped
from gradwire.cli.lab.learner import Learner, start

_TINY = "tiny"
_TRY = 3
_HAIR = 1e-3


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, by whom, and how long. The reference ends after `steps`, or `seconds` if there are any; the others when
    they have reached its loss, or after `patience` times as many seconds or steps."""

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
    """None where ranks are on hosts with real links."""


@dataclass(frozen=True, slots=True)
class Point:
    """How far a contender had come: after `steps`, which took `seconds` and made a rank send `nbytes`, it had `loss`."""

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

    @property
    def last(self) -> Point:
        """Where it ended."""
        return self.points[-1]

    @property
    def step_seconds(self) -> float:
        """What a step took, on average."""
        return self.last.seconds / max(1, self.last.steps)

    @property
    def step_bytes(self) -> float:
        """What a rank sent in a step, on average."""
        return self.last.nbytes / max(1, self.last.steps)

    @property
    def mark(self) -> float:
        """The loss that others are to reach, if this is the reference."""
        return self.last.loss * (1 + _HAIR)

    def reached(self, loss: float) -> Point | None:
        """Where it first had `loss` or less: see Note [When the loss is reached]."""
        return next((p for p in self.points if p.whole and p.steps and p.loss <= loss), None)


@dataclass(frozen=True, slots=True)
class News:
    """Rank 0: this is where a contender is, and its whole way once that is over."""

    name: str
    point: Point
    curve: Curve | None


def run_contenders(plan: Plan, context: RankContext) -> list[Curve]:
    """Train on this rank, together with all others: every contender's way."""
    corpus = standard_library()
    curves: list[Curve] = []
    kept: list[object] = []
    for name in plan.names:
        contender = CONTENDERS[name]
        _try(plan, contender, corpus, context, kept)
        curves.append(_run(plan, contender, corpus, context, kept, curves[0] if curves else None))
    return curves


def _try(plan: Plan, contender: Contender, corpus: Corpus, context: RankContext, kept: list[object]) -> None:
    """A few steps of a tiny model: see Note [What is timed]."""
    model = start(_TINY, plan.seed)
    with contender.wrap(model, context, plan.link, f"{contender.name} try") as wrapped:
        kept.append(wrapped.keep)
        learner = Learner(model, wrapped.model, corpus, rank=context.rank, batch=1, rate=plan.rate, seed=plan.seed)
        wrapped.attach(learner.optimizer)
        for _ in range(_TRY):
            learner.step()
        context.barrier.wait()  # nobody closes while another still works
    context.report(None)


def _run(
    plan: Plan, contender: Contender, corpus: Corpus, context: RankContext, kept: list[object], reference: Curve | None
) -> Curve:
    model = start(plan.size, plan.seed)
    with contender.wrap(model, context, plan.link, contender.name) as wrapped:
        kept.append(wrapped.keep)
        learner = Learner(
            model, wrapped.model, corpus, rank=context.rank, batch=plan.batch, rate=plan.rate, seed=plan.seed
        )
        wrapped.attach(learner.optimizer)
        points = [Point(0, 0.0, 0.0, learner.examine())]
        over = False
        while not over:
            points.append(_stretch(plan, contender, wrapped, learner, context, points[-1]))
            over = _agree(
                context, f"{contender.name} {learner.steps}", _is_over(plan, points, contender.name, reference)
            )
            if context.rank == 0:
                done = Curve(contender.name, tuple(points)) if over else None
                context.report(News(contender.name, points[-1], done))
        context.barrier.wait()
    return Curve(contender.name, tuple(points))


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
    """Rank 0's word, on every rank."""
    if context.rank == 0:
        context.store.set(f"over {key}", "yes" if over else "no")
    return bytes(context.store.get(f"over {key}")) == b"yes"
