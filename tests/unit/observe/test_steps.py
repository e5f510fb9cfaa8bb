"""Phases of steps."""

from gradwire.observe.stragglers.steps import Phase, spans
from gradwire.recorder.format import RecordKind as K


def test_the_phases_of_two_steps(record):
    records = [
        record(K.FORWARD_BEGAN, 10, step=0),
        record(K.FORWARD_ENDED, 30, step=0),
        record(K.BUCKET_FULL, 40, step=0, bucket=0),
        record(K.BACKWARD_ENDED, 70, step=0),
        record(K.STEP_ENDED, 75, step=0),
        record(K.OPTIMIZER_BEGAN, 76),
        record(K.OPTIMIZER_ENDED, 80),
        record(K.FORWARD_BEGAN, 100, step=1),
    ]
    assert [(s.phase, s.step, s.start, s.end) for s in spans(records)] == [
        (Phase.FORWARD, 0, 10, 30),
        (Phase.BACKWARD, 0, 30, 70),
        (Phase.EXPOSED, 0, 70, 75),
        (Phase.DATA, 0, 75, 76),
        (Phase.OPTIMIZER, 0, 76, 80),
        (Phase.DATA, 1, 80, 100),
    ]
    assert spans(records)[0].seconds == 2e-8


def test_a_failed_step_ends_there(record):
    records = [record(K.FORWARD_BEGAN, 0, step=4), record(K.STEP_FAILED, 5, step=4), record(K.FORWARD_BEGAN, 9, step=5)]
    assert [(s.phase, s.step, s.end - s.start) for s in spans(records)] == [(Phase.FORWARD, 4, 5), (Phase.DATA, 4, 4)]


def test_nothing_is_known_without_records(record):
    assert spans([]) == []
    assert spans([record(K.STEP_ENDED, 5, step=1)]) == []
