"""The reducer's state machine: events in, instructions out, no I/O.

One instance lives through all steps of a model. It knows numbers of parameters and buckets, never tensors, groups or hooks,
so every rule about order, unused parameters, two backwards, static graphs and failures is a row of a table test.
A bucket that is full waits for those before it, because the n-th collectives of all ranks must meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from gradwire.errors import GradwireError, GraphChanged, InternalError, ReadyTwice, Unfinished


class State(Enum):
    """Where the machine is in a step."""

    RESTING = "resting"
    """No gradient is expected to be reduced: before a forward, under no_sync, after a finished backward."""
    ARMED = "armed"
    """A forward has prepared a synchronized backward; nothing has come yet."""
    RUNNING = "running"
    """Gradients are coming."""
    LAUNCHED = "launched"
    """All buckets are under way; the end of backward will wait for them."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Reduce this bucket now."""

    bucket: int
    last: bool
    filler: int = field(default=-1, compare=False)
    """The parameter whose gradient made this launch possible."""


class Machine:
    """Counts gradients down to launches."""

    def __init__(self, members: Sequence[Sequence[int]], names: Sequence[str], *, rank: int = 0) -> None:
        self.rank = rank
        self.names = tuple(names)
        self.story: list[str] = []
        self.static_uses: list[int] | None = None
        """Of a static graph: how often each parameter becomes ready in one backward; one with 0 uses is ready from the start."""
        self.state = State.RESTING
        self.relayout(members)
        self._left: list[int] = []
        self.ready = bytearray(len(names))
        """By parameter, whether its gradient has arrived in this step."""
        self._uses: list[int] = []  # of a static graph: how often each is still to come
        self.next_bucket = 0
        self.arrival: list[int] = []
        """The parameters whose gradients have arrived, in the order in which they were computed."""
        self.computed: set[int] = set()
        """Parameters that have their place in `arrival` already, although their gradients are not accumulated yet."""
        self.unused: list[int] = []
        """Parameters that count as ready in this step from its first gradient on."""

    def relayout(self, members: Sequence[Sequence[int]]) -> None:
        if self.state is not State.RESTING:
            raise InternalError(f"relayout while {self.state.value}", story=self.story)
        self.members = tuple(tuple(m) for m in members)
        self.bucket_of = [-1] * len(self.names)
        for bucket, indices in enumerate(self.members):
            for i in indices:
                self.bucket_of[i] = bucket
        if any(b < 0 for b in self.bucket_of):
            raise InternalError("a parameter is in no bucket", story=self.story)

    def prepare(self, unused: Iterable[int] = ()) -> None:
        """A forward has ended whose backward is to be synchronized. `unused` parameters count as ready."""
        if self.in_backward:
            raise self.unfinished()
        self.story = ["prepared"]
        self._left = [len(m) for m in self.members]
        self.ready = bytearray(len(self.names))
        self._uses = [] if self.static_uses is None else list(self.static_uses)
        self.next_bucket = 0
        self.arrival = []
        self.computed.clear()
        self.state = State.ARMED
        self.unused = list(unused) if self.static_uses is None else [i for i, n in enumerate(self._uses) if n == 0]

    def arrived(self, indices: Sequence[int]) -> list[Launch]:
        """The gradients of these parameters have been accumulated, in this order."""
        if self.state is State.RESTING or not indices:
            return []
        launches: list[Launch] = []
        if self.state is State.ARMED:
            self.state = State.RUNNING
            launches = self._mark([i for i in self.unused if i != indices[0]])
        if self.static_uses is not None:
            indices = self._last_uses(indices)
        launches += self._mark(indices)
        self.arrival += [i for i in indices if i not in self.computed] if self.computed else indices
        return launches

    def computed_early(self, indices: Sequence[int]) -> None:
        """These gradients have been computed, in this order, and will be accumulated later."""
        new = [i for i in indices if i not in self.computed]
        self.computed.update(new)
        self.arrival += new

    def nothing_arrived(self) -> list[Launch]:
        """A backward that reached the model's outputs has ended, and no gradient has arrived: legal if none was expected."""
        if self.state is not State.ARMED:
            return []
        if len(self.unused) < len(self.names):
            raise self.unfinished()
        self.state = State.RUNNING
        return self._mark(self.unused)

    def _last_uses(self, indices: Sequence[int]) -> list[int]:
        """In a static graph: those whose gradient has now arrived as often as in the first step."""
        last = []
        for i in indices:
            self._uses[i] -= 1
            if self._uses[i] < 0:
                raise self._twice(i)
            if self._uses[i] == 0:
                last.append(i)
        return last

    def _mark(self, indices: Sequence[int]) -> list[Launch]:
        launches: list[Launch] = []
        ready, left, bucket_of = self.ready, self._left, self.bucket_of
        for i in indices:
            if ready[i]:
                raise self._twice(i)
            ready[i] = True
            bucket = bucket_of[i]
            left[bucket] -= 1
            if not left[bucket] and bucket == self.next_bucket:
                self._launch_full(i, launches)
        return launches

    def _launch_full(self, filler: int, launches: list[Launch]) -> None:
        left, count = self._left, len(self._left)
        while self.next_bucket < count and left[self.next_bucket] == 0:
            launches.append(Launch(self.next_bucket, self.next_bucket == count - 1, filler))
            self.next_bucket += 1
        self.story.append(f"launched to bucket {self.next_bucket - 1}")
        if self.next_bucket == count:
            self.state = State.LAUNCHED

    def finished(self) -> None:
        """Every reduction has been waited for and copied out."""
        if self.state is not State.LAUNCHED:
            raise InternalError(f"finished while {self.state.value}", story=self.story)
        self.state = State.RESTING

    def abandon(self, why: str) -> None:
        self.story.append(f"abandoned: {why}")
        self.state = State.RESTING

    @property
    def complete(self) -> bool:
        return self.state is State.LAUNCHED

    @property
    def in_backward(self) -> bool:
        """Whether a step has begun to reduce and has not ended."""
        return self.state in (State.RUNNING, State.LAUNCHED)

    def missing(self) -> list[int]:
        return [i for i, ready in enumerate(self.ready) if not ready]

    def _named(self, indices: Iterable[int]) -> str:
        return ", ".join(f"{i} ({self.names[i]})" for i in indices)

    def _twice(self, index: int) -> GradwireError:
        if self.static_uses is not None:
            return GraphChanged(
                "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, but "
                f"then got used in the second iteration: parameter {self._named([index])} got "
                f"{self.static_uses[index] - self._uses[index]} gradients, in the first iteration it got "
                f"{self.static_uses[index]}. This is not compatible with static_graph set to True."
            )
        return ReadyTwice(
            "Expected to mark a variable ready only once. This error is caused by one of the following reasons: 1) Use of a "
            "module parameter outside the `forward` function, or a parameter shared by several backward passes that run at "
            "the same time. 2) Reused parameters in multiple reentrant backward passes, for example several `checkpoint` "
            "functions wrapping the same part of the model; static_graph=True supports that if the graph does not change. "
            f"Parameter at index {index} with name {self.names[index]} has been marked as ready twice."
        )

    def late(self, indices: Sequence[int]) -> GradwireError:
        """The error for gradients that have changed although their buckets had been launched."""
        return ReadyTwice(
            f"Expected to mark a variable ready only once. Reducing gradients on rank {self.rank}: those of parameters "
            f"{self._named(indices)} have changed after their buckets had been launched: by two backwards (use no_sync() for all "
            "but the last), by several `checkpoint` functions with use_reentrant=True around the same part of the model (use "
            "use_reentrant=False), or by a hook (use `Tensor.register_hook` on the parameter itself, which runs before them)."
        )

    def unfinished(self) -> GradwireError:
        """The error for a new step that begins before the last one is done."""
        start = "Expected to have finished reduction in the prior iteration before starting a new one. "
        if self.state is State.LAUNCHED:
            return Unfinished(
                f"{start}Its backward was interrupted on rank {self.rank} by an exception after all buckets had been "
                "launched, so its gradients never came back. Other ranks may have finished it: leave the step out on all."
            )
        if self.static_uses is not None:
            return GraphChanged(
                f"{start}This error indicates that your training graph has changed in this iteration, e.g., one parameter is "
                "used in first iteration, but then got unused in the second iteration. this is not compatible with "
                f"static_graph set to True.\n{self._without_gradient()}"
            )
        return Unfinished(
            f"{start}This error indicates that your module has parameters that were not used in producing loss. You can "
            "enable unused parameter detection by passing the keyword argument `find_unused_parameters=True` to "
            "`torch.nn.parallel.DistributedDataParallel`, and by \nmaking sure all `forward` function outputs participate "
            "in calculating loss. \nIf you already have done the above, then the distributed data parallel module "
            "wasn't able to locate the output tensors in the return value of your module's `forward` function. Please "
            "include the loss function and the structure of the return value of `forward` of your module when reporting this "
            f"issue (e.g. list, dict, iterable).\n{self._without_gradient()}"
        )

    def _without_gradient(self) -> str:
        missing = self.missing()
        return (
            f"Parameter indices which did not receive grad for rank {self.rank}: {' '.join(map(str, missing))}\n"
            f"Parameters which did not receive grad for rank {self.rank}: {', '.join(self.names[i] for i in missing)}\n"
            "(There is no need to set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL for this.)"
        )
