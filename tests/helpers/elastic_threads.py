"""A run whose members are threads: `fault` may end one, or do anything else, at each place of its loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.elasticity.deal import Deal
from gradwire.elasticity.hub import Records
from gradwire.elasticity.machine import View
from gradwire.elasticity.quorum import Limits
from gradwire.elasticity.run import ElasticRun
from gradwire.elasticity.run_records import RunRecords
from gradwire.groups.threads_group import ThreadGroup
from gradwire.policies import Graph
from helpers.waiting import wait_until

SLOTS, STEPS = 8, 12
DATA = [(torch.randn(4, generator=torch.Generator().manual_seed(i)).double(), torch.tensor(i % 3.0)) for i in range(64)]


class Killed(BaseException):
    """The process of a member ends here."""


class Threads:
    """Members of one run. `fault(world, me, place, run)` is called by each member at each place of its loop, and may raise."""

    fused = False
    graph = Graph.ALL_USED

    def __init__(
        self,
        path: Path,
        *,
        hook: Callable[[], Any] = lambda: None,
        fault: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        self.records = Records(path / "hub")
        self.hook, self.options = hook, options
        self.fault = fault or (lambda *_: None)
        self.results: dict[str, dict[str, Tensor]] = {}
        self.errors: dict[str, BaseException] = {}
        self.runs: dict[str, ElasticRun] = {}
        self.committed: dict[str, list[int]] = {}
        """By member, the steps that it has committed."""
        self.joined = threading.Event()
        self.views: dict[int, View] = {}
        self.threads: list[threading.Thread] = []
        self._worlds: dict[int, list[ThreadGroup]] = {}
        self._lock = threading.Lock()

    def build(self, view: View, me: str, _: RunRecords) -> ThreadGroup:
        with self._lock:
            self.views[view.epoch] = view
            if "joiner" in view.members:
                self.joined.set()
            world = self._worlds.setdefault(view.epoch, ThreadGroup.world(len(view.members), timeout=60))
        return world[view.members.index(me)]

    def start(self, me: str, starters: int = 0) -> None:
        model = make_model(len(me), fused=self.fused)  # not in its thread: random numbers are the process's
        self.threads.append(threading.Thread(target=self.live, args=(me, starters, *model), name=me))
        self.threads[-1].start()

    def live(self, me: str, starters: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        run = ElasticRun(model, optimizer, hook=self.hook(), data=deal(), graph=self.graph)
        self.runs[me], self.committed[me] = run, []
        self.prepare(me, run)
        try:
            self.train(me, run, starters)
            if not run.left:
                self.results[me] = dict(model.state_dict())
        except Killed:
            pass
        except BaseException as error:
            self.errors[me] = error
        RunRecords(self.records).mark(me, gone=True)
        run.release()  # as a process that has ended

    def prepare(self, me: str, run: ElasticRun) -> None:
        run.steps, run.check_every, run.training.update = STEPS, 1, lambda: self.update(me, run)

    def train(self, me: str, run: ElasticRun, starters: int) -> None:
        limits = Limits(**{"starters": starters, "patience": 30.0, **self.options})
        run.start(me, lambda: RunRecords(self.records), lambda *view: self.build(*view), limits)
        for step in run:
            if self.pace(run, step.number):
                return run.close()
            for x, y in step:
                self.fault(self, me, "forward", run)
                (run.model(x).squeeze(1) - y).square().mean().backward()
            self.fault(self, me, "vote", run)
            step.commit()
        return None

    def pace(self, run: ElasticRun, step: int) -> object:
        """Called before a step. True: training ends here."""
        if "joiner" in self.runs and step == STEPS - 3 and not self.joined.is_set():
            wait_until(lambda: run.performer._lobby or self.joined.is_set(), "the joiner is in the lobby")
        return False

    def update(self, me: str, run: ElasticRun) -> None:
        self.fault(self, me, "update", run)
        run.optimizer.step()
        self.committed[me].append(run.committed)

    def join(self) -> Threads:
        while any(thread.is_alive() for thread in self.threads):
            for thread in list(self.threads):
                thread.join(60.0)
                assert not thread.is_alive(), f"{thread.name} hangs"
        self.records.close()
        return self


def deal() -> Deal:
    return Deal(DATA, global_batch=16, slots=SLOTS, seed=3)


def make_model(seed: int = 0, *, fused: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Gradients lie on a grid, so that their sums are exact, in any order."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: (grad * 2**30).round() / 2**30)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)


def alone(
    seed: int, *, fused: bool = False, steps: int = STEPS, rate: Callable[[int], float] = lambda _: 0.01
) -> dict[str, Tensor]:
    """The same training by one process, without gradwire."""
    model, optimizer = make_model(seed, fused=fused)
    for step in range(steps):
        for slot in range(SLOTS):
            x, y = deal().batch(step, slot)
            (model(x).squeeze(1) - y).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= SLOTS
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def at(place: str, who: str, step: int, do: Callable[..., Any]) -> Callable[..., Any]:
    """A fault: `do(world)` once, when `who` is at this place of this step."""
    done = threading.Event()

    def fault(world: Threads, me: str, here: str, run: ElasticRun) -> None:
        if here == place and me == who and run.training.opened == step and not done.is_set():
            done.set()
            do(world)

    return fault


def replaced(world: Threads) -> None:
    world.start("joiner")
    wait_until(lambda: "joiner" in world.runs, "the others know that it comes: see `pace`")
    raise Killed


def check(world: Threads, expected: dict[str, Tensor], *, dead: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    assert not world.errors, world.errors
    assert world.results.keys() == world.runs.keys() - dead
    for me, state in world.results.items():
        for name, value in state.items():
            assert torch.equal(value, expected[name]), (me, name)
