"""Callables for `export`: Prometheus and OpenTelemetry. Each needs its package: `pip install 'gradwire[prometheus]'` and
`'gradwire[opentelemetry]'`. For TensorBoard and W&B a lambda will do: see docs/observe.md."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from gradwire.errors import UsageError
from gradwire.observe.export import METRICS

LOOPBACK = "127.0.0.1"


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
    """A `log` for `export` that Prometheus scrapes at http://127.0.0.1:port/metrics. Port 0 takes a free one: see `port`.

    It listens on the loopback address only, in a thread of prometheus_client. Metrics have the label `rank`.
    """
    return PrometheusLog(_package("prometheus_client", "prometheus"), port, rank)


def opentelemetry_metrics(*, rank: int) -> Callable[[dict[str, float], int], None]:
    """A `log` for `export` that sets a gauge for each metric, with the attribute `rank`.

    Where they go is decided by the SDK that the program has set up; without one nothing happens.
    """
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


def opentelemetry_spans(*, rank: int) -> Callable[[dict[str, float], int], None]:
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
