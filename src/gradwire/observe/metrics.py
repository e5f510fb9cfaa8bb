"""Per-step metrics of this rank, handed to a callable: TensorBoard, W&B (a lambda will do), Prometheus, OpenTelemetry, or your own.

Note [What an export costs]
Nothing is added to the gradient path. After an optimizer's step the training thread wakes a thread of the exporter, which reads
what the flight recorder has written since the last export, and calls the callable. The two share the interpreter, so an export
that took a certain CPU time is followed by none for 100 times as long, and exports take at most about 1 % of the time; values are
then means over the steps since the last one. To read the records of a step takes 0.2 ms, which is more than 1 % of a step below
20 ms: of more than 1,024 new records only the last are read, and values are means over these.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from gradwire.errors import UsageError
from gradwire.observe.recording import attach
from gradwire.observe.rings.run_follower import RingFollower
from gradwire.observe.stragglers.steps import Phase, StepFolder, StepTimes
from gradwire.recorder import writer
from gradwire.runtime.threads import Worker

METRICS: Mapping[str, str] = {
    "gradwire_step_seconds": "duration of a step",
    "gradwire_data_seconds": "between steps: loading data, logging, saving",
    "gradwire_forward_seconds": "the model's forward",
    "gradwire_backward_seconds": "the loss and its backward, while buckets are reduced",
    "gradwire_exposed_seconds": "waiting for other ranks and averages",
    "gradwire_optimizer_seconds": "the optimizer's step",
    "gradwire_exposed_share": "exposed_seconds as a share of step_seconds",
    "gradwire_bytes": "bytes of this rank's collectives in a step",
    "gradwire_steps": "how many steps the values above are means of",
    "gradwire_warnings": "warnings recorded on this rank so far",
    "gradwire_export_seconds": "how long the last export took",
}
"""The metrics, by name."""
_PHASES = {phase: f"gradwire_{phase.name.lower()}_seconds" for phase in Phase}
_SHARE = 0.01
_MOST_RECORDS = 1024
LOOPBACK = "127.0.0.1"
_now = time.perf_counter
_cpu_time = time.thread_time
Log = Callable[[dict[str, float], int], object]


def export(log: Log, *, every: int = 1) -> Export:
    """Call `log(metrics, step)` after steps on this rank: `metrics` is a dict of numbers by name, see `METRICS`.

    Called after every `every` steps, or less often: see Note [What an export costs]. It is called on a thread of its own, one call
    at a time. Ranks that are not to export do not call this. An exception of `log` is shown once, as a warning. Ends with
    `observe.stop()`, or with `close()` of what is returned, which exports what is left. The first step is left out, because nothing
    tells when it began; and so are the steps of ranks that are threads of one process, which share its recorder.

    >>> import tempfile, gradwire as gw
    >>> with tempfile.TemporaryDirectory() as run:
    ...     gw.observe.start(run, rank=0, size=1)
    ...     exporter = gw.observe.export(lambda metrics, step: print(step, metrics["gradwire_step_seconds"]))
    ...     exporter.close()  # after training
    ...     gw.observe.stop()
    """
    if not callable(log):
        raise UsageError(f"observe.export(log={log!r}): log must be a callable log(metrics, step).")
    if every < 1:
        raise UsageError(f"observe.export(every={every}): must be 1 or more.")
    recorder = writer.active
    if recorder is None:
        raise UsageError(
            "observe.export(): this process is not recorded. Call gradwire.observe.start(directory) first."
        )
    exporter = Export(log, RingFollower(recorder.path, tail=0), every)
    attach(exporter.remove)
    return exporter


class Export:
    """Exports the metrics of this rank, made by `export`."""

    def __init__(self, log: Log, follower: RingFollower, every: int) -> None:
        from gradwire.autograd.optimizer_steps import after_optimizer_steps

        self._log = log
        self._follower: RingFollower | None = follower
        self._every = every
        self._folder = StepFolder()
        self._steps: list[StepTimes] = []
        self._took = 0.0
        self._not_before = 0.0
        self._has_warned = False
        self._busy = threading.Lock()
        """Held while it exports: programs may call `poll` themselves."""
        self._worker = Worker("export")
        self._pid = os.getpid()
        self._hook = after_optimizer_steps(self._optimizer_stepped)

    def _optimizer_stepped(self, *_: Any) -> None:
        worker = self._worker
        if _now() >= self._not_before and worker.idle and not worker.is_current_thread:
            worker.put(self.poll)

    def poll(self) -> None:
        """Export what is new, in this thread. Programs without an optimizer may call it."""
        if not self._busy.acquire(blocking=False):
            return
        try:
            began, used = _now(), _cpu_time()
            self._read()
            if len(self._steps) >= self._every:
                steps, self._steps = self._steps, []
                recorder = writer.active
                warned = 0 if recorder is None else recorder.warnings
                self._call({**averages(steps), "gradwire_warnings": warned}, steps[-1].step)
            self._took = _now() - began
            self._not_before = _now() + (_cpu_time() - used) / _SHARE
        finally:
            self._busy.release()

    def _read(self) -> None:
        follower = self._follower
        for record in [] if follower is None else follower.poll(most=_MOST_RECORDS):
            self._folder.add(record)
        if self._folder.is_shared:
            self._warn("ranks are threads of one process and share its recorder, so their steps are not exported")
        self._steps += self._folder.steps
        self._folder.steps.clear()

    def _call(self, metrics: dict[str, float], step: int) -> None:
        try:
            self._log({**metrics, "gradwire_export_seconds": self._took}, step)
        except Exception as error:
            self._warn(f"log(metrics, {step}) raised {type(error).__name__}: {error}. Training continues")

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            with contextlib.suppress(Warning):  # a filter that raises must not end training either
                warnings.warn(f"observe.export: {text}; this is shown once.", stacklevel=2)

    def close(self) -> None:
        """Export what is left, and stop."""
        self._hook.remove()
        if self._worker.stop():
            self._every = 1
            self.poll()
        self.remove()

    def remove(self) -> None:
        """Stop without another export. In a forked child there is no thread to end."""
        self._hook.remove()
        ended = self._pid != os.getpid() or self._worker.stop()
        follower, self._follower = self._follower, None
        if follower is not None and ended:  # a callable that does not return may still use it
            follower.close()


def averages(steps: Sequence[StepTimes]) -> dict[str, float]:
    """The metrics of some steps: their means."""
    number = len(steps)
    seconds = sum(one.seconds for one in steps) / number
    phases = {name: sum(one.share(phase) for one in steps) / number for phase, name in _PHASES.items()}
    return {
        "gradwire_step_seconds": seconds,
        **phases,
        "gradwire_exposed_share": phases["gradwire_exposed_seconds"] / seconds if seconds else 0.0,
        "gradwire_bytes": sum(one.nbytes for one in steps) / number,
        "gradwire_steps": number,
    }


class PrometheusLog:
    """Serves the metrics to Prometheus, made by `prometheus`."""

    def __init__(self, client: ModuleType, port: int, rank: int) -> None:
        registry = client.CollectorRegistry()
        self._gauges = {
            name: client.Gauge(name, meaning, ["rank"], registry=registry).labels(str(rank))
            for name, meaning in {**METRICS, "gradwire_step": "the last step of these values"}.items()
        }
        try:
            self._server, self._thread = client.start_http_server(port, addr=LOOPBACK, registry=registry)
        except OSError as error:
            raise UsageError(
                f"observe.prometheus(port={port}): {error.strerror}. Ranks of one host need different ports, e.g. 9464 + rank."
            ) from None
        self.port: int = self._server.server_address[1]
        """Where it listens, on this host only."""

    def __call__(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            if name in self._gauges:
                self._gauges[name].set(value)
        self._gauges["gradwire_step"].set(step)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def prometheus(*, port: int, rank: int) -> PrometheusLog:
    """A `log` for `export` that Prometheus scrapes at http://127.0.0.1:port/metrics. Port 0 takes a free one: see `port`. It
    listens on the loopback address only, in a thread of prometheus_client. Metrics have the label `rank`."""
    return PrometheusLog(_package("prometheus_client", "prometheus"), port, rank)


def opentelemetry_metrics(*, rank: int) -> Log:
    """A `log` for `export` that sets a gauge for each metric, with the attribute `rank`. Where they go is decided by the SDK
    that the program has set up; without one nothing happens."""
    meter = _package("opentelemetry.metrics", "opentelemetry").get_meter("gradwire")
    gauges: dict[str, Any] = {
        name: meter.create_gauge(name, unit="s" if name.endswith("_seconds") else "1", description=meaning)
        for name, meaning in METRICS.items()
    }

    def log(metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            if name in gauges:
                gauges[name].set(value, {"rank": rank})

    return log


def opentelemetry_spans(*, rank: int) -> Log:
    """A `log` for `export` that makes a span for each export, as long as a step took, with the metrics as attributes."""
    tracer = _package("opentelemetry.trace", "opentelemetry").get_tracer("gradwire")

    def log(metrics: dict[str, float], step: int) -> None:
        end = time.time_ns()
        start = end - int(metrics["gradwire_step_seconds"] * 1e9)
        attributes = {**metrics, "gradwire_step": step, "rank": rank}
        tracer.start_span("gradwire step", start_time=start, attributes=attributes).end(end)

    return log


def _package(name: str, extra: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError:
        raise UsageError(f"this needs the package {name.partition('.')[0]}: pip install 'gradwire[{extra}]'.") from None
