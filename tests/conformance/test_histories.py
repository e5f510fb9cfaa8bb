"""Random histories of ranks that join, leave and crash, and of steps that are dropped and tried again, on simulated ranks.

After each change of the ranks, the mean of what they owe is what it was, less what a crash is reported to have lost; a retry gives
the same bits.
"""

import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire import hooks
from gradwire.hooks import BucketSpec, CommHook, OuterHook, Turn
from gradwire.hooks.state import add_owed
from gradwire.reducer.hook.hook_states import HookStates, from_dict, owed_norm, to_dict, with_ranks
from gradwire.testing import simulate, simulate_outer
from gradwire.testing.hook_trial import equal_states, same_bits

MOST_RANKS, TOLERANCE = 16, 1e-6
SPEC = BucketSpec(0, ("w", "b"), ((6, 4), (5,)), ((4, 1), (1,)), torch.float32, torch.device("cpu"))
FEED = hooks.error_feedback()
LOW, SPARSE = hooks.power_sgd(1, min_compression=1), hooks.top_k(ratio=0.1)
EXACT: list[CommHook] = [
    hooks.chain(FEED, SPARSE),
    hooks.chain(FEED, hooks.quantize(bits=2, block=32)),
    hooks.chain(FEED, LOW),
    hooks.every(3, hooks.mean()),
    hooks.every(2, hooks.chain(FEED, SPARSE)),
    hooks.every(2, hooks.mean(), otherwise=hooks.chain(FEED, LOW)),
    hooks.partition({"w": hooks.chain(FEED, LOW), "*": hooks.mean()}),
    hooks.after(2, hooks.chain(FEED, SPARSE)),
    hooks.hierarchical(across=hooks.chain(FEED, SPARSE)),
    hooks.hierarchical(inside=hooks.chain(FEED, LOW), across=hooks.every(2, hooks.chain(FEED, SPARSE))),
    hooks.partition({"b": hooks.mean(), "*": hooks.hierarchical(across=hooks.chain(FEED, LOW))}),
]
"""Of which all that was not averaged is owed."""
OTHERS: list[CommHook] = [
    hooks.chain(hooks.error_feedback(decay=0.9), hooks.chunked_top_k(2, chunk=8, bits=2)),
    hooks.chain(hooks.clip(norm=1.0), FEED, SPARSE),
    hooks.dgc(0.1),
    hooks.decoupled_momentum(chunk=4, k=2),
    hooks.dion(rank=2),
    hooks.power_sgd(1, min_compression=1),
    hooks.hierarchical(across=hooks.dgc(0.1)),
    hooks.sparse_loco(k=2, chunk=8),
    hooks.diloco(every=2, hook=hooks.chain(FEED, hooks.visible(torch.bfloat16), LOW)),
]


