"""`C10dGroup`: any torch.distributed process group (gloo, nccl, ucc, mpi, or one of your own) as a Group.

What the engine supports is passed to it in the caller's thread, in order; what it lacks is lowered to what it supports and runs
as a program on the group's lane, or in the caller's thread if the engine only orders CUDA streams. Liveness and missing ranks come
from the membership in the rendezvous store; without a store they are unknown.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from gradwire.collectives import Collective
from gradwire.collectives.aliasing import apart
from gradwire.collectives.lower import is_identity, lower
from gradwire.collectives.reference import writing
from gradwire.collectives.timeouts import timeout_seconds
from gradwire.errors import GroupAborted, GroupError, PeerLost, UsageError
from gradwire.groups.base import DEFAULT_TIMEOUT, Group
from gradwire.groups.c10d import capabilities
from gradwire.groups.c10d.engine import C10dEngine
from gradwire.groups.c10d.own_engines import ENGINE_MARGIN, Teardown, destroy, make_gloo, make_nccl, quiesce
from gradwire.groups.c10d.work import C10dWork, CompletionPoller, MessageThreads, SideStreams, wait_slice
from gradwire.groups.failure.membership import Membership
from gradwire.groups.failure.monitor import Monitor
from gradwire.groups.forked import finalize_here, leak_in_child
from gradwire.groups.ledger import Arrivals
from gradwire.groups.store.rendezvous import MemberProcess
from gradwire.groups.work import Work
from gradwire.runtime.threads import Worker


class C10dGroup(Group):
    """A torch.distributed process group as a Group. Closing it does not affect `pg`; `C10dGroup.gloo` owns its engine."""

    identifies_itself = True

    def __init__(self, pg: Any, *, name: str | None = None, timeout: float | None = None, store: Any = None) -> None:
        """`store` is where ranks publish their progress and failures; by default, the process group's store."""
        if not hasattr(pg, "allreduce"):
            raise UsageError(
                f"C10dGroup({pg!r}): not a torch.distributed process group. Pass one, as dist.group.WORLD."
            )
        timeout = (capabilities.timeout_of(pg) or DEFAULT_TIMEOUT) if timeout is None else timeout
        super().__init__(pg.rank(), pg.size(), name=name or f"c10d-{capabilities.name_of(pg)}", timeout=timeout)
        self.ledger.engines = capabilities.engines_of(pg)
        self._given: Any = pg
        self._backends: dict[str, tuple[Any, C10dEngine]] = {}
        self._store = capabilities.store_of(pg) if store is None else store
        membership = None
        if store is not None:
            membership = Membership.over(store, self.rank, self.size)
        elif self._store is not None:
            membership = Membership.of(pg, self._store, self)
        else:
            self.ledger.identify(capabilities.identity_of(pg))
        self._monitor = Monitor(self, membership)
        self._lane = Worker(f"program-{self.name}-{self.rank}")
        self._poller = CompletionPoller(f"{self.name}-{self.rank}")
        self._messages = MessageThreads(f"{self.name}-{self.rank}")
        self._side_stream = SideStreams()
        self._order = threading.Lock()
        self._owned: list[Any] = []
        self._device_aborted = False
        self._unfinished: list[Work] = []
        self._watchdog.on_tick += [functools.partial(CompletionPoller.settle_finished, self.ledger), self._monitor.tick]
        # Created after the base class's finalizer, so that at exit these threads end first.
        self._teardown = Teardown(self.ledger, self._lane, self._poller, self._messages, self._backends, self._owned)
        self._engine_finalizer = finalize_here(self, self._teardown, True)
        leak_in_child(self, self._owned)

    @classmethod
    def gloo(
        cls, store: Any, rank: int, size: int, *, timeout: float = DEFAULT_TIMEOUT, name: str | None = None
    ) -> C10dGroup:
        """A group over its own gloo engine, built on `store`; closing the group destroys the engine."""
        made = make_gloo(store, rank, size, timeout_seconds("C10dGroup.gloo", timeout))
        return cls._over(*made, store, timeout, name or "gloo")

    @classmethod
    def nccl(
        cls, store: Any, rank: int, size: int, *, timeout: float = DEFAULT_TIMEOUT, name: str | None = None
    ) -> C10dGroup:
        """A group over its own engines: NCCL for CUDA tensors, gloo for CPU tensors."""
        if not torch.cuda.is_available() or not dist.is_nccl_available():
            raise UsageError("C10dGroup.nccl: there is no CUDA device here, or torch has no NCCL. Use C10dGroup.gloo.")
        made = make_nccl(store, rank, size, timeout_seconds("C10dGroup.nccl", timeout))
        return cls._over(*made, store, timeout, name or "nccl")

    @classmethod
    def _over(
        cls, engine: Any, processes: Mapping[int, MemberProcess], store: Any, timeout: float, name: str
    ) -> C10dGroup:
        group = cls(engine, name=name, timeout=timeout, store=store)
        group._own(engine)
        if group._monitor.membership is not None:
            group._monitor.membership.learn(processes)
        return group

    def _own(self, engine: Any) -> None:
        """Take ownership of the engine: it is destroyed with the group, and nothing else may keep a reference to it."""
        self._owned.append(engine)
        self._given = None

    @property
    def pg(self) -> Any:
        """The process group or engine that moves the bytes; None once closed."""
        return self._owned[-1] if self._owned else self._given

    def submit(self, op: Collective) -> Work:
        backend, engine = self._backend(op.device)
        on_device = engine.stream_ordered and op.device.type == "cuda"
        in_graph = on_device and torch.cuda.is_current_stream_capturing()
        work = self._submit(op, backend, engine, in_graph)
        if in_graph:
            work.settle_in_graph()
        return work

    def _submit(self, op: Collective, backend: Any, engine: C10dEngine, in_graph: bool) -> C10dWork:
        if op.kind.is_p2p:
            work = self.begin(op, C10dWork)
            work.in_graph = in_graph
            self._start_p2p(work, backend, engine)
            return work
        with self._order:
            work = self.begin(op, C10dWork)
            work.in_graph = in_graph
            work.place = self._monitor.join()
            if self.size == 1 and is_identity(op):
                work.finish_on_stream()  # nothing to do, and some engines would make a pass over the data
                return work
            if (engine.stream_ordered or self._lane.idle) and not engine.may_block and engine.takes(op):
                self._start(work, op, backend, engine)
            elif engine.stream_ordered:
                self._run_through(work, backend, engine)
            else:
                ready = SideStreams.mark(op.device)
                self._lane.put(lambda: self._run_program(work, backend, engine, ready))
        return work

    def _start(self, work: C10dWork, op: Collective, backend: Any, engine: C10dEngine) -> None:
        """Run an operation that is one call of the engine."""
        work.ledger.started(work, time.perf_counter())
        try:
            with writing(op.outputs):  # gloo's threads inherit the caller's inference mode
                native = engine.call(backend, apart(op, self.rank), work.timeout + ENGINE_MARGIN)
        except Exception as error:
            self._broken(work, error, engine)
            return
        broken = functools.partial(self._broken, work, engine=engine)
        work.watch(native, broken, self._poller, ordered=engine.stream_ordered)

    def _run_program(self, work: C10dWork, backend: Any, engine: C10dEngine, ready: torch.cuda.Event | None) -> None:
        """On the lane: run one step after another, waiting for each."""
        work.ledger.started(work, time.perf_counter())
        program = lower(work.op, rank=self.rank, size=self.size, takes=engine.takes)
        try:
            with self._side_stream(work.op.device, ready), writing(work.op.outputs):
                for step in program:
                    if work.is_completed():
                        return
                    native = engine.call(backend, step, work.timeout + ENGINE_MARGIN)
                    while not wait_slice(native):
                        if work.is_completed() or self._lane.stopping.is_set():
                            self._poller.abandon(native)
                            return
            work.finish()
        except BaseException as error:
            # An engine written in Python may even raise SystemExit, and later operations need the lane.
            self._broken(work, error, engine)
        finally:
            program.close()

    def _run_through(self, work: C10dWork, backend: Any, engine: C10dEngine) -> None:
        """Stream-ordered engines: enqueue all steps now, on a side stream; the poller detects when the device is done."""
        work.ledger.started(work, time.perf_counter())
        try:
            with self._side_stream.behind(work.op):
                for step in lower(work.op, rank=self.rank, size=self.size, takes=engine.takes):
                    native = engine.call(backend, step, work.timeout + ENGINE_MARGIN)
                    native.wait()
                work.watch_stream(self._poller)
        except Exception as error:
            self._broken(work, error, engine)

    def _start_p2p(self, work: C10dWork, backend: Any, engine: C10dEngine) -> None:
        """Sends and receives do not queue behind anything: see Note [Threads for messages]."""
        work.ledger.started(work, time.perf_counter())
        program = lower(work.op, rank=self.rank, size=self.size, takes=engine.takes)
        try:
            with writing(work.op.outputs):
                native = engine.call(backend, next(program), work.timeout)
        except Exception as error:
            self._broken(work, error, engine)
            return

        if engine.stream_ordered:
            native.wait()
            next(program, None)
            work.watch_stream(self._poller)
            return
        ready = SideStreams.mark(work.op.device)

        def finish() -> None:
            left = work.deadline + ENGINE_MARGIN - time.perf_counter()
            try:
                with self._side_stream(work.op.device, ready):
                    native.wait(timedelta(seconds=max(0.002, left)))
                    source = native._source_rank() if work.op.peer is None else work.op.peer
                    next(program, None)
                work.finish(source_rank=source)
            except BaseException as error:  # from an engine written in Python: this thread is needed for other messages
                if not work.is_completed():
                    self._broken(work, error, engine)

        try:
            self._messages.start(native, finish)
        except RuntimeError as error:  # the process cannot have another thread
            self._broken(work, error, engine)

    def orders_streams(self, device: torch.device) -> bool:
        return self._backend(device)[1].stream_ordered

    def _broken(self, work: C10dWork, error: BaseException, engine: C10dEngine) -> None:
        """The engine failed: fail the operation and the group, whose ranks are no longer in step."""
        if isinstance(error, UsageError):
            work.fail(error)
            return
        if isinstance(self.failure, PeerLost) or work.is_completed():
            work.fail(self.failure or error)
            return
        translated = self._monitor.translate(error, work, engine.name)
        work.fail(translated)
        if isinstance(translated, GroupError):
            self.fail(translated)

    def fail(self, error: BaseException) -> None:
        if self.forked:
            return
        self._unfinished += list(self.ledger.pending.values())
        super().fail(error)
        if isinstance(error, (PeerLost, GroupAborted)):
            self._monitor.report(error)

    def abort_device(self) -> None:
        known = self._backends.get("cuda")
        if known is not None and known[1].stream_ordered and not self._device_aborted and hasattr(known[0], "abort"):
            self._device_aborted = True
            known[0].abort()

    def _look_at_peers(self) -> None:
        self._monitor.check_peers()

    def recover(self, timeout: float | None = None) -> None:
        """Meet the other ranks; if they are out of step, continue over a new engine on the same store, without the process group:
        an engine cannot cancel an operation that some ranks have begun."""
        limit = self._recovery_limit(timeout)
        if self._monitor.membership is None:
            super().recover(timeout)
            return
        stuck = sum(isinstance(work, C10dWork) and work.left_in_engine for work in self._unfinished)
        prefix, in_step = self._monitor.recover(limit, stuck=stuck)
        if not in_step:
            self._replace_engine(prefix)
        self._unfinished.clear()
        self.failure = None

    def _replace_engine(self, prefix: str) -> None:
        engine = self._backend(torch.device("cpu"))[1]  # not the backend, whose last reference must not be here
        if engine.stream_ordered:
            raise UsageError(
                f"{self}: its {engine.name} engine is out of step and cannot be replaced. Make a new group."
            )
        # All ranks have abandoned the operations in the old engine, so it is aborted.
        idle = quiesce([backend for backend, _ in self._backends.values()], self._poller.take_abandoned, 0.0)
        self._backends.clear()
        destroy(self._owned, leak=[] if idle else self._poller.take_abandoned())
        store = PrefixStore(f"{prefix}/{self.name}", self._store)
        self._own(make_gloo(store, self.rank, self.size, self.timeout)[0])

    def arrivals(self, work: Work) -> Arrivals | None:
        return super().arrivals(work) if work.op.kind.is_p2p else self._monitor.arrivals(work)

    def _backend(self, device: torch.device) -> tuple[Any, C10dEngine]:
        known = self._backends.get(device.type)
        if known is None:
            known = self._backends[device.type] = capabilities.find_engine(self.pg, device)
        return known

    def subgroup(self, ranks: list[int], *, name: str) -> Group:
        in_group_rank = ranks.index(self.rank)
        backend, engine = self._backend(torch.device("cpu"))
        if engine.name == "gloo" and self._store is not None:
            # Several groups over one process group may split off parts with the same name: each part has its own prefix.
            number = self._store.add(f"{name}/{in_group_rank}/parts", 1)
            store = PrefixStore(f"{name}/{number}", self._store)
            return C10dGroup.gloo(store, in_group_rank, len(ranks), timeout=self.timeout, name=name)
        if not capabilities.can_split(backend):
            raise UsageError(f"{self}: its engine, {engine.name}, cannot be split. Make it with dist.new_group.")
        made = backend.split_group(ranks, timedelta(seconds=self.timeout), None, name, None)
        part = C10dGroup(made, name=name, timeout=self.timeout)
        part._own(part.pg)
        return part

    def _release(self) -> None:
        self._monitor.leave(self.failure)
        if self._engine_finalizer.detach() is not None:
            self._teardown(bool(self._owned))
        self._given = None  # a closed group must not keep the caller's engine alive
