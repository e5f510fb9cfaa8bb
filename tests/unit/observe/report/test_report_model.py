"""The model of a report, from rings that are made up."""

import re

import pytest
import torch

from gradwire.errors import UsageError
from gradwire.observe.report.findings import find
from gradwire.observe.report.rank_summary import TrafficKey, sent_bytes_of
from gradwire.observe.report.render import compare_text, render_page, render_text
from gradwire.observe.report.report_model import RunReport
from gradwire.observe.report.suggest import measure
from gradwire.observe.rings.intervals import bucket_spans, operations, ranks_apart
from gradwire.observe.stragglers.steps import Phase
from gradwire.recorder.format import RecordKind as K
from helpers.made_rings import BUCKET, MS, made_ring, mark, step_records


@pytest.fixture
def report():
    return RunReport([made_ring(0, range(30)), made_ring(1, range(30), late=3 * MS)])


def test_step_times_and_phases(report):
    assert [row.step for row in report.steps] == list(range(1, 30))  # when the first step began is not known
    assert report.step_seconds == pytest.approx(0.02)
    ms = {phase: round(seconds * 1e3, 3) for phase, seconds in report.phases[0].items()}
    assert ms == {Phase.DATA: 3.0, Phase.FORWARD: 3.0, Phase.BACKWARD: 5.0, Phase.EXPOSED: 8.0, Phase.OPTIMIZER: 1.0}
    assert report.exposed_share == pytest.approx((8 + 5) / 40)


def test_bytes_are_counted_by_hook_and_collective(report):
    [(key, traffic)] = report.traffic.items()
    assert key == TrafficKey("mean()", "all_reduce", "world")
    assert (traffic.calls, traffic.nbytes) == (2 * 30 * 2, 2 * 30 * 2 * BUCKET)
    assert report.bytes_per_step == 2 * BUCKET


@pytest.mark.parametrize("size", [2, 4])
def test_sent_bytes_are_counted_as_those_of_collectives(size):
    from gradwire import collectives
    from gradwire.collectives.op import sent_bytes

    t, parts = torch.zeros(4 * size), [torch.zeros(4) for _ in range(size)]
    for op in (
        collectives.all_reduce(t),
        collectives.broadcast(t, src=0),
        collectives.all_gather([torch.zeros(4 * size) for _ in range(size)], t),
        collectives.reduce_scatter(parts[0], parts),
        collectives.all_to_all_single(torch.zeros(4 * size), t),
        collectives.barrier(),
    ):
        assert sent_bytes_of(op.kind.value, op.nbytes, size) == sent_bytes(op, 0, size)


def test_the_late_rank_is_late_in_every_step(report):
    assert set(report.lateness[0].values()) == {0.0}
    assert set(report.lateness[1].values()) == {0.003}
    [straggler] = report.stragglers
    assert (straggler.rank, straggler.phase) == (1, Phase.DATA)


def test_timelines_are_of_a_typical_and_the_slowest_step():
    slow = [made_ring(rank, range(30)) for rank in range(2)]
    for ring in slow:
        ring.records[:] = [
            r._replace(time=r.time + 50 * MS) if r.step > 20 or r.time > 21 * 20 * MS else r for r in ring.records
        ]
    report = RunReport(slow)
    typical, slowest = report.timelines
    assert typical.end - typical.start == 20 * MS
    assert slowest.step == 21
    assert slowest.end - slowest.start == 70 * MS
    assert slowest.seconds == max(row.high for row in report.steps)
    row = typical.rows[1]
    assert (row.rank, [b.record.bucket for b in row.buckets], len(row.operations)) == (1, [0, 1], 2)
    assert all(typical.start <= o.submitted < o.ended <= typical.end for o in row.operations)
    assert sum(span.end - span.start for span in row.phases) == 20 * MS


