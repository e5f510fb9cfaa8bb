"""`Supervisor`: start the ranks of a run, show their output, forward signals, end them all, and report the outcome.

One thread and one loop: pipes, ended processes and signals all wake the same `select`. `shutdown.py` decides what to do,
and what to report.

Note [When everything has been read]
After a rank's end its pipe is read until it is empty, not until it is closed: a process that the rank started may hold it open. At
the end of the run such companions get `COMPANIONS` seconds to exit (multiprocessing's resource tracker cleans up then); then they
are killed, and what they have written is shown too.
"""

from __future__ import annotations

import fcntl
import functools
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from gradwire.errors import UsageError
from gradwire.launch.display import Display, Picture
from gradwire.launch.preload import PreloadedPython
from gradwire.launch.process import FORWARDED, RankProcess, Start, exit_status
from gradwire.launch.screen import RankStream, Screen
from gradwire.launch.shutdown import STOPPING, Ending, Shutdown, described, outcome, report
from gradwire.launch.store_host import StoreHost
from gradwire.observe.hangs.hang_watch import HangWatch
from gradwire.observe.rings.run_outcome import save
from gradwire.observe.run_status import RunMonitor
from gradwire.runtime.host import handles_signal
from gradwire.runtime.rank_error import MAIN, THREAD, RankError

COMPANIONS, _PAUSE = 1.0, 0.02
_READABLE = selectors.EVENT_READ
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What to run, and how."""

    command: Sequence[str]
    """Program and arguments, the same for every rank."""
    environments: Sequence[Mapping[str, str]]
    """The environment of each rank; its length is the number of ranks."""
    grace: float = 10.0
    prefix: bool = True
    log_dir: Path | None = None
    store: StoreHost | None = None
    """The store for ranks that call torch's `init_process_group`; the run ends with it."""
    directory: Path | None = None
    """Where ranks record, if they do; `watch` and `monitor` read it."""
    errors: Path | None = None
    """Where ranks save the exceptions that end them: see `run_script.py`."""
    watch: HangWatch | None = None
    monitor: RunMonitor | None = None
    picture: Picture | None = None
    """Draws what the monitor has on a terminal, below the output of the ranks."""
    preload: PreloadedPython | None = None
    """What ranks are forks of, where that is possible, instead of processes of their own. Closed once they run."""
    cold: str = ""
    """Why there is no `preload`."""


