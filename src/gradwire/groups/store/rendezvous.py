"""`Rendezvous`: how ranks that have no group yet meet in a store.

Note [Meetings are watched]
Inside `meeting(base)`, each rank has a page in the store with its host, its process and its version. Every wait has a deadline, and
a few times a second it looks for a process on this host that has ended and for an error that another rank has reported. A rank
whose part of the meeting fails reports that, so a meeting that cannot succeed ends at once on all ranks, and its error names the
rank to look at. A group may be made of other groups, whose ranks have other numbers. So a wait in an inner meeting watches the
outer meetings of its thread too, and what it finds there is raised in the terms of the outer one.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any

from torch._C._distributed_c10d import TCPStore

from gradwire.errors import CollectiveTimeout, GroupError, PeerLost
from gradwire.groups.failure.store_calls import bounded
from gradwire.recorder.format import VERSION
from gradwire.recorder.source import derived_id, new_id
from gradwire.runtime.host import host_identity, is_dead, process_start

PROTOCOL = 1
"""Of what ranks write for each other: pages, the layout of shared memory, control messages. Other numbers are refused."""
_SLICE = 0.1
"""Seconds between two looks at the other ranks."""
_GRACE = 1.0
"""Seconds to find the rank that is to blame, when a connection has broken or ranks wait for each other."""


@dataclass(frozen=True, slots=True)
class MemberProcess:
    """The process of a rank, as its page describes it."""

    host: str
    pid: int
    start: str
    version: str

    @classmethod
    def current(cls) -> MemberProcess:
        version = f"gradwire {import_module('gradwire').__version__} (protocol {PROTOCOL}, records {VERSION})"
        return cls(host_identity(), os.getpid(), process_start(os.getpid()) or "", version)


class Rendezvous:
    """One rank's part in the rendezvous of `size` ranks in `store`. Errors begin with `who`."""

    def __init__(self, store: Any, rank: int, size: int, *, timeout: float, who: object) -> None:
        self.store = bounded(store, timeout, who)
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.who = who
        self.processes: dict[int, MemberProcess] = {}
        """The ranks whose pages were read."""
        self._reports = bounded(store, _GRACE, who)
        self._base = ""
        self._failure: BaseException | None = None
        self._reported = False
        self._next_look = 0.0
        self._deadline = 0.0

    def next_key(self, base: str) -> str:
        """A key under `base` for one group: ranks make the groups over one store in the same order, so they get the same key."""
        return f"{base}/{self.store.add(f'{base}/{self.rank}/groups', 1)}"

    @contextmanager
    def meeting(self, base: str, *, report: bool = True) -> Iterator[None]:
        """Meet the other ranks under the key `base`, the same for all of them: see Note [Meetings are watched]. `report` the errors
        of this rank to the others, unless ranks may meet again under this key."""
        self._base = base
        mine = self.processes[self.rank] = MemberProcess.current()
        self.store.set(f"{base}/process/{self.rank}", json.dumps(asdict(mine)))
        self._deadline = time.monotonic() + self.timeout
        active = _active()
        active.append(self)
        try:
            yield
        except Exception as error:
            if report and not any(outer.found(error) for outer in active if outer is not self):
                if isinstance(error, GroupError) and not self.found(error):
                    with suppress(CollectiveTimeout):  # the store does not answer
                        self._check_reports()  # another rank may have failed first, and this one because of that
                self._report(error)
            raise
        finally:
            active.remove(self)
            self._failure = None  # its traceback refers to this object

    def key(self, name: str) -> str:
        return f"{self._base}/{name}"

    def exchange(self, key: str, value: str) -> list[bytes]:
        """Every rank's value, in rank order. CollectiveTimeout names the missing ranks."""
        keys = [f"{self._base}/{key}/{r}" for r in range(self.size)]
        self.store.set(keys[self.rank], value)
        self._wait_for(keys, range(self.size), self.timeout)
        self._deadline = time.monotonic() + self.timeout  # all ranks are in step here, so their deadlines agree
        return [self.store.get(key) for key in keys]

    def all_processes(self) -> dict[int, MemberProcess]:
        """The processes of all ranks, once all have arrived."""
        self._wait_for([f"{self._base}/process/{r}" for r in range(self.size)], range(self.size), self.timeout)
        self._read_pages()
        return self.processes

    def shared_id(self, key: str) -> int:
        """A random number that the first rank to call this has chosen; derived from the key if the store cannot compare and set."""
        try:
            value: bytes = self.store.compare_set(key, "", f"{new_id():x}")
            return int(value, 16)
        except (AttributeError, RuntimeError, ValueError):  # NotImplementedError, and torch's own for a missing method
            return derived_id(key, self.size)

    def receive(self, key: str, *, source: int, within: float | None = None) -> bytes:
        """The value that rank `source` sets. CollectiveTimeout names it if it does not arrive in time."""
        self._wait_for([key], [source], self.timeout if within is None else within)
        value: bytes = self.store.get(key)
        return value

    def _wait_for(self, keys: list[str], ranks: Sequence[int], timeout: float) -> None:
        def present(seconds: float) -> bool:
            began = time.monotonic()
            while not self.store.check(keys):  # not store.wait(): a FileStore rounds timeouts up to a second
                waited = time.monotonic() - began
                if waited >= seconds:
                    return False
                time.sleep(min(max(0.001, waited / 10), seconds - waited))
            return True

        def late() -> GroupError | None:
            missing = [rank for rank, key in zip(ranks, keys, strict=True) if not self.store.check([key])]
            return self.absent(missing, [r for r in (*ranks, self.rank) if r not in missing]) if missing else None

        self.wait_until(present, late, within=timeout)

    def wait_until(
        self, done: Callable[[float], bool], late: Callable[[], GroupError | None], *, within: float | None = None
    ) -> None:
        """Return when `done(seconds)`, which waits at most that long, returns True; watch the other ranks meanwhile. At the
        deadline raise `late()`, unless it is None: what was waited for arrived at the last moment."""
        deadline = time.monotonic() + (self.timeout if within is None else within)
        deadline = min([deadline, *(meeting._deadline for meeting in _active())])
        while True:
            left = deadline - time.monotonic()
            try:
                if done(max(0.0, min(_SLICE, left))):
                    return
                check_meetings()
            except RuntimeError as error:
                if any(meeting.found(error) for meeting in _active()):
                    with suppress(RuntimeError):
                        if done(0.0):  # a rank that has what it needs may end before this one has looked
                            return
                    raise
                self._blame(error)
                raise
            if left <= 0:
                if (too_late := late()) is None:
                    return
                raise too_late

    def absent(self, missing: Sequence[int], joined: Sequence[int]) -> CollectiveTimeout:
        """The error for ranks that did not arrive in time."""
        text = f"{self.who}: ranks {list(missing)} did not arrive within {self.timeout:.3g} s"
        text += ". Check that they have started, and look at their output."
        return CollectiveTimeout(text, joined=sorted(set(joined)), missing=missing)

    def _check(self) -> None:
        self._check_reports()
        self._check_processes()
        if len(self.processes) < self.size and time.monotonic() >= self._next_look:
            self._read_pages()
            self._check_processes()
            self._next_look = time.monotonic() + 3 * _SLICE

    def _check_reports(self) -> None:
        if self.store.check([self.key("failure")]):
            report = json.loads(self.store.get(self.key("failure")))
            self._reported = True
            raise self._fail(self._from_report(**report))

    def _check_processes(self) -> None:
        mine = self.processes[self.rank]
        for rank, process in self.processes.items():
            if rank != self.rank and process.host == mine.host and is_dead(process.pid, process.start):
                with suppress(CollectiveTimeout):  # the store does not answer
                    self._check_reports()  # it may have ended because of what it has reported
                raise self._fail(self._lost(rank, f"its process {process.pid} has ended"))

    def _read_pages(self) -> None:
        unread = {rank: self.key(f"process/{rank}") for rank in range(self.size) if rank not in self.processes}
        complete = self.store.check(list(unread.values()))
        for rank, key in unread.items():
            if complete or self.store.check([key]):
                self.processes[rank] = MemberProcess(**json.loads(self.store.get(key)))
        versions: dict[str, list[int]] = {}
        for rank, process in sorted(self.processes.items()):
            versions.setdefault(process.version, []).append(rank)
        if len(versions) > 1:
            which = "; ".join(f"ranks {ranks}: {version}" for version, ranks in versions.items())
            raise self._fail(GroupError(f"{self.who}: ranks run different versions. Install the same on all. {which}."))

    def _fail(self, error: GroupError) -> GroupError:
        self._failure = error
        return error

    def found(self, error: BaseException) -> bool:
        """Whether this meeting, and not an inner one, has raised `error`."""
        return error is self._failure

    def _blame(self, error: RuntimeError) -> None:
        """Raise the failure of a peer that explains `error`: a connection may break a moment before its process has ended."""
        deadline = time.monotonic() + _GRACE
        while not isinstance(error, CollectiveTimeout) and time.monotonic() < deadline:
            try:
                for meeting in _active():
                    meeting._check_processes()
            except RuntimeError as found:
                raise found from error
            time.sleep(_SLICE / 5)

    def missing_of_all(self, missing: Sequence[int]) -> list[int]:
        """The ranks to blame when this rank waits in an inner meeting for `missing`: they may be waiting for others in turn."""
        self.store.set(self.key(f"late/{self.rank}"), json.dumps(list(missing)))
        deadline, waited_for, reported = time.monotonic() + _GRACE, set(missing), {self.rank}
        while (silent := waited_for - reported) and time.monotonic() < deadline:
            for rank in silent:  # only those that this rank waits for, directly or through others
                if self.store.check([self.key(f"late/{rank}")]):
                    reported.add(rank)
                    waited_for.update(json.loads(self.store.get(self.key(f"late/{rank}"))))
            check_meetings()
            time.sleep(_SLICE / 5)
        return sorted(waited_for - reported) or list(missing)

    def _lost(self, rank: int, why: str) -> PeerLost:
        lost = f"{self.who}: rank {rank} is lost: {why} while the group was being made"
        return PeerLost(f"{lost}. Look at its output for the cause.", rank=rank)

    def _report(self, error: Exception) -> None:
        """Write what went wrong for the other ranks, unless that is where it came from."""
        if self._reported:
            return
        report: dict[str, Any] = {"by": self.rank, "text": str(error)}
        if isinstance(error, PeerLost):
            report["lost"] = error.rank
        if isinstance(error, CollectiveTimeout):
            report["missing"] = error.missing
        with suppress(RuntimeError):
            self._reports.set(f"{self._base}/failure", json.dumps(report))

    def _from_report(self, by: int, text: str, lost: int | None = None, missing: list[int] | None = None) -> GroupError:
        if lost is not None:
            return self._lost(lost, f"rank {by} found that it has ended")
        if missing:
            joined = [rank for rank in range(self.size) if rank not in missing]
            error = self.absent(missing, joined)
            return CollectiveTimeout(f"{error} Found by rank {by}.", joined=joined, missing=missing)
        return GroupError(f"{self.who}: rank {by} could not make its part of the group: {text}")