def test_the_time_of_a_typical_step_is_the_median_that_is_shown_above_it():
    rings = [made_ring(rank, range(30)) for rank in range(2)]
    rings[1].records[:] = [r._replace(time=r.time * 11 // 10) for r in rings[1].records]
    report = RunReport(rings)
    assert report.timelines[0].seconds == report.step_seconds == pytest.approx(0.021)


def test_ranks_that_have_recorded_different_steps():
    report = RunReport([made_ring(0, range(10)), made_ring(1, range(5, 20))])
    assert [row.step for row in report.steps] == list(range(1, 20))
    assert sorted(report.lateness[0]) == [6, 7, 8, 9]
    assert report.timelines[0].step in range(6, 10)


def test_ranks_without_a_step_in_common_are_not_compared():
    report = RunReport([made_ring(0, range(5)), made_ring(1, range(10, 15))])
    assert report.lateness == {0: {}, 1: {}}
    assert len(report.timelines[0].rows) == 1


def test_one_rank_and_no_records():
    assert RunReport([made_ring(0, range(3), size=1)]).lateness == {}
    empty = RunReport([made_ring(0, range(0))])
    assert (empty.steps, empty.timelines, dict(empty.traffic), empty.exposed_share) == ([], [], {}, 0.0)
    assert empty.end == empty.begin


def test_clocks_of_two_hosts_are_aligned():
    shifted = made_ring(1, range(30), clock="node-b", host="node-b")
    shifted.records[:] = [r._replace(time=r.time + 3 * 10**9) for r in shifted.records]
    report = RunReport([made_ring(0, range(30)), shifted])
    error = report.clocks["node-b"].error / 1e9
    assert 0 < error < 0.01
    assert all(value <= error for value in report.lateness[1].values())


def test_operations_of_a_ring_that_has_wrapped():
    records = step_records(0, 3)
    cut = [r for r in records if r.kind not in (K.COLLECTIVE_SUBMITTED, K.COLLECTIVE_STARTED)]
    assert [(o.submitted, o.ended) for o in operations(cut)] == [(o.submitted, o.ended) for o in operations(records)]
    assert operations(cut)[0].record.bucket == -1
    assert [o.ended for o in operations(records[:10])] == [None, None]


def test_a_failed_operation_keeps_its_label():
    failed = mark(99, 10 * MS, K.COLLECTIVE_FAILED, "PeerLost: gone", op="all_reduce", group="world", seq=0)
    submitted = mark(98, 5 * MS, K.COLLECTIVE_SUBMITTED, "loss", op="all_reduce", group="world", seq=0)
    [one] = operations([submitted, failed])
    assert (one.record.label, one.error, one.ended - one.submitted) == ("loss", "PeerLost: gone", 5 * MS)
    [alone] = operations([failed])
    assert (alone.record.label, alone.error) == ("", "PeerLost: gone")


def test_a_bucket_that_was_not_reduced():
    spans = bucket_spans(step_records(0, 0)[:9])
    assert [(b.record.bucket, b.hook, b.reduced) for b in spans] == [(0, "mean()", None), (1, "", None)]


def test_ranks_that_are_threads_of_one_process_are_told_apart():
    ring = made_ring(0, range(3), size=1)
    other = [r._replace(rank=1 if r.group else 0, thread=2) for r in made_ring(1, range(3)).records]
    ring.records[:] = sorted(ring.records + other, key=lambda r: r.time)
    apart = ranks_apart([ring])
    assert [(r.rank, len(r.records)) for r in apart] == [(0, 3 * 18), (1, 3 * 18)]
    assert [len(rank.steps) for rank in RunReport(apart).ranks] == [2, 2]


def test_torchs_ddp_whose_backward_includes_the_wait():
    rings = [made_ring(rank, range(10)) for rank in range(2)]
    hidden = (K.STEP_ENDED, K.BACKWARD_ENDED, K.BUCKET_FULL, K.BUCKET_LAUNCHED, K.BUCKET_REDUCED)
    for ring in rings:
        ring.records[:] = [
            r._replace(group="", group_id=0) if r.kind in (K.FORWARD_BEGAN, K.FORWARD_ENDED) else r
            for r in ring.records
            if r.kind not in hidden
        ]
    report = RunReport(rings)
    assert len(report.steps) >= 7
    assert not report.has_exposed
    assert "Backward includes the wait for averages" in [finding.title for finding in find(report)]
    assert re.search(r"\n  exposed communication +- +-\n", render_text(report))
    both = compare_text(report, report)
    assert re.search(r"exposed communication +- +- +-\n.*\n  exposed share of it +- +- +-\n", both)
    assert re.search(r"bytes sent per step +- +- +-\n", both)
    assert max(map(len, both.splitlines())) <= 80
    assert "<span>exposed communication</span>" not in render_page(report)
    with pytest.raises(UsageError, match="torch's DDP waits inside its backward"):
        measure(report)


def test_ranks_without_buckets_are_not_compared():
    rings = [made_ring(rank, range(10)) for rank in range(2)]
    for ring in rings:
        ring.records[:] = [r for r in ring.records if r.bucket < 0]
    assert RunReport(rings).lateness == {}