class Supervisor:
    """The loop around the ranks of a run. `supervise_elastic.py` replaces those that end."""

    _launcher = ""
    """Its name in an elastic run, where further ranks are started later."""
    _popen: Start = subprocess.Popen
    """Starts processes."""

    def __init__(self, run: LaunchSpec) -> None:
        self._run = run
        self._shutdown = Shutdown(len(run.environments), grace=run.grace)
        self._began = time.monotonic()
        self._out, self._err = Screen(1, os.environ), Screen(2, os.environ)
        self._display = Display(self._out, self._err, monitor=run.monitor, picture=run.picture)
        self._ranks: dict[int, RankProcess] = {}
        self._logs: dict[int, BinaryIO | None] = {}
        self._streams: dict[int, tuple[RankStream, RankStream]] = {}
        self._signals: list[signal.Signals] = []
        self._unsent: dict[int, deque[int]] = {rank: deque() for rank in range(len(run.environments))}
        """Signals for each rank, which may be starting."""
        self._interrupts = 0

    def supervise(self) -> int:
        """Run all ranks until they end and return the exit code."""
        with ExitStack() as stack:
            self.start(stack)
            return self.run()

    def start(self, stack: ExitStack) -> None:
        """Start the ranks; `stack` ends and releases them, also if starting fails halfway."""
        self._selector = stack.enter_context(selectors.DefaultSelector())
        if threading.current_thread() is threading.main_thread():
            woken = stack.enter_context(_passing_on(self._got_signal))
            self._selector.register(woken, _READABLE, functools.partial(_read, woken))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)  # `gradwire run` has, before there were handlers
        self._stack = stack
        if (preload := self._run.preload) is not None:
            stack.callback(preload.close)
            if self._stopped_while_waiting_for(preload):
                return
            self._popen = preload.start
        self._start_all()
        if self._run.store is not None:  # connections wait for it
            self._run.store.start(self._popen)
            self._selector.register(self._run.store.ended, _READABLE, self._check_store)
        if preload is not None and not self._launcher:
            preload.close()

    def _start_all(self) -> None:
        for rank, environ in enumerate(self._run.environments):
            self._start_rank(rank, environ)

    def _start_rank(self, rank: int, environ: Mapping[str, str]) -> None:
        if rank not in self._logs:
            folder = self._run.log_dir
            self._logs[rank] = None if folder is None else self._stack.enter_context(_log(folder, rank))
        process = RankProcess(rank, self._run.command, environ, stdin=_stdin(rank), popen=self._popen)
        self._stack.callback(process.release)
        self._ranks[rank] = process
        self._send_signals(rank)
        log = self._logs[rank]
        out, err = (screen.prefix(rank) if self._run.prefix else b"" for screen in (self._out, self._err))
        self._streams[rank] = RankStream(self._out, out, log=log), RankStream(self._err, err, log=log)
        for pipe, stream in zip((process.stdout, process.stderr), self._streams[rank]):
            read = functools.partial(self._read_from, pipe.fileno(), stream)
            self._selector.register(pipe.fileno(), _READABLE, read)
        self._selector.register(process.ended, _READABLE, functools.partial(self._rank_ended, process))

    def _stopped_while_waiting_for(self, preload: PreloadedPython) -> bool:
        """Wait until ranks can be forked, or must be started. Whether a signal has ended the run before."""
        for fd in preload.descriptors:
            self._selector.register(fd, _READABLE, preload.read)
        while preload.reason is None and not STOPPING.intersection(self._signals):
            for key, _ in self._selector.select():
                key.data()
        for fd in preload.descriptors:
            self._selector.unregister(fd)
        for unsent in self._unsent.values():  # no rank has started
            unsent.clear()
        self._take_signals()
        if (number := self._shutdown.stopped_by) is not None:
            for rank in range(len(self._run.environments)):
                self._shutdown.ended(Ending(rank, -number, self._now))
        return number is not None

    # -- the loop ------------------------------------------------------------------------------------------------------

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began

    def run(self) -> int:
        shutdown = self._shutdown
        while not shutdown.is_over(self._now):
            at = self._next_time
            for key, _ in self._selector.select(max(0.0, at - self._now) if at < math.inf else None):
                key.data()
            self._take_signals()
            if self._interrupts > 1:
                shutdown.kill(self._now)
            self._check_output()
            for number, ranks in shutdown.due(self._now):
                for rank in ranks:
                    if rank in self._ranks:
                        self._signal(self._ranks[rank], number)
            self._look()
        preload = self._run.preload
        cold = self._run.cold if preload is None else preload.reason or ""
        how = replace(outcome(shutdown, self._now), cold=cold, launcher=self._launcher)
        if self._run.directory is not None:
            save(self._run.directory, how)  # first: `gradwire top` reads it as soon as the ranks are gone
        self._display.end()
        self._end_companions()
        errors = (self._error(process.rank, THREAD) for process in self._ranks.values())
        threads = [error for error in errors if error is not None]
        pids = {process.rank: process.pid for process in self._ranks.values()}
        tails = {rank: err.tail for rank, (_, err) in self._streams.items()}
        lines = report(shutdown, how.text, pids=pids, tails=tails, threads=threads)
        self._err.write(b"".join(line + b"\n" for line in lines))
        return shutdown.exit_code

    def _signal(self, process: RankProcess, number: int) -> None:
        process.send(number)

    def _look(self) -> None:
        """What is done at regular times."""
        if (watch := self._watch_for_hangs) is not None:
            self._display.warn(watch.check_if_due())
        if not self._has_failed:
            self._display.update()

    @property
    def _has_failed(self) -> bool:
        return self._shutdown.stopped_by is not None or any(ending.status for ending in self._shutdown.endings)

    @property
    def _watch_for_hangs(self) -> HangWatch | None:
        """Not once the run is ending: ranks that wait for one that has ended are ended soon."""
        return None if self._has_failed else self._run.watch

    @property
    def _next_time(self) -> float:
        """When to wake up if nothing happens before."""
        looks = [] if (watch := self._watch_for_hangs) is None else [watch.next_look]
        if not self._has_failed:
            looks.append(self._display.next_look)
        return min([self._shutdown.next_time, *(look - self._began for look in looks)])

    def _read_from(self, fd: int, stream: RankStream) -> None:
        data = _read(fd)
        if data:
            stream.feed(data, now=self._now)
        elif data is not None:
            self._selector.unregister(fd)

    def _rank_ended(self, process: RankProcess) -> None:
        status = process.status
        if status is None:
            return
        after = self._now
        self._check_store()  # its end may be why the rank has failed
        self._take_signals()  # first: one of them may have killed the rank
        self._selector.unregister(process.ended)
        self._drain(process, self._streams[process.rank])
        self._end_of(Ending(process.rank, status, after, error=self._error(process.rank)))

    def _end_of(self, ending: Ending) -> None:
        """A rank has ended, and everything that it has written was shown."""
        watch = self._watch_for_hangs
        if ending.status < 0 and watch is not None:  # without a traceback that shows where it was
            self._display.warn(watch.rank_ended(ending.rank))
        self._shutdown.ended(ending)

    def _error(self, rank: int, suffix: str = MAIN, member: str = "") -> RankError | None:
        """The exception that a rank has saved, with its time in seconds since the start. In an elastic run `member` is its id."""
        errors = self._run.errors
        error = None if errors is None else RankError.load(errors, rank, suffix, member)
        return None if error is None else replace(error, time=error.time - self._began)

    def _check_output(self) -> None:
        """Stop the ranks if what they write cannot be shown."""
        for name, screen in (("output", self._out), ("error", self._err)):
            if screen.reader_is_gone:
                self._shutdown.abandon(signal.SIGPIPE, self._now)
            elif screen.error is not None:
                what = f"writing to standard {name} failed: {screen.error.strerror}"
                self._shutdown.lose(what, self._now, output=True)

    def _check_store(self) -> None:
        store = self._run.store
        if store is None or store.ended not in self._selector.get_map():
            return
        if (status := exit_status(store.ended)) is not None:
            self._selector.unregister(store.ended)
            how = described(status, self._now)
            what = f"the process that hosts the store has ended ({how}); ranks cannot continue without it"
            self._shutdown.lose(what, self._now)

    def _drain(self, process: RankProcess, streams: tuple[RankStream, RankStream]) -> None:
        """See Note [When everything has been read]."""
        for pipe, stream in zip((process.stdout, process.stderr), streams):
            # A companion that writes faster than we read must not block us: read no more than what a pipe can hold.
            for _ in range(fcntl.fcntl(pipe.fileno(), fcntl.F_GETPIPE_SZ) // _CHUNK + 1):
                data = _read(pipe.fileno())
                if not data:
                    break
                stream.feed(data, now=self._now)

    def _got_signal(self, number: int, frame: FrameType | None) -> None:
        """In the handler, so that a signal is forwarded even while we wait for a slow reader of our output."""
        self._interrupts += number == signal.SIGINT
        if number == signal.SIGINT and self._interrupts > 2:
            signal.default_int_handler(number, frame)  # ends a launcher that waits for a reader who does not read
        for rank, unsent in self._unsent.items():
            unsent.append(number)
            self._send_signals(rank)
        if number == signal.SIGCONT:
            self._display.continued()
        self._signals.append(signal.Signals(number))

    def _send_signals(self, rank: int) -> None:
        """May be interrupted by itself, in the handler: each signal is sent once."""
        process, unsent = self._ranks.get(rank), self._unsent[rank]
        with suppress(IndexError):
            while process is not None:
                number = unsent.popleft()
                if number != signal.SIGUSR1 or handles_signal(process.pid, number):  # else it would end the rank
                    self._signal(process, signal.SIGKILL if self._interrupts > 1 else number)

    def _take_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            self._shutdown.signalled(number, self._now)
            if number == signal.SIGUSR1 and self._run.watch is not None:
                self._display.say(self._run.watch.standing())

    # -- the end -------------------------------------------------------------------------------------------------------

    def _end_companions(self) -> None:
        deadline = time.monotonic() + COMPANIONS
        while any(process.companions() for process in self._ranks.values()) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        for process in self._ranks.values():
            self._end_streams(process, self._streams[process.rank])

    def _end_streams(self, process: RankProcess, streams: tuple[RankStream, RankStream]) -> None:
        """Kill the companions of a rank that has ended, and show the rest of what they wrote."""
        process.send(signal.SIGKILL)
        self._drain(process, streams)
        for stream in streams:
            stream.end()


def _read(fd: int) -> bytes | None:
    """What can be read now; empty at the end of the file, None if nothing is available."""
    try:
        return os.read(fd, _CHUNK)
    except BlockingIOError:
        return None


def _stdin(rank: int) -> int:
    """Rank 0 reads what is piped into the launcher. No rank reads a terminal: ranks are not in its foreground."""
    if rank == 0 and sys.__stdin__ is not None and not os.isatty(0):
        return 0
    return subprocess.DEVNULL


def _log(folder: Path, rank: int) -> BinaryIO:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return open(folder / f"rank-{rank}.log", "wb", buffering=0)
    except OSError as error:
        raise UsageError(
            f"writing the output of rank {rank} to {folder}: {error}. Choose a writable directory."
        ) from error


@contextmanager
def _passing_on(handler: Callable[[int, FrameType | None], None]) -> Iterator[int]:
    """Send signals to `handler`, and wake the thread that watches the yielded descriptor.

    Signals that were ignored before (SIGHUP under nohup) stay ignored. Ctrl-Z stops the ranks too, and they continue with us.
    """
    before = {number: signal.getsignal(number) for number in FORWARDED}
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    before_fd = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def pause(number: int, frame: FrameType | None) -> None:
        handler(signal.SIGSTOP, None)
        os.kill(os.getpid(), signal.SIGSTOP)
        handler(signal.SIGCONT, None)

    try:
        for number, old in before.items():
            if old is not signal.SIG_IGN:
                signal.signal(number, pause if number == signal.SIGTSTP else handler)
        yield woken
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)
        signal.set_wakeup_fd(before_fd)
        os.close(woken)
        os.close(wake)
