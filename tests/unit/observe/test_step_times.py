"""Steps of a rank: what it did itself, and when it waited."""

import random

import pytest
from hypothesis import given, strategies as st

from gradwire.observe.stragglers.steps import Phase, StepFolder, covered, step_times
from gradwire.recorder.format import RecordKind as K
from helpers.recorder_put import group_id_of


@pytest.fixture
def step(record):
    """The records of a step of 100 from `at` on: 20 data, 20 forward, 40 backward, 10 exposed, 10 optimizer."""

    def make(number, at, *more):
        records = [
            record(K.FORWARD_BEGAN, at + 20, step=number, group="world"),
            record(K.FORWARD_ENDED, at + 40, step=number, group="world"),
            record(K.BUCKET_FULL, at + 60, step=number, bucket=0),
            record(K.BUCKET_LAUNCHED, at + 64, step=number, bucket=0),
            record(K.BUCKET_FULL, at + 79, step=number, bucket=1),
            record(K.BUCKET_LAUNCHED, at + 80, step=number, bucket=1),
            record(K.BACKWARD_ENDED, at + 80, step=number, group="world"),
            record(K.STEP_ENDED, at + 90, step=number, group="world"),
            record(K.OPTIMIZER_BEGAN, at + 90),
            record(K.OPTIMIZER_ENDED, at + 100),
        ]
        return sorted([*records, *more], key=lambda one: one.time)

    return make


def numbered(records):
    """In the order of time, in which a rank writes them."""
    return [one._replace(number=n) for n, one in enumerate(sorted(records, key=lambda one: one.time))]


OWN = {Phase.DATA: 20, Phase.FORWARD: 20, Phase.BACKWARD: 40, Phase.OPTIMIZER: 10, Phase.EXPOSED: 10}


def test_a_step_goes_from_end_to_end(step):
    records = [*step(0, 0), *step(1, 100), *step(2, 200)]
    times = step_times(one._replace(number=99 * n) for n, one in enumerate(records))  # between those of other threads
    assert [(one.step, one.start, one.end) for one in times] == [(1, 90, 190), (2, 190, 290)]
    for one in times:
        assert one.phases == OWN
        assert sum(one.phases.values()) == one.end - one.start
    assert times[0].ready == {0: 160, 1: 179}
    assert times[0].last_ready == 179
    assert times[0].seconds == 1e-7
    assert times[0].compute == pytest.approx(9e-8)
    assert times[0].group_id == group_id_of("world")


@pytest.mark.parametrize(
    ("start", "end", "bucket", "phase", "waited"),
    [
        (105, 115, -1, Phase.DATA, 10),  # the loss is averaged for the log
        (120, 130, -1, Phase.FORWARD, 10),  # buffers
        (150, 155, -1, Phase.BACKWARD, 5),  # SyncBatchNorm
        (160, 163, 0, Phase.BACKWARD, 3),  # its launch waits for it
        (160, 170, 0, Phase.BACKWARD, 0),  # it runs while backward goes on
        (180, 189, 1, Phase.EXPOSED, 0),
    ],
)
@pytest.mark.parametrize("is_submitted", [True, False])
def test_waiting_is_not_a_rank_s_own_time(step, record, start, end, bucket, phase, waited, is_submitted):
    about = {"group": "world", "seq": 9, "bucket": bucket}
    more = [record(K.COLLECTIVE_FINISHED, end, duration=end - start, nbytes=8, **about)]
    if is_submitted:
        more += [record(K.COLLECTIVE_SUBMITTED, start, **about), record(K.COLLECTIVE_WAITED, start, **about)]
    [times] = step_times(numbered([*step(0, 0), *step(1, 100, *more)]))
    assert times.phases[phase] == OWN[phase] - waited
    assert times.phases[Phase.EXPOSED] == OWN[Phase.EXPOSED] + waited
    assert times.nbytes == 8


@pytest.mark.parametrize(("thread", "waited"), [(1, {Phase.FORWARD: 5}), (2, {}), (None, {})])
def test_a_collective_in_the_background_costs_what_the_rank_waits_for_it(step, record, thread, waited):
    about = {"group": "world", "seq": 9}
    more = [record(K.COLLECTIVE_SUBMITTED, 105, **about), record(K.COLLECTIVE_FINISHED, 135, duration=30, **about)]
    if thread is not None:
        more.append(record(K.COLLECTIVE_WAITED, 130, thread=thread, **about))
    [times] = step_times([*step(0, 0), *step(1, 100, *more)])
    assert {phase: OWN[phase] - time for phase, time in times.phases.items() if OWN[phase] > time} == waited


