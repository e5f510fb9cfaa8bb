"""`Balance`: shares of a constant total batch for ranks of different speed.

Note [Shares]
A rank measures the seconds per sample of its forwards and backwards, without waits for other ranks. Every few steps ranks exchange
their medians, and each computes the same shares from them: proportional to speed, rounded by largest remainder. A step has fixed
costs too, so the time per sample depends on the share; but shares stop changing only when all ranks take equally long, whatever
those costs are. Noise is damped twice: a new median counts half, the estimate before it the other half; and shares change only if
the slowest rank of a step would then take at least 3 % less. Only exchanged numbers decide, so all ranks decide alike.
"""

from __future__ import annotations

import operator
import statistics
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradwire import events
from gradwire.errors import UsageError
from gradwire.events import RankEvent
from gradwire.groups.base import Group
from gradwire.hooks.composite import Wrapped
from gradwire.hooks.dense import MEAN, WeightedMean, weighted_mean
from gradwire.parallel.agreement import BALANCE, refuse_join
from gradwire.parallel.replica import Replica
from gradwire.reducer import Reducer
from gradwire.runtime.threads import weakly

_NEW = 0.5
_WORTH_CHANGING = 0.03
_FEWEST = 3
"""Batches of which a median is taken."""


class Balance:
    """Gives every rank the share of a batch that it computes in the same time as the others compute theirs.

    It weights ranks by their shares: the hook of the model becomes `hooks.weighted_mean()`, so with a loss averaged over the
    share, the gradient is that of the mean over all samples. Every rank makes it and calls `batch_size` before each step. Shares
    begin equal and are agreed on `every` so many steps. `model` is a DistributedDataParallel, or what `replicate` returns.

    >>> from gradwire.groups import ThreadGroup
    >>> from gradwire.parallel import DistributedDataParallel
    >>> (group,) = ThreadGroup.world(1)
    >>> ddp = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
    >>> balance = Balance(ddp)
    >>> n = balance.batch_size(32)
    >>> ddp(torch.ones(n, 2)).mean().backward()
    >>> n, balance.shares, ddp.replica.hook
    (32, (32,), weighted_mean())
    >>> group.close()
    """

    def __init__(self, model: Any, *, every: int = 10) -> None:
        if not isinstance(every, int) or every < 1:
            raise UsageError(f"Balance(every={every!r}): not a number of steps. Pass a positive integer.")
        replica = getattr(model, "replica", None)
        if not isinstance(replica, Replica):
            raise UsageError(
                f"Balance({type(model).__name__}): not replicated by gradwire. Pass a gw.DistributedDataParallel or a Replica."
            )
        self._model, self._replica, self.every = model, replica, every
        self.shares: tuple[int, ...] = ()
        """The shares of all ranks in the last total, by rank: rank r takes the samples after those of the ranks before it."""
        if replica.runner.torch_hook is None and replica.hook == MEAN:
            model.set_hook(weighted_mean())
        if not self._weighs():
            raise UsageError(f"Balance() on rank {replica.group.rank}: {self._unfit()}")
        self._clock = ComputeClock(replica.reducer)
        self._start_over(replica.group)

    def _start_over(self, group: Group) -> None:
        self._group, self._recoveries = group, group.ledger.recoveries
        self._seconds: list[float] = []
        """By rank: the estimate of its seconds per sample; empty as long as there is none."""
        self._used: list[float] = []
        """The estimates that shares are made of."""
        self._agreed_at: int | None = None
        self._last_call: tuple[int, int] = -1, 0

    def batch_size(self, total: int) -> int:
        """The size of this rank's part of a batch of `total` samples, at least 1, which is also its weight in the average.

        Every rank calls it before each step with the same total; if gradients are accumulated, once a step or before each
        micro-batch. The parts of all ranks add up to `total`. If this rank's batch is smaller after all, as at the end of an epoch,
        call `model.set_weight(len(batch))`.
        """
        replica = self._replica
        refuse_join(self._model, BALANCE, replica.group.rank)
        replica.agreement.recover()
        if replica.group is not self._group:
            self._start_over(replica.group)
        elif self._recoveries != self._group.ledger.recoveries:
            self._recovered()
        step = replica.reducer.iterations.begins
        self._check(total, step)
        if self._agreed_at is None or (self._last_call[0] != step and step - self._agreed_at >= self.every):
            self._agree(total)
        self._last_call = replica.reducer.iterations.begins, total
        self.shares = tuple(divide(total, self._speeds()))
        mine = self.shares[self._group.rank]
        self._clock.next_batch(mine)
        replica.runner.weight = float(mine)
        return mine

    def _check(self, total: int, step: int) -> None:
        last_step, last_total = self._last_call
        if not self._weighs():
            problem = self._unfit()
        elif not isinstance(total, int) or total < self._group.size:
            problem = f"not an int of at least one sample for each of {self._group.size} ranks. Pass one."
        elif (
            last_step == step
            and total != last_total
            and self._clock.batch.parts
            and not self._replica.agreement.dropped
        ):
            problem = f"gradients of this step were accumulated with a total of {last_total}, and it has one weight. Pass that."
        else:
            return
        self._replica.agreement.refuse(f"{BALANCE}({total!r}) on rank {self._group.rank} in step {step}: {problem}")

    def _weighs(self) -> bool:
        """Whether all gradients go through a weighted mean: one part of a `partition` is not enough."""
        hook = self._replica.hook
        while isinstance(hook, Wrapped):
            hook = hook.inner
        return self._replica.runner.torch_hook is None and isinstance(hook, WeightedMean)

    def _unfit(self) -> str:
        return (
            f"with the hook {self._replica.runner.name} the average is not the mean over all samples of unequal batches. Call "
            "set_hook(hooks.weighted_mean()), or with a stage such as hooks.chain(hooks.cast(dtype), hooks.weighted_mean())."
        )

    def _agree(self, total: int) -> None:
        replica, rank = self._replica, self._group.rank
        state = float(zlib.crc32(repr((self.every, self._seconds, self._used)).encode()))
        rows = replica.agreement.exchange(BALANCE, self._clock.take(), float(total), state)
        step = self._agreed_at = replica.reducer.iterations.begins
        if any(row[1:] != rows[rank][1:] for row in rows):
            totals = ", ".join(f"{row[1]:.0f} on rank {r}" for r, row in enumerate(rows))
            replica.agreement.refuse(
                f"{BALANCE}({total}) on rank {rank} in step {step}: ranks differ in the total ({totals}), in `every`, or in the "
                "state that they have loaded. Use the same on every rank."
            )
        self._learn(total, [row[0] for row in rows])
        unknown = [0.0] * len(rows)
        replica.recovery.agreed = [float(step + 1), *self._seconds, *(self._used or unknown)]

    def _recovered(self) -> None:
        """Continue with what rank 0 has agreed on: a step that failed may have ended an agreement before some had its result."""
        self._recoveries, size = self._group.ledger.recoveries, self._group.size
        after, *estimates = self._replica.recovery.agreed
        self._agreed_at = int(after) - 1 if after else None
        self._seconds, used = estimates[:size], estimates[size:]
        self._used = used if any(used) else []

    def _learn(self, total: int, measured: Sequence[float]) -> None:
        """Take the medians of all ranks into account; 0 means that a rank has none. See Note [Shares]."""
        old = self._seconds or [0.0] * len(measured)
        estimates = [
            (1 - _NEW) * before + _NEW * now if before and now else before or now
            for before, now in zip(old, measured, strict=True)
        ]
        self._seconds = estimates
        if not all(estimates):
            return
        now, new = (
            max(map(operator.mul, divide(total, speeds), estimates))
            for speeds in (self._speeds(), [1 / one for one in estimates])
        )
        if new < (1 - _WORTH_CHANGING) * now:
            self._used = estimates

    def _speeds(self) -> list[float]:
        return [1 / seconds for seconds in self._used] or [1.0] * self._group.size

    def state_dict(self) -> dict[str, Any]:
        """The estimates of all ranks, the same on every rank."""
        return {"seconds": list(self._seconds), "used": list(self._used)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue with the shares of `state_dict`. Every rank loads the same; that of another number of ranks is ignored."""
        self._start_over(self._replica.group)
        if len(saved["seconds"]) == self._group.size:
            self._seconds, self._used = list(saved["seconds"]), list(saved["used"])


def divide(total: int, speeds: Sequence[float]) -> list[int]:
    """`total` in proportion to `speeds`, by largest remainder, at least 1 each; of equal remainders, the lower rank's first.

    >>> divide(10, [2.0, 1.0]), divide(8, [1.0, 1.0, 1.0]), divide(5, [1e9, 1.0, 1.0])
    ([7, 3], [3, 3, 2], [3, 1, 1])
    """
    shares = [1] * len(speeds)
    left = list(range(len(speeds)))  # those whose share is more than 1
    while True:
        rest, sum_of_speeds = total - (len(speeds) - len(left)), sum(speeds[r] for r in left)
        quotas = {r: rest * speeds[r] / sum_of_speeds for r in left}
        if all(quota >= 1 for quota in quotas.values()):
            break
        left = [r for r in left if quotas[r] >= 1]
    for r, quota in quotas.items():
        shares[r] = int(quota)
    missing = total - sum(shares)
    for r in sorted(left, key=lambda r: (shares[r] - quotas[r], r))[:missing]:
        shares[r] += 1
    return shares


@dataclass(slots=True)
class _Batch:
    """The forwards and backwards of one batch: their beginnings and ends, and seconds to subtract."""

    samples: int
    parts: list[tuple[Any, Any, float]] = field(default_factory=list)

    def seconds(self) -> float | None:
        """None if the device has not finished them."""
        if not isinstance(self.parts[0][1], torch.cuda.Event):
            return float(sum(end - begin - pause for begin, end, pause in self.parts))
        if not all(end.query() for _, end, _ in self.parts):
            return None
        return float(sum(begin.elapsed_time(end) / 1e3 for begin, end, _ in self.parts))


class ComputeClock:
    """Measures the seconds per sample of a model's forwards and backwards, from its events.

    Waits do not count: neither what is between forward and backward, nor the time in which a bucket is launched, since a group may
    block there. On CUDA, times are those of the stream, from events that are read steps later without waiting for the device.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self.batch = _Batch(0)
        self._over: list[_Batch] = []
        self._warm = False
        """Whether a batch has been measured: the first does not count, in which much is allocated and loaded."""
        self._forwards: list[tuple[Any, Any, float]] = []
        """Those whose backward has not begun."""
        self._forward: Any = None
        self._backward: Any = None
        self._full = self._pause = 0.0
        kinds = events.ForwardBegan, events.ForwardEnded, events.BackwardBegan, events.BackwardEnded
        handle = reducer.events.listen(weakly(self._listen), only=(*kinds, events.BucketFull, events.BucketLaunched))
        weakref.finalize(self, handle.remove)

    def next_batch(self, samples: int) -> None:
        """The next forwards and backwards are of a new batch. One without a backward was skipped, and does not count."""
        if self.batch.parts and self.batch.samples:
            self._over += [self.batch] * self._warm
            self._warm = True
        self.batch, self._forwards = _Batch(samples), []

    def take(self) -> float:
        """The median of the seconds per sample of batches that are over, since it last returned one; 0 if they are too few."""
        self.next_batch(0)
        known = [(batch, batch.seconds()) for batch in self._over]
        rates = [seconds / batch.samples for batch, seconds in known if seconds is not None]
        if len(rates) < _FEWEST:
            return 0.0
        self._over = [batch for batch, seconds in known if seconds is None]
        return statistics.median(rates)

    def _listen(self, event: RankEvent) -> None:
        if isinstance(event, events.BucketFull):
            self._full = event.time
        elif isinstance(event, events.BucketLaunched):
            self._pause += event.time - self._full
        elif isinstance(event, events.ForwardBegan):
            self._forward = self._now(event) if torch.is_grad_enabled() else None
        elif isinstance(event, events.ForwardEnded):
            if self._forward is not None and (end := self._now(event)) is not None:
                self._forwards.append((self._forward, end, 0.0))
            self._forward = None
        elif isinstance(event, events.BackwardBegan):
            self._backward, self._pause = self._now(event), 0.0
        elif self._backward is not None and (end := self._now(event)) is not None:
            self.batch.parts += [*self._forwards, (self._backward, end, self._pause)]
            self._forwards, self._backward = [], None

    def _now(self, event: RankEvent) -> Any:
        device = self._reducer.device
        if device.type != "cuda":
            return event.time
        if torch.cuda.is_current_stream_capturing():
            return None
        now = torch.cuda.Event(enable_timing=True)
        now.record(torch.cuda.current_stream(device))
        return now