class History:
    """The ranks of one history, each with its states."""

    def __init__(self, hook: CommHook, seed: int) -> None:
        self.hook, self.draw = hook, random.Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)
        self.ranks = [HookStates(hook) for _ in range(self.draw.randint(2, MOST_RANKS))]
        self.parameters, self.steps = torch.zeros(SPEC.numel), 0
        self.begin()
        self.missing = torch.zeros(SPEC.numel, dtype=torch.float64)
        """The sum of all means, less all averages and what crashes have lost: what is owed, if a hook is exact."""

    def begin(self) -> None:
        """The first step of new ranks, or of other ones."""
        size = len(self.ranks)
        self.hosts: list[list[int]] | None = None
        if "hierarchical" in repr(self.hook):
            cut = self.draw.randint(1, size)
            self.hosts = [host for host in (list(range(cut)), list(range(cut, size))) if host]
        for rank, states in enumerate(self.ranks):
            if isinstance(self.hook, OuterHook):
                self.hook.begin(self.parameters, states.of(SPEC), Turn(SPEC, rank, size, self.steps))

    def gradients(self) -> list[Tensor]:
        return [torch.randn(SPEC.numel, generator=self.numbers) * (1 + rank) for rank in range(len(self.ranks))]

    def attempt(self, brought: Sequence[Tensor]) -> Tensor:
        """One step of all ranks: the average, or the new parameters."""
        states, at = [one.of(SPEC) for one in self.ranks], self.steps
        if isinstance(self.hook, OuterHook):
            for one in self.ranks:
                one.will_change(SPEC.index)
            moved = [self.parameters - g for g in brought]
            values = simulate_outer(self.hook, moved, spec=SPEC, states=states, step=at).parameters
        else:
            assert {one.begin(SPEC, g) for one, g in zip(self.ranks, brought, strict=True)} == {at}
            done = simulate(self.hook, brought, spec=SPEC, states=states, step=at, donated=True, hosts=self.hosts)
            values = tuple(value for value, _ in done.reduced)
        assert all(same_bits(value, values[0]) for value in values)
        return values[0].clone()

    def step(self, *, tries: int) -> None:
        """A step that is dropped until the last try."""
        brought, tried = self.gradients(), []
        for left in reversed(range(tries)):
            before, forks = self.saved(), [one.fork() for one in self.ranks]
            tried.append(self.attempt(brought))
            for fork in forks:
                (fork.drop if left else fork.commit)()
            assert not left or equal_states(self.saved(), before)
        assert all(same_bits(one, tried[0]) for one in tried)
        self.steps += 1
        self.missing += torch.stack(brought).double().mean(0) - tried[0].double()
        if isinstance(self.hook, OuterHook):
            self.parameters = tried[0]

    def saved(self) -> list[dict[str, Any]]:
        for one in self.ranks:
            one.of(SPEC)
        return [to_dict(one, rank=rank, step=self.steps) for rank, one in enumerate(self.ranks)]

    def owed(self, saved: Sequence[dict[str, Any]], size: int) -> Tensor:
        """What these ranks owe in an average over `size` ranks."""
        flat = torch.zeros(SPEC.numel, dtype=torch.float64)
        for one in saved:
            for name, owed in add_owed(self.hook.owed(one["state"]) or (), one["owed"].items()).items():
                place = SPEC.names.index(name)
                flat.narrow(0, SPEC.offsets[place], SPEC.numels[place]).add_(owed.reshape(-1).double())
        return flat / size

    def change(self, *, joins: int, leaves: int, crashes: int) -> None:
        """Another view: some ranks have crashed in a step, which is dropped, some leave, and some join."""
        size = len(self.ranks)
        published = [owed_norm(one, self.hook) for one in self.saved()]
        forks = [one.fork() for one in self.ranks]
        if crashes:
            self.attempt(self.gradients())
        for fork in forks:
            fork.drop()
        saved, order = self.saved(), self.draw.sample(range(size), size)
        lost, left, stay = order[:crashes], order[crashes : crashes + leaves], sorted(order[crashes + leaves :])
        heirs = {rank: self.draw.choice(stay) for rank in left}
        new = []
        for rank in stay:
            leavers = [saved[leaver] for leaver, heir in heirs.items() if heir == rank]
            new.append(with_ranks(saved[rank], self.hook, size, len(stay) + joins, leavers=leavers))
            assert equal_states(self.not_owed(new[-1]), self.not_owed(saved[rank]))
        restored = [from_dict(one, self.hook, rank=one["rank"]) for one in new]
        self.ranks = restored + [from_dict(new[0], self.hook, rank=-1) for _ in range(joins)]
        before, gone = self.owed(saved, size), self.owed([saved[rank] for rank in lost], size)
        after, scale = self.owed(self.saved(), len(self.ranks)), max(float(before.norm()), 1e-3)
        assert float((before - gone - after).norm()) <= TOLERANCE * scale
        assert not crashes or float(gone.norm()) <= sum(published[rank] for rank in lost) / size * (1 + TOLERANCE)
        if crashes == 1:
            assert math.isclose(float((before - after).norm()), published[lost[0]] / size, abs_tol=TOLERANCE * scale)
        assert owed_norm(self.saved()[-1], self.hook) == 0 or not joins
        self.missing -= gone
        self.begin()

    def not_owed(self, saved: dict[str, Any]) -> list[Tensor]:
        owed, found, parts = [t for _, t in self.hook.owed(saved["state"]) or ()], [], [saved["state"]]
        while parts:
            part = parts.pop()
            parts += part.values() if isinstance(part, dict) else ()
            if isinstance(part, Tensor) and not any(part is one for one in owed):
                found.append(part)
        return found

    def run(self, events: int) -> None:
        for _ in range(events):
            size = len(self.ranks)
            kind = self.draw.choice(["step", "step", "retry", "join", "leave", "crash", "all"])
            if kind in ("step", "retry"):
                self.step(tries=1 if kind == "step" else self.draw.randint(2, 3))
                continue
            most = min(size - 1, 3)
            crashes = self.draw.randint(1, most) if kind in ("crash", "all") and most else 0
            leaves = self.draw.randint(1, most) if kind in ("leave", "all") and most else 0
            leaves = min(leaves, size - 1 - crashes)
            joins = self.draw.randint(1, 3) if kind in ("join", "all") else 0
            joins = max(0, min(joins, MOST_RANKS - size + crashes + leaves), 2 - size + crashes + leaves)
            self.change(joins=joins, leaves=leaves, crashes=crashes)
        if self.hook in EXACT:
            owed = self.owed(self.saved(), len(self.ranks))
            assert float((self.missing - owed).norm()) <= 1e-5 * max(float(owed.norm()), 1.0)


def run_histories(numbers: Iterable[int]) -> None:
    every = [*EXACT, *OTHERS]
    for number in numbers:
        hook = every[number % len(every)]
        try:
            History(hook, number).run(10)
        except AssertionError as error:
            error.add_note(f"in history {number}, with {hook!r}")
            raise


@pytest.mark.parametrize("part", range(2))
def test_nothing_that_is_owed_is_lost_or_made(part: int) -> None:
    run_histories(range(part, 40, 2))


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
def test_a_thousand_histories() -> None:
    run_histories(range(1000))
