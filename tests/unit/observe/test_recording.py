"""Starting and stopping the recorder, and what models and groups write into it."""

import errno
import gc
import os
import sys
import tracemalloc

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire import observe
from gradwire.collectives import Collective, build
from gradwire.errors import CollectiveTimeout, GroupAborted, UsageError
from gradwire.groups.ledger import Ledger
from gradwire.groups.work import Work
from gradwire.recorder import writer
from gradwire.recorder.format import RecordKind
from gradwire.testing import run_ranks
from helpers.backward_calls import fail_in_backward

K = RecordKind


def kinds(records):
    return [record.kind for record in records]


def test_only_the_owner_can_read_what_was_recorded(recorded):
    observe.mark("secret")
    assert all(path.stat().st_mode & 0o077 == 0 for path in (recorded, *recorded.iterdir()))


def test_a_second_start_in_the_same_place_changes_nothing(recorded):
    observe.mark("one")
    observe.start(recorded, rank=0, size=1)
    observe.mark("two")
    assert [record.label for record in observe.read_rings(recorded)[0].records] == ["one", "two"]


def test_a_start_in_another_place_is_refused(recorded, tmp_path):
    with pytest.raises(UsageError, match=r"observe.stop\(\)"):
        observe.start(tmp_path / "other", rank=0, size=1)


def test_after_stop_nothing_is_recorded(recorded):
    observe.stop()
    observe.mark("late")
    observe.stop()
    assert writer.active is None
    assert observe.read_rings(recorded)[0].records == []


