"""`run_ranks(fn, n)`: run one function on every rank of a world of any kind, and get its results or its failure back.

Every kind of group that is registered (`groups/kinds.py`) can be run. This module runs threads itself, leaves processes to `pool/`
and `mpi/`, and decides which of several failures is the root cause, to be raised; the others are added as notes.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import HashStore, Store

from gradwire.collectives.timeouts import timeout_seconds
from gradwire.errors import CollectiveTimeout, GroupAborted, PeerLost, UsageError
from gradwire.groups import Group, HierarchicalGroup
from gradwire.groups.kinds import GroupKind, Ranks, check_built, find_kind, known_kinds, registered_kinds
from gradwire.runtime.rank_error import root_cause
from gradwire.testing.mpi import MPIWorlds, default_worlds
from gradwire.testing.pool.pool import RankPool, default_pool
from gradwire.testing.pool.protocol import ABORT_GRACE, GROUP_MARGIN, Fate, GroupJob, LeftBehind, RankResult

DEFAULT_TIMEOUT = 60.0
"""The default timeout of `run_ranks`, in seconds, for all ranks together. A test suite for busy machines sets more."""
DEFAULT_LEFTOVERS = LeftBehind.IGNORE
"""What `run_ranks` does about leftovers by default. A test suite sets it to RAISE for all its calls."""

Wrap = Callable[[Group], Group]


@dataclass(frozen=True, slots=True)
class Request:
    """One call of `run_ranks`, checked."""

    fn: Callable[[Group], Any]
    n: int
    kind: GroupKind
    timeout: float
    lost: frozenset[int]
    wrap: Wrap | None
    leftovers: LeftBehind = LeftBehind.RAISE

    def __str__(self) -> str:
        return f"run_ranks({getattr(self.fn, '__qualname__', repr(self.fn))}, {self.n}, kind={self.kind.name!r})"


def run_ranks(
    fn: Callable[[Group], Any],
    n: int,
    *,
    kind: str = "threads",
    timeout: float | None = None,
    lost: Collection[int] = (),
    wrap: Wrap | None = None,
    leftovers: LeftBehind | None = None,
) -> list[Any]:
    """Run `fn(group)` on `n` ranks at once and return what each returned, in rank order.

    `wrap` is applied to each rank's group first. Groups are closed when all ranks have returned, so `fn` need not; a rank that
    returns early has not left. What a rank raises is raised here, with a note that names the rank; the others are aborted. A
    process that dies is PeerLost, except for the ranks in `lost`: they are expected to die, their result is None, and it is an
    error if they do not. After `timeout` seconds (60 if not given) CollectiveTimeout shows the stack of each missing rank.
    `leftovers` is what to do about what `fn` leaves behind in a rank's process: with LeftBehind.RAISE it is an error.

    >>> import torch
    >>> def total(group):
    ...     t = torch.tensor([group.rank])
    ...     group.all_reduce(t)
    ...     return t.item()
    >>> run_ranks(total, 4)
    [6, 6, 6, 6]
    """
    seconds = DEFAULT_TIMEOUT if timeout is None else timeout
    found = find_kind(kind, who=f"run_ranks({getattr(fn, '__qualname__', repr(fn))}, {n}, kind={kind!r})")
    request = Request(fn, n, found, seconds, frozenset(lost), wrap, leftovers or DEFAULT_LEFTOVERS)
    timeout_seconds(str(request), seconds)
    if n < 1:
        raise UsageError(f"{request}: {n} ranks. A world has at least one.")
    if not all(0 <= rank < n for rank in lost):
        raise UsageError(f"{request}: lost={sorted(lost)}, but ranks count from 0 to {n - 1}.")
    if lost and found.ranks is not Ranks.PROCESSES:
        others = [kind.name for kind in registered_kinds() if kind.ranks is Ranks.PROCESSES and not kind.needs_gpu]
        raise UsageError(
            f"{request}: lost={sorted(lost)}, but a rank of this kind cannot die alone. Use {' or '.join(others)}."
        )
    run = _run_threads if found.ranks is Ranks.THREADS else _run_processes
    return _verdict(run(request), request)


def kinds() -> tuple[str, ...]:
    """The kinds of group that `run_ranks` can run on any machine: those that need no GPU."""
    with_gpu = {kind.name for kind in registered_kinds() if kind.needs_gpu}
    return tuple(name for name in known_kinds() if name not in with_gpu)


def _verdict(outcomes: Sequence[RankResult], request: Request) -> list[Any]:
    failures = [outcome for outcome in outcomes if outcome.failed(request.lost)]
    if not failures:
        return [outcome.value for outcome in outcomes]
    first = root_failure(failures)
    error = _timed_out(failures, outcomes, request) if first is None else _error(first, failures, request)
    try:
        raise error
    finally:
        del error, first, failures, outcomes  # a traceback must not keep every rank's objects alive in a cycle


def root_failure(failures: Iterable[RankResult]) -> RankResult | None:
    """The failure that caused the others; None if all ranks that failed were stuck. Near the earliest, an error of the rank itself
    comes first, then a process that died, then PeerLost and GroupAborted, which look like consequences."""

    def consequence(outcome: RankResult) -> int:
        if outcome.fate is Fate.DIED:
            return 1
        return 2 if isinstance(outcome.error, (PeerLost, GroupAborted)) else 0

    active = (outcome for outcome in failures if outcome.fate is not Fate.STUCK)
    return root_cause(active, when=lambda outcome: outcome.when, consequence=consequence)


def _error(first: RankResult, failures: Sequence[RankResult], request: Request) -> BaseException:
    """The error for the first of several failures, with a note on each of the others."""
    rank, error = first.rank, first.error
    if error is not None:
        error.add_note(f"raised on rank {rank} of {request.n} in {request}")
    elif first.fate is Fate.DIED:
        error = PeerLost(
            f"{request}: rank {rank} died: {first.detail}. Look at its output on stderr; if it is expected to die, "
            f"pass lost=({rank},).",
            rank=rank,
        )
    else:
        error = UsageError(
            f"{request}: rank {rank} was expected to die (lost={sorted(request.lost)}) but returned {first.value!r}. "
            "The fault did not fire: fix the test, or remove the rank from lost."
        )
    for other in failures:
        if other.fate is Fate.STUCK:
            error.add_note(f"rank {other.rank} did not finish and was stopped; its stack:\n{other.detail}")
        elif other is not first:
            why = f"{type(other.error).__name__}: {other.error}" if other.error is not None else other.detail
            error.add_note(f"rank {other.rank} failed too: {why or 'it was expected to die, but returned'}")
    return error


def _timed_out(stuck: Sequence[RankResult], outcomes: Sequence[RankResult], request: Request) -> CollectiveTimeout:
    ranks = [outcome.rank for outcome in stuck]
    stacks = "\n".join(f"stack of rank {outcome.rank}:\n{outcome.detail}" for outcome in stuck)
    return CollectiveTimeout(
        f"{request}: ranks {ranks} had not returned after {request.timeout:.3g} s and were stopped. "
        f"Find out what they wait for, or raise timeout if they are just slow.\n{stacks}",
        joined=[outcome.rank for outcome in outcomes if outcome.rank not in ranks],
        missing=ranks,
    )


def _run_threads(request: Request) -> list[RankResult]:
    store, timeout, n = HashStore(), request.timeout + GROUP_MARGIN, request.n
    built: list[Group] = []
    try:
        for rank in range(n):
            made = request.kind.build(store, rank, n, timeout=timeout, name=request.kind.name)
            built.append(check_built(made, request.kind, who=str(request)))
    except BaseException:
        for group in built:
            group.close(timeout=0)
        raise
    groups = list(built)
    answers: queue.SimpleQueue[RankResult] = queue.SimpleQueue()

    def rank_thread(rank: int) -> None:
        try:
            if request.wrap is not None:
                groups[rank] = request.wrap(groups[rank])
            answers.put(RankResult(rank, Fate.RETURNED, value=request.fn(groups[rank])))
        except BaseException as error:
            answers.put(RankResult(rank, Fate.RAISED, error=error))
            groups[rank].abort(f"rank {rank} raised {type(error).__name__}: {error}")

    names = [f"gradwire-rank-{rank}" for rank in range(n)]
    threads = [threading.Thread(target=rank_thread, args=(i,), name=name, daemon=True) for i, name in enumerate(names)]
    try:
        for thread in threads:
            thread.start()
        outcomes = _await_threads(threads, answers, request.timeout)
    except BaseException:
        built[0].abort("run_ranks was interrupted")
        for group in groups:
            with suppress(Exception):
                group.close()
        raise
    if any(outcome.fate is Fate.STUCK for outcome in outcomes):
        built[0].abort("run_ranks: some ranks timed out")  # whatever the wrapper does with an abort
    deadline = time.monotonic() + ABORT_GRACE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [_close(group, outcome) for group, outcome in zip(groups, outcomes, strict=True)]


def _await_threads(
    threads: Sequence[threading.Thread], answers: queue.SimpleQueue[RankResult], timeout: float
) -> list[RankResult]:
    """Every rank's outcome. A rank without one in time is stuck; after a failure the remaining time is short."""
    deadline = time.monotonic() + timeout
    known: dict[int, RankResult] = {}
    while len(known) < len(threads):
        try:
            outcome = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        known[outcome.rank] = outcome
        if outcome.fate is Fate.RAISED:
            deadline = min(deadline, time.monotonic() + ABORT_GRACE)
    frames = sys._current_frames()
    for rank, thread in enumerate(threads):
        if rank not in known:
            frame = frames.get(thread.ident or 0)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else "(just ended)"
            known[rank] = RankResult(rank, Fate.STUCK, detail=stack)
    return [known[rank] for rank in range(len(threads))]


def _close(group: Group, outcome: RankResult) -> RankResult:
    try:
        group.close()
    except BaseException as error:
        if outcome.error is None:
            return RankResult(outcome.rank, Fate.RAISED, error=error)
        outcome.error.add_note(f"and then, when the group was closed: {type(error).__name__}: {error}")
    return outcome


def _run_processes(request: Request) -> list[RankResult]:
    ranks: RankPool | MPIWorlds = default_worlds() if request.kind.ranks is Ranks.MPI else default_pool()
    build = _on_two_hosts if request.kind.name == "hierarchical" else request.kind.build
    job, name = GroupJob(request.fn, build, request.wrap), request.kind.name
    return ranks.run(job, request.n, timeout=request.timeout, lost=request.lost, leftovers=request.leftovers, name=name)


def _on_two_hosts(store: Store, rank: int, size: int, *, timeout: float, name: str) -> Group:
    """Two nominal hosts: the first half of the ranks, and the second."""
    host = f"host {rank * 2 // size}"
    return HierarchicalGroup.discover(store, rank, size, timeout=timeout, name=name, host=host)
