"""Arrivals: which gradients have arrived, and which buckets are to be launched then.

GradListener carries out what `listening.py` chooses: gradients are reported by hooks on the parameters, or found by looking at
`.grad`. Arrivals combines it with the state machine, which counts. Neither must know what is done with a bucket that is launched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby

from torch import Tensor

from gradwire.autograd.backward_end import at_backward_end
from gradwire.autograd.compiled.op import OnGradient, on_compiled_gradients
from gradwire.autograd.grad_hooks import GradHooks, HookMode, NodeHooks, OnReady, grad_hooks
from gradwire.events import Handle
from gradwire.reducer.buckets.buffers import Buckets, all_there
from gradwire.reducer.intake.bucket_order import BucketOrder
from gradwire.reducer.intake.compiled_gradients import CompiledGradients
from gradwire.reducer.intake.hook_modes import Listening
from gradwire.reducer.machine import Launch, Machine, State
from gradwire.runtime.threads import weakly

Gradients = list[Tensor | None]


class GradListener:
    """Listens for the gradients of one model's parameters."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.listening = Listening()
        self.hooks: GradHooks | None = None
        self.arrived: list[Tensor] = []
        """Parameters whose gradients have arrived without a call: see [Last per bucket] in `listening.py`."""
        self.compiled = CompiledGradients(parameters, self.arrived)
        self._compiled_handle: Handle | None = None
        self._parameters = list(parameters)
        self._index = {id(p): i for i, p in enumerate(parameters)}
        self._applied: tuple[HookMode, Collection[int]] | None = None
        self._at_once = False
        self._end_is_queued = False
        self.polled: dict[int, Gradients] = {}
        """The gradients of buckets that were looked at and not launched yet."""
        # What is still in it when a model is dropped would keep the parameters alive: their hooks know this list.
        weakref.finalize(self, self.arrived.clear).atexit = False

    def attach(
        self,
        on_ready: OnReady,
        *,
        on_compiled: OnGradient | None = None,
        on_nodes: bool = False,
        undefined: bool = False,
    ) -> None:
        """Put hooks on the parameters, in place of those that are there. See `NodeHooks` for `on_nodes` and `undefined`.

        `on_compiled` is called with the gradients that compiled code reports.
        """
        self.detach()
        if on_compiled is not None:
            self._compiled_handle = on_compiled_gradients(self._parameters, on_compiled)
        if on_nodes:
            self.hooks = NodeHooks(self._parameters, on_ready, undefined=undefined)
        else:
            self.hooks = grad_hooks(self._parameters, on_ready, self.arrived)

    def detach(self) -> None:
        """Take the hooks off the parameters."""
        if self.hooks is not None:
            self.hooks.remove()
        self.hooks, self._applied = None, None
        if self._compiled_handle is not None:
            self._compiled_handle.remove()
        self.compiled.remove()

    def call_at_once(self) -> None:
        """Let every gradient call as soon as it has arrived, from now on. This rules polling out for good."""
        if self.hooks is not None:
            self.hooks.listen(HookMode.LAST_PER_BUCKET, range(len(self._parameters)))

    # -- a step, in this order -------------------------------------------------------------------------------------------

    def prepare(self, *, need_all: bool, can_poll: bool, at_once: bool) -> bool:
        """Choose the mode for the backward to come. Returns whether it differs from the last one, or from who called then.

        `need_all`: every gradient has to be reported. `can_poll`: nothing but the engine writes to `.grad` during backward.
        `at_once`: where all gradients call, none does so late.
        """
        can_poll = can_poll and self.hooks is not None and self.hooks.can_poll
        mode = self.listening.choose(need_all=need_all, can_poll=can_poll, clean=self._clean)
        self._at_once = at_once
        return self._apply(mode)

    def _clean(self) -> bool:
        """No gradients are left from before; no hooks of others may take `.grad` away; those that must call can be hooked."""
        parameters = self._parameters
        if not all(parameters[i].requires_grad for i in self.listening.last_per_bucket):
            return False
        return not [p for p in parameters if p.grad is not None or p._post_accumulate_grad_hooks]

    def _apply(self, mode: HookMode) -> bool:
        if self.hooks is None:
            return False
        if mode is HookMode.ALL:
            if self._at_once:
                self.hooks.listen(HookMode.POLL, range(len(self._parameters)))
            else:
                self.hooks.listen(HookMode.ALL)
            self._applied = None
            return True
        if self._applied == (mode, self.listening.expected):
            return False
        self._applied = mode, self.listening.expected
        self.hooks.listen(mode, self.listening.expected)
        return True

    def at_end(self, ended: Callable[[], object]) -> None:
        """Call the bound method `ended` once when the backward now running has ended; if it fails, not at all."""
        if not self._end_is_queued:
            self._end_is_queued = True
            self._ended = weakly(ended)
            at_backward_end(self._backward_ended, failed=self._backward_failed)

    def _backward_ended(self) -> None:
        self._end_is_queued = False
        if self.hooks is not None:
            self.hooks.flush()
        self._ended()

    def _backward_failed(self) -> None:
        self._end_is_queued = False

    def first_arrived(self, index: int) -> None:
        """The gradient of `index` is the first of this step."""
        others = (p.grad is not None for i, p in enumerate(self._parameters) if i != index)
        self.listening.first_arrived(others_there=not self.listening.polling and any(others))

    def take_arrived(self) -> list[int]:
        """The parameters whose gradients have arrived without a call since the last time, in their order."""
        taken = self.arrived[:]
        del self.arrived[: len(taken)]  # not clear(): another device's thread may append meanwhile
        index, reported = self._index, self.compiled.reported
        indices = [index[id(p)] for p in taken]
        return [i for i in indices if i not in reported] if reported else indices

    def index_of(self, parameter: Tensor) -> int:
        """The index of a parameter."""
        return self._index[id(parameter)]

    def poll(self, bucket: int, members: Sequence[Tensor]) -> bool:
        """Whether all gradients of a bucket are there."""
        found = self.polled[bucket] = [p.grad for p in members]
        return all_there(found)

    def fall_back(self, known: Callable[[int], bool], order: Sequence[int]) -> list[int]:
        """Let every gradient call for the rest of the step. Returns those that are there and not yet `known`, in `order`."""
        self.polled.clear()
        unheard = self.unheard(known, order) if self.listening.polling else []
        self.listening.fall_back()
        self._apply(HookMode.ALL)
        return unheard

    def unheard(self, known: Callable[[int], bool], order: Sequence[int]) -> list[int]:
        """Parameters that do not call, whose gradients are there and not yet `known`, in `order`."""
        expected, parameters = self.listening.expected, self._parameters
        unknown = [i for i in order if i not in expected and not known(i)]
        return [i for i in unknown if parameters[i].grad is not None]

    def not_arrived(self, indices: Iterable[int]) -> list[int]:
        """Those of `indices`, which have not been counted, whose gradients have not arrived either. Changes nothing."""
        arrived: set[int | None] = {self._index[id(p)] for p in self.arrived[:]}
        arrived.add(None if self.hooks is None else self.hooks.unreported())
        polling, parameters = self.listening.polling, self._parameters
        return [i for i in indices if i not in arrived and not (polling and parameters[i].grad is not None)]

    def gradients(self, bucket: int, members: Sequence[Tensor]) -> Gradients:
        """The gradients with which a bucket is launched."""
        if self.compiled.reported:
            return [self.compiled.gradient(self._index[id(p)]) for p in members]
        return self.polled.pop(bucket, None) or [p.grad for p in members]

    def abandon(self) -> None:
        """The step has failed."""
        self.arrived.clear()
        self.polled.clear()
        self.compiled.clear()
        self.listening.abandon()


