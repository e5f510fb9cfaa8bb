"""Metrics of a rank, handed to a callable."""

import os
import re
import sys
import threading
import time
import urllib.error
import urllib.request
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire import observe
from gradwire.errors import UsageError
from gradwire.observe import export as package_function, metrics as module
from gradwire.observe.stragglers.steps import Phase, StepTimes
from gradwire.recorder.source import EventSource
from gradwire.testing import run_ranks
from helpers.made_rings import step_records
from helpers.waiting import wait_until


@pytest.fixture
def unlimited(monkeypatch):
    """Exports may take any share of the time, so that every step is exported."""
    monkeypatch.setattr(module, "_SHARE", 1e9)


@pytest.fixture
def train(recorded):
    """Train for some steps."""
    [group] = gw.ThreadGroup.world(1)
    model = nn.Linear(4, 4)
    replica = gw.replicate(model, group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps(number, exporter=None):
        """Train; after each step wait until `exporter`, if given, has exported what was handed over to it."""
        for _ in range(number):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if exporter is not None:
                wait_until(lambda: exporter._worker.idle, "the export of a step")

    yield steps
    del replica
    group.close()


def test_every_step_is_exported_with_all_metrics(train, unlimited):
    seen = []
    exporter = observe.export(lambda metrics, step: seen.append((step, metrics)))
    train(4, exporter)
    assert [step for step, _ in seen] == [1, 2, 3]  # when the first step began is not known
    for _, metrics in seen:
        assert metrics.keys() == observe.METRICS.keys()
        parts = [
            metrics[f"gradwire_{part}_seconds"] for part in ("data", "forward", "backward", "exposed", "optimizer")
        ]
        assert sum(parts) == pytest.approx(metrics["gradwire_step_seconds"])
    assert seen[-1][1]["gradwire_bytes"] == 80
    observe.stop()
    train(2)
    assert len(seen) == 3


def test_every_few_steps_means_are_exported_and_the_rest_at_the_end(train, unlimited):
    seen = []
    handle = observe.export(lambda metrics, step: seen.append((step, metrics["gradwire_steps"])), every=3)
    train(9, handle)
    assert seen == [(3, 3), (6, 3)]
    handle.close()
    assert seen == [(3, 3), (6, 3), (8, 2)]
    train(5)
    assert len(seen) == 3


def test_means():
    steps = [
        StepTimes(1, 0, 40_000_000, {Phase.EXPOSED: 10_000_000}, {}, 100),
        StepTimes(2, 0, 80_000_000, {Phase.EXPOSED: 20_000_000, Phase.DATA: 6_000_000}, {}, 300),
    ]
    means = module.averages(steps)
    assert means["gradwire_step_seconds"] == pytest.approx(0.06)
    assert means["gradwire_exposed_share"] == pytest.approx(0.25)
    assert (means["gradwire_data_seconds"], means["gradwire_bytes"], means["gradwire_steps"]) == (0.003, 200, 2)


def test_exports_take_a_hundredth_of_the_time(train, monkeypatch):
    """By a clock of the test's own, on which a call of `log` takes 10 s and a step 100 s."""
    now = [0.0]
    for clock in ("_now", "_cpu_time"):
        monkeypatch.setattr(module, clock, lambda: now[0])
    seen = []

    def log(metrics, step):
        seen.append((step, metrics["gradwire_steps"]))
        now[0] += 10.0

    exporter = observe.export(log)
    for _ in range(30):
        train(1, exporter)
        now[0] += 100.0
    assert seen == [(1, 1), (11, 10), (21, 10)]  # no step is lost: they are in the means


def test_an_exception_is_shown_once_and_never_raised(train, unlimited):
    calls = []

    def log(metrics, step):
        calls.append(step)
        raise ConnectionError("the server is gone")

    exporter = observe.export(log)
    with pytest.warns(UserWarning, match="ConnectionError: the server is gone") as shown:
        train(5, exporter)
    assert len(calls) == 4
    assert len([one for one in shown if "server is gone" in str(one.message)]) == 1


def test_warnings_that_are_errors_do_not_end_training_either(train, unlimited):
    called = []

    def log(metrics, step):
        called.append(step)
        raise ZeroDivisionError

    exporter = observe.export(log)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(3, exporter)
    assert len(called) == 2


def test_a_callable_that_runs_an_optimizer_is_not_called_again_by_it(train, unlimited):
    other = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    calls = []

    def log(metrics, step):
        calls.append(step)
        other.step()

    train(3, observe.export(log))
    assert calls == [1, 2]


def test_steps_whose_records_were_overwritten_unread_are_left_out(unlimited):
    """As when an export took long, and none was allowed for 100 times as long."""
    before = [record for step in range(4) for record in step_records(0, step)]
    later = [record for step in range(400, 404) for record in step_records(0, step)]

    portions = [before[:-9], later[5:]]

    class Follower:
        def poll(self, *, most):
            return portions.pop(0)

        def close(self):
            pass

    seen = []
    exporter = module.Export(lambda metrics, step: seen.append((step, metrics)), Follower(), 1)
    exporter.poll()
    exporter.poll()
    exporter.remove()
    assert [(step, metrics["gradwire_steps"]) for step, metrics in seen] == [(2, 2), (403, 3)]
    assert all(metrics["gradwire_step_seconds"] == pytest.approx(0.02) for _, metrics in seen)


def test_warnings_are_counted(train, unlimited):
    seen = []
    exporter = observe.export(lambda metrics, step: seen.append(metrics["gradwire_warnings"]))
    train(2, exporter)
    EventSource("world", 0, 1).warn("something is wrong")
    train(1, exporter)
    assert seen == [0, 1]


def test_what_is_refused(recorded):
    with pytest.raises(UsageError, match="must be a callable"):
        observe.export("tensorboard")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="1 or more"):
        observe.export(print, every=0)
    observe.stop()
    with pytest.raises(UsageError, match="is not recorded"):
        observe.export(print)
    assert package_function is observe.export