def test_a_new_start_replaces_the_ring_of_the_run_before(recorded):
    observe.mark("old")
    observe.stop()
    observe.start(recorded, rank=0, size=1)
    observe.mark("new")
    assert [record.label for record in observe.read_rings(recorded)[0].records] == ["new"]


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 2), (2, 1)])
def test_a_rank_outside_of_the_world_is_refused(tmp_path, rank, size):
    with pytest.raises(UsageError, match=f"rank={rank}, size={size}"):
        observe.start(tmp_path, rank=rank, size=size)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_without_room_training_goes_on_with_a_warning(tmp_path, monkeypatch, code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.warns(UserWarning, match="not recorded"):
        observe.start(tmp_path / "run", rank=0, size=1)
    assert writer.active is None
    observe.mark("nothing happens")


def test_a_training_step(recorded):
    [group] = gw.ThreadGroup.world(1)
    model = nn.Linear(4, 2)
    replica = gw.replicate(model, group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    del replica
    group.close()
    records = [r for r in observe.read_rings(recorded)[0].records if r.step == 2 or r.kind >= K.OPTIMIZER_BEGAN]
    step = [r for r in records if r.step == 2]
    assert kinds(step) == [
        K.FORWARD_BEGAN,
        K.FORWARD_ENDED,
        K.BUCKET_FULL,
        K.COLLECTIVE_SUBMITTED,
        K.COLLECTIVE_STARTED,
        K.COLLECTIVE_FINISHED,
        K.BUCKET_LAUNCHED,
        K.BACKWARD_ENDED,
        K.BUCKET_REDUCED,
        K.STEP_ENDED,
    ]
    assert {r.bucket for r in step[2:7]} == {0}
    assert step[2].nbytes == step[3].nbytes == 10 * 4
    [launched] = [r for r in step if r.kind is K.BUCKET_LAUNCHED]
    assert launched.label == "mean()"
    described = observe.read_rings(recorded)[0].descriptions
    assert [(d["kind"], d["size"]) for d in described["group"]] == [("ThreadGroup", 1)]
    [bucket] = described["buckets"][-1]["buckets"]
    assert (bucket["bytes"], sorted(bucket["names"])) == (40, ["bias", "weight"])
    assert kinds(records[-2:]) == [K.OPTIMIZER_BEGAN, K.OPTIMIZER_ENDED]
    times = [r.time for r in records]
    assert times == sorted(times)


def calls_of_a_step(layers):
    """The function calls of one step, except those that depend on where the allocator has put gradients and buffers."""
    [group] = gw.ThreadGroup.world(1)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    replica = gw.replicate(model, group=group)
    counts = []

    def count(frame, event, what):
        if "Storage.copy_in" not in frame.f_code.co_qualname:  # it compares addresses
            counts[-1] += event in ("call", "c_call")

    for step in range(7):
        model.zero_grad()
        if step >= 3:
            counts.append(0)
            sys.setprofile(count)
        model(torch.ones(3, 4)).sum().backward()
        sys.setprofile(None)
    del replica
    group.close()
    return min(counts)  # in others the garbage collector, or another thread, may have called something


def test_the_cost_of_recording_does_not_grow_with_the_number_of_parameters(recorded):
    with_recorder = [calls_of_a_step(layers) for layers in (2, 20)]
    observe.stop()
    without = [calls_of_a_step(layers) for layers in (2, 20)]
    assert with_recorder[0] > without[0]
    assert with_recorder[1] - without[1] == with_recorder[0] - without[0]


def test_recording_takes_no_more_memory_with_every_step(recorded):
    [group] = gw.ThreadGroup.world(1)
    tensor = torch.ones(3)

    def run(operations):
        for _ in range(operations):
            group.all_reduce(tensor)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        first = run(1000)
        assert run(4000) - first < 40_000  # 10 bytes per operation
    finally:
        tracemalloc.stop()
        group.close()


def test_a_step_that_fails(recorded):
    [group] = gw.ThreadGroup.world(1)
    model = nn.Linear(4, 2)
    gw.replicate(model, group=group)
    with pytest.raises(ValueError, match="of the user's"):
        fail_in_backward(model(torch.ones(3, 4)), ValueError, "of the user's").sum().backward()
    group.close()
    [failed] = observe.read_rings(recorded)[0].of_kind(K.STEP_FAILED)
    assert (failed.step, failed.label) == (0, "ValueError: of the user's")


@pytest.mark.parametrize("arguments", [["x" * 5000], ["\U0001f600" * 600]])
def test_a_command_of_any_length_is_recorded(tmp_path, monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    observe.start(tmp_path, rank=0, size=1)
    observe.stop()
    assert observe.read_rings(tmp_path)[0].header["command"].startswith("train.py")


def test_without_a_file_for_stacks_the_rest_is_recorded(tmp_path):
    (tmp_path / "rank-0.stacks").mkdir()
    with pytest.warns(UserWarning, match="stacks and awaited gradients are not recorded"):
        observe.start(tmp_path, rank=0, size=1)
    observe.mark("here")
    observe.stop()
    assert len(observe.read_rings(tmp_path)[0].records) == 1


def test_a_wait_is_recorded_once_and_only_if_there_is_something_to_wait_for(recorded):
    one, two = gw.ThreadGroup.world(2)
    work = one.all_reduce(torch.ones(1), async_op=True)
    for _ in range(2):
        with pytest.raises(CollectiveTimeout):
            work.wait(0.01)
    two.all_reduce(torch.ones(1), async_op=True).wait()
    work.wait()
    one.close()
    two.close()
    waited = [r for r in observe.read_rings(recorded)[0].records if r.kind is K.COLLECTIVE_WAITED]
    assert [(r.rank, r.op, r.ordinal) for r in waited] == [(0, "all_reduce", 1)]


def test_a_mark_is_a_text_of_whatever_is_given(recorded):
    observe.mark(["epoch", 3])  # type: ignore[arg-type]
    assert observe.read_rings(recorded)[0].records[0].label == "['epoch', 3]"


def test_a_send_and_its_receive_have_the_same_number(recorded):
    def rank_main(group):
        for tag in (5, 5, 5 + 64, 5 + (1 << 20)):
            if group.rank == 0:
                group.send(torch.ones(1), 1, tag=tag)
            else:
                group.recv(torch.ones(1), 0, tag=tag)
        if group.rank == 0:
            group.recv(torch.ones(1), None, tag=1)
        else:
            group.send(torch.ones(1), 0, tag=1)

    run_ranks(rank_main, 2, kind="threads")
    records = observe.read_rings(recorded)[0].records
    found: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for record in records:
        if record.kind is K.COLLECTIVE_FINISHED:
            found.setdefault((record.op, record.rank), []).append((record.peer, record.message))
    assert [peer for peer, _ in found["send", 0]] == [1] * 4
    assert [peer for peer, _ in found["recv", 1]] == [0] * 4
    numbers = [message for _, message in found["send", 0]]
    assert numbers == [message for _, message in found["recv", 1]]
    assert len(set(numbers)) == 4
    assert found["recv", 0] == [(-1, -1)]  # from any rank
    assert all(r.ordinal == 0 for r in records if r.op in ("send", "recv"))


def test_submissions_record_where_tensors_are(recorded, monkeypatch):
    ledger = Ledger(name="group", rank=0, size=1)
    works = [
        Work(op, ledger, seq=seq, timeout=1)
        for seq, op in enumerate([build.all_reduce(torch.ones(2)), build.barrier()])
    ]
    ledger.submitted(works[0])
    ledger.submitted(works[1])
    monkeypatch.setattr(Collective, "is_on_host", property(lambda op: not op.tensors))  # as on a GPU
    ledger.submitted(works[0])
    records = observe.read_rings(recorded)[0].of_kind(K.COLLECTIVE_SUBMITTED)
    assert [(r.op, r.on_device) for r in records] == [("all_reduce", False), ("barrier", False), ("all_reduce", True)]
    ledger.fail_all(GroupAborted("", reason=""))