class Arrivals:
    """The gradients of one model's steps. What returns launches returns those to be started now, in order."""

    def __init__(self, machine: Machine, listener: GradListener, buckets: Buckets, order: BucketOrder) -> None:
        self._machine = machine
        self._listener = listener
        self._listening = listener.listening
        self._buckets = buckets
        self._order = order
        self._without_hook: list[list[int]] = []

    def prepare(self, *, need_all: bool, can_poll: bool, at_once: bool) -> None:
        """Choose how the gradients of the next step are reported: see `GradListener.prepare`."""
        changed = self._listener.prepare(need_all=need_all, can_poll=can_poll, at_once=at_once)
        if changed and self._listening.polling:
            expected = self._listening.expected
            self._without_hook = [[i for i in members if i not in expected] for members in self._buckets.layout.members]

    def called(self, index: int) -> list[Launch]:
        """The gradient of parameter `index` has arrived, and its hook has called."""
        listening, launches = self._listening, []
        if listening.polling and index in listening.expected:
            launches += self._poll(listening.expected[index])
        own = self._machine.grad_ready(index)
        if own:
            listening.launched(index, len(own))
            launches += own
        if listening.must_fall_back(index, len(own)):
            launches += self.fall_back()
        return launches

    def uncalled(self) -> list[Launch]:
        """Gradients have arrived without a call: see [Last per bucket] in `listening.py`."""
        return self._arrived(self._listener.take_arrived())

    def fall_back(self) -> list[Launch]:
        """Let every gradient still to come call, and count those that are there."""
        return self._arrived(self._listener.fall_back(self._machine.is_ready, self._order.last_arrival))

    def graph_task_ended(self) -> list[Launch]:
        """A graph task has ended. If it has brought some gradients and not all, others may come in a later one."""
        machine, listener = self._machine, self._listener
        running = machine.state is State.RUNNING
        if running:
            self._listening.mark_irregular()
        if not self._listening.polling:
            return []
        armed = machine.state is State.ARMED
        if running or (armed and listener.unheard(machine.is_ready, self._order.last_arrival)):
            return self.fall_back()
        return []

    def _poll(self, expected: int) -> list[Launch]:
        """A gradient has arrived that filled so many buckets in the last step. Are the others of these buckets there?"""
        first = self._machine.next_bucket
        buckets = range(first, min(first + expected, len(self._buckets.parameters)))
        if not all(self._listener.poll(bucket, self._buckets.parameters[bucket]) for bucket in buckets):
            return self.fall_back()
        return [launch for bucket in buckets for launch in self._arrived_in_bucket(self._without_hook[bucket])]

    def _arrived(self, indices: Iterable[int]) -> list[Launch]:
        """Gradients have arrived, in this order. Those of one bucket that follow each other are counted together."""
        bucket_of = self._machine.bucket_of
        return [
            launch
            for _, together in groupby(indices, bucket_of.__getitem__)
            for launch in self._arrived_in_bucket(list(together))
        ]

    def _arrived_in_bucket(self, indices: Sequence[int]) -> Sequence[Launch]:
        launches = self._machine.all_ready(indices)
        if launches:
            self._listening.launched(indices[-1], len(launches))
        return launches