def test_a_slow_callable_keeps_no_step_waiting(train, unlimited):
    """It is called on a thread of its own. Steps that end in the meantime are in the means of the next export."""
    seen, entered, go_on = [], threading.Event(), threading.Event()

    def log(metrics, step):
        seen.append((step, metrics["gradwire_steps"], threading.current_thread() is threading.main_thread()))
        entered.set()
        go_on.wait(60)

    exporter = observe.export(log)
    train(1, exporter)  # while it is busy, the end of a step wakes nobody
    train(1)
    assert entered.wait(60)
    train(4)
    go_on.set()
    exporter.close()
    first, *_, last = seen
    assert first == (1, 1, False)
    assert (last[0], sum(steps for _, steps, _ in seen)) == (5, 5)


def test_ranks_that_are_threads_are_told_once_that_nothing_is_exported(recorded, unlimited):
    def rank_main(group):
        model = nn.Linear(4, 4)
        gw.replicate(model, group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    seen = []
    exporter = observe.export(lambda metrics, step: seen.append(step))
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        run_ranks(rank_main, 2, kind="threads")
        exporter.close()
    texts = [str(one.message) for one in shown if "ranks are threads of one process" in str(one.message)]
    assert (seen, len(texts)) == ([], 1)


def test_files_are_closed(train, unlimited):
    before = len(os.listdir("/proc/self/fd"))
    observe.export(lambda metrics, step: None)
    observe.export(lambda metrics, step: None).close()
    train(2)
    observe.stop()
    assert len(os.listdir("/proc/self/fd")) < before  # without the recorder's own


def test_prometheus_on_loopback():
    pytest.importorskip("prometheus_client")
    log = observe.prometheus(port=0, rank=3)
    try:
        log({"gradwire_step_seconds": 0.25, "of another": 1.0}, 17)
        with urllib.request.urlopen(f"http://127.0.0.1:{log.port}/metrics", timeout=60) as page:
            text = page.read().decode()
        assert 'gradwire_step_seconds{rank="3"} 0.25' in text
        assert 'gradwire_step{rank="3"} 17.0' in text
        assert log._server.server_address[0] == "127.0.0.1"
        with pytest.raises(UsageError, match="different ports"):
            observe.prometheus(port=log.port, rank=4)
    finally:
        log.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{log.port}/metrics", timeout=60)


def test_opentelemetry_metrics_and_spans():
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry import metrics, trace
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    observe.opentelemetry_metrics(rank=0)({"gradwire_bytes": 5.0}, 1)  # without an SDK it does nothing
    reader, spans = InMemoryMetricReader(), InMemorySpanExporter()
    meters, tracers = MeterProvider([reader]), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "get_meter", meters.get_meter)
        patch.setattr(trace, "get_tracer", tracers.get_tracer)
        values = {"gradwire_step_seconds": 0.25, "gradwire_bytes": 80.0}
        observe.opentelemetry_metrics(rank=2)(values, 7)
        before = time.time_ns()
        observe.opentelemetry_spans(rank=2)(values, 7)
    found = {
        metric.name: metric.data.data_points[0]
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert (found["gradwire_bytes"].value, dict(found["gradwire_bytes"].attributes)) == (80.0, {"rank": 2})
    [span] = spans.get_finished_spans()
    assert span.end_time - span.start_time == 250_000_000
    assert span.end_time >= before
    assert (span.attributes["gradwire_step"], span.attributes["gradwire_bytes"]) == (7, 80.0)
    meters.shutdown()
    tracers.shutdown()


@pytest.mark.parametrize(
    "make", [lambda: observe.prometheus(port=0, rank=0), lambda: observe.opentelemetry_spans(rank=0)]
)
def test_without_the_package_the_error_shows_how_to_get_it(make, monkeypatch):
    for name in ("prometheus_client", "opentelemetry.trace"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"pip install 'gradwire\["):
        make()


PAGE = (Path(__file__).parents[3] / "docs" / "observe.md").read_text()


def test_the_table_of_metrics_is_complete():
    for name, meaning in observe.METRICS.items():
        assert f"| `{name}` | {meaning} |" in PAGE


@pytest.mark.parametrize("code", re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S))
def test_the_examples_of_the_page_run(code, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    exec(code, {})
    assert capsys.readouterr().out