class _Watched:
    """Stands among the meetings of a thread, and ends them when there is a reason that they cannot know."""

    _deadline = math.inf

    def __init__(self, problem: Callable[[], GroupError | None]) -> None:
        self._problem = problem
        self._failure: GroupError | None = None

    def _check(self) -> None:
        self._failure = self._problem()
        if self._failure is not None:
            raise self._failure

    _check_processes = _check

    def found(self, error: BaseException) -> bool:
        return error is self._failure


@contextmanager
def watching(problem: Callable[[], GroupError | None]) -> Iterator[None]:
    """Meetings of this thread inside end with the error that `problem` returns, as soon as it returns one."""
    watched = _Watched(problem)
    _active().append(watched)
    try:
        yield
    finally:
        _active().remove(watched)


def check_meetings() -> None:
    """Raise if a meeting that the current thread is in cannot succeed."""
    for meeting in _active():
        meeting._check()


_LOCAL = threading.local()


def _active() -> list[Rendezvous | _Watched]:
    """The meetings that the current thread is in, outermost first."""
    meetings: list[Rendezvous | _Watched] = _LOCAL.__dict__.setdefault("meetings", [])
    return meetings


LOOPBACK = "127.0.0.1"


def host_store(host: str = LOOPBACK, *, timeout: float = 60.0) -> TCPStore:
    """A store in this process, on a free port of `host` ("" for every address of this machine). The port is bound before it is
    announced. By itself, a TCPStore listens on every address of the machine, whatever host it is given."""
    listener = socket.create_server((host, 0), backlog=2048)
    port, limit = listener.getsockname()[1], timedelta(seconds=timeout)
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "timeout": limit}
    return TCPStore(host or LOOPBACK, port, **options, master_listen_fd=listener.detach())