def test_parts_of_a_collective_are_not_counted_twice(step, record):
    more = [
        record(K.COLLECTIVE_FINISHED, end, duration=length, group=group, seq=1)
        for end, length, group in [(110, 4, "inside"), (114, 4, "rail"), (115, 10, "whole")]
    ]
    [times] = step_times([*step(0, 0), *step(1, 100, *more)])
    assert times.phases[Phase.DATA] == OWN[Phase.DATA] - 10


def test_any_number_of_waits_takes_little_memory(record):
    """Of a program that trains no model there is no record that ends a phase."""
    folder = StepFolder()
    for number in range(5000):
        folder.add(record(K.COLLECTIVE_FINISHED, 10 * number + 4, seq=number, duration=4))
    assert len(folder._waits) < 2000
    assert covered(folder._waits) == 5000 * 4


def test_a_step_that_failed_is_left_out_and_so_is_the_next(step, record):
    failed = [one for one in step(2, 200) if one.kind is not K.STEP_ENDED]
    failed[6] = failed[6]._replace(kind=K.STEP_FAILED)
    records = [*step(0, 0), *step(1, 100), *failed, *step(3, 300), *step(4, 400)]
    assert [one.step for one in step_times(records)] == [1, 4]


def test_two_models_that_are_trained_in_turns_are_one_step(step, record):
    records = [one for number in range(3) for half in (0, 100) for one in step(number, 200 * number + half)]
    records += [record(K.SAMPLES, at, nbytes=8) for at in (410, 510)]
    times = step_times(numbered(records))
    assert [one.step for one in times] == [0, 1, 2]
    assert [one.end - one.start for one in times] == [100, 200, 200]
    assert times[-1].phases[Phase.FORWARD] == 40
    assert times[-1].samples == 16


def test_ranks_that_share_a_ring_are_not_mixed_up(step):
    other = [one._replace(rank=1, time=one.time + 1) for one in [*step(0, 0), *step(1, 100)]]
    both = sorted([*step(0, 0), *step(1, 100), *other], key=lambda one: one.time)
    assert step_times(both) == []


def test_only_the_last_steps_are_kept(step):
    folder = StepFolder(kept=3)
    for number in range(10):
        for one in step(number, 100 * number):
            folder.add(one)
    assert [one.step for one in folder.steps] == [7, 8, 9]


def test_nothing_is_known_without_records(record):
    assert step_times([]) == []
    assert step_times([record(K.STEP_ENDED, 5, step=1)]) == []
    assert step_times([record(K.MARK, 5), record(K.GROUP, 6, group="world")]) == []


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=8))
def test_the_union_of_intervals(pairs):
    intervals = [(start, start + length) for start, length in pairs]
    random.Random(0).shuffle(intervals)
    assert covered(intervals) == len({x for start, end in intervals for x in range(start, end)})


@pytest.fixture
def torch_step(record):
    """The records of a step of torch's DDP of 100 from `at` on: 20 data, 20 forward, 50 backward and waiting, 10 optimizer."""

    def make(number, at, *more):
        records = [
            record(K.FORWARD_BEGAN, at + 20, step=number, rank=3),
            record(K.FORWARD_ENDED, at + 40, step=number, rank=3),
            record(K.OPTIMIZER_BEGAN, at + 90),
            record(K.OPTIMIZER_ENDED, at + 100),
        ]
        return sorted([*records, *more], key=lambda one: one.time)

    return make


def test_a_step_of_torch_s_ddp_ends_with_the_optimizer(torch_step):
    times = step_times([*torch_step(0, 0), *torch_step(1, 100), *torch_step(2, 200)])
    assert [(one.step, one.start, one.end, one.group_id) for one in times] == [(1, 100, 200, 0), (2, 200, 300, 0)]
    assert times[0].phases == {**OWN, Phase.BACKWARD: 50, Phase.EXPOSED: 0}
    assert times[0].backward_waits
    assert times[0].last_ready == 140


def test_with_a_hook_of_ours_the_wait_of_torch_s_ddp_is_known(torch_step, record):
    full = [record(K.BUCKET_FULL, 170, step=1, bucket=0), record(K.BUCKET_LAUNCHED, 171, step=1, bucket=0)]
    [times] = step_times([*torch_step(0, 0), *torch_step(1, 100, *full)])
    assert times.phases == {**OWN, Phase.BACKWARD: 30, Phase.EXPOSED: 20}
    assert not times.backward_waits
    assert times.last_ready == 170
