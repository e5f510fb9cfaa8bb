"""Dumps for torch's own analyzer, which is asked what it makes of them."""

from __future__ import annotations

import gc
import pickle
from dataclasses import replace

import pytest
import torch
from torch.distributed.flight_recorder import fr_trace

from gradwire import observe
from gradwire.observe.rings.ring import read_rings
from gradwire.observe.trace.fr_dump import PREFIX, dumps, write_dumps
from gradwire.recorder.flight_recorder import RecordKind as K
from gradwire.testing import run_ranks
from gradwire.testing.mpi import missing
from helpers.made_rings import made_ring, mark

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
GLOO = "gloo" if TORCH >= (2, 12) else "nccl"
"""What everything is called that the analyzer does not know."""


def analyze(rings, directory):
    """The collectives that torch's analyzer finds in the dumps, which are for its version."""
    write_dumps([replace(ring, header={**ring.header, "torch": torch.__version__}) for ring in rings], directory)
    output = directory.with_suffix(".db")
    try:
        fr_trace.main([str(directory), "-o", str(output)])
    finally:
        gc.enable()  # which the analyzer disables
    _, database = pickle.loads(output.read_bytes())
    return database


def collective(number, kind, rank, seq, *, op="all_reduce", nbytes=64, time=0, **more):
    facts = {"op": op, "group": "world", "rank": rank, "seq": seq, "ordinal": seq + 1, "nbytes": nbytes}
    return mark(number, time, kind, "", **facts, **more)


def test_a_healthy_run(tmp_path):
    rings = [made_ring(rank, range(5), size=3) for rank in range(3)]
    database = analyze(rings, tmp_path / "fr")
    assert len(database.collectives) == 10
    assert all(one.pass_check and one.collective_state == "completed" for one in database.collectives)
    assert [group.size for group in database.groups] == [3]


def test_states_and_times():
    pending = [
        collective(900, K.COLLECTIVE_SUBMITTED, 0, 100, time=10**9),
        collective(901, K.COLLECTIVE_SUBMITTED, 0, 101, time=10**9),
        collective(902, K.COLLECTIVE_STARTED, 0, 101, time=10**9 + 5),
        collective(903, K.COLLECTIVE_FAILED, 0, 102, time=10**9 + 9, duration=4),
    ]
    made, left_out = dumps([made_ring(0, range(2), size=1, more=pending)])
    entries = made[0]["entries"]
    assert left_out == 0
    assert [e["state"] for e in entries] == ["completed"] * 4 + ["scheduled", "scheduled", "started"][:1] + [
        "started",
        "scheduled",
    ]
    first = entries[0]
    assert first["time_created_ns"] == 1_800_000_000 * 10**9 + 8_010_000
    assert first["duration_ms"] == pytest.approx(17 - 8.02)
    assert made[0]["pg_status"]["world"]["last_completed_collective"] == 4


@pytest.mark.parametrize("fault", ["missing", "kind", "size"])
def test_a_collective_that_is_missing_or_different(tmp_path, fault):
    op, nbytes = {"missing": ("", 0), "kind": ("broadcast", 64), "size": ("all_reduce", 128)}[fault]
    rings = [
        made_ring(rank, range(3), size=2, more=[collective(900, K.COLLECTIVE_SUBMITTED, rank, 6, time=10**9)])
        for rank in range(2)
    ]
    last = rings[1].records.pop()
    if fault != "missing":
        rings[1].records.append(last._replace(op=op, nbytes=nbytes))
    database = analyze(rings, tmp_path / "fr")
    [bad] = [one for one in database.collectives if not one.pass_check or one.missing_ranks]
    assert bad.collective_seq_id == 7
    if fault == "missing":
        assert bad.missing_ranks == {1}
    else:
        [(rank, found)] = bad.mismatch_collectives.items()
        assert rank == 1
        assert {"kind": "TYPE", "size": "SIZE"}[fault] in str(found.type_of_mismatch)


def test_ranks_that_have_recorded_different_steps_are_compared_where_they_overlap(tmp_path):
    database = analyze([made_ring(0, range(2, 8)), made_ring(1, range(4, 8))], tmp_path / "fr")
    assert [one.collective_seq_id for one in database.collectives] == list(range(9, 17))
    assert all(one.pass_check for one in database.collectives)


def test_groups_that_share_a_name_are_left_out():
    rings = [made_ring(rank, range(2)) for rank in range(2)]
    rings[1].records[:] = [r._replace(rank=0) for r in rings[1].records]
    made, left_out = dumps(rings)
    assert left_out == 8
    assert [dump["entries"] for dump in made.values()] == [[], []]


def test_a_group_that_was_made_again_counts_from_one_again(tmp_path):
    rings = [made_ring(rank, range(2)) for rank in range(2)]
    for ring in rings:
        again = mark(500, 10**9, K.GROUP, "", group="world", rank=ring.rank, nbytes=2)
        ring.records.extend([again, collective(501, K.COLLECTIVE_FINISHED, ring.rank, 0, time=2 * 10**9, duration=5)])
    database = analyze(rings, tmp_path / "fr")
    assert [one.collective_seq_id for one in database.collectives] == [1]


def test_engines_have_the_names_that_the_analyzer_knows(tmp_path):
    """Of NCCL, which has gloo for tensors on the CPU. Others are called gloo, and the description has what they are."""
    pending = [
        [collective(900 + i, K.COLLECTIVE_SUBMITTED, rank, 6 + i, time=10**9, on_device=i == 0) for i in range(2)]
        for rank in range(2)
    ]
    rings = [made_ring(rank, range(3), more=pending[rank]) for rank in range(2)]
    described = {"name": "world", "kind": "C10dGroup", "size": 2}
    for engines, expected in [
        ({"cpu": "gloo", "cuda": "nccl"}, ["nccl:all_reduce", f"{GLOO}:all_reduce"]),
        ({"cpu": "mine", "cuda": "gloo"}, [f"{GLOO}:all_reduce", f"{GLOO}:all_reduce"]),
        ({"cuda": "nccl"}, ["nccl:all_reduce", f"{GLOO}:all_reduce"]),
    ]:
        for ring in rings:
            ring.descriptions["group"] = [{**described, "rank": ring.rank}, {**described, "engines": engines}]
        database = analyze(rings, tmp_path / "fr")
        assert [one.collective_name for one in database.collectives[-2:]] == expected
        assert all(one.pass_check for one in database.collectives)
        assert [group.desc for group in database.groups] == ["world (C10dGroup)"]


needs_mpi = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.mark.parametrize("kind", ["threads", "shared_memory", "gloo", pytest.param("mpi", marks=needs_mpi)])
def test_every_operation_of_real_groups(tmp_path, kind):
    run = tmp_path / "run"

    def rank_main(group):
        if kind != "threads" or group.rank == 0:
            observe.start(run, rank=group.rank, size=group.size)
        group.barrier()
        rank, size = group.rank, group.size
        group.all_reduce(torch.ones(8))
        group.broadcast(torch.ones(8), src=1)
        group.reduce(torch.ones(8), dst=2)
        group.all_gather([torch.ones(i + 1) for i in range(size)], torch.ones(rank + 1))
        group.all_gather_into_tensor(torch.ones(2 * size), torch.ones(2))
        group.reduce_scatter_tensor(torch.ones(2), torch.ones(2 * size))
        group.all_to_all_single(torch.ones(size), torch.ones(size))
        group.gather(torch.ones(2), [torch.ones(2) for _ in range(size)] if rank == 0 else None, dst=0)
        group.scatter(torch.ones(2), [torch.ones(2) for _ in range(size)] if rank == 0 else None, src=0)
        if rank == 0:
            group.send(torch.ones(4), 2, tag=3)
        elif rank == 2:
            group.recv(torch.ones(4), 0, tag=3)
        group.barrier()
        if kind != "threads":
            observe.stop()

    try:
        run_ranks(rank_main, 3, kind=kind)
    finally:
        observe.stop()
    database = analyze(read_rings(run), tmp_path / "fr")
    assert [one for one in database.collectives if not one.pass_check or one.missing_ranks] == []
    names: dict[bool, list[str]] = {True: [], False: []}
    for one in database.collectives:
        names[one.group_id.endswith(": 0 to 2")].append(one.collective_name)
    assert names[True] == [f"{GLOO}:send 0->1"]
    ops = ["all_reduce", "broadcast", "reduce", "all_gather", "_all_gather_base", "_reduce_scatter_base", "all_to_all"]
    assert {f"{GLOO}:{op}" for op in [*ops, "gather", "scatter", "all_reduce_barrier"]} <= set(names[False])


@pytest.mark.parametrize(("version", "engine"), [("2.11.0", "nccl"), ("2.12.1+cpu", "gloo"), ("?", "gloo")])
def test_names_of_engines_are_those_that_the_analyzer_of_the_run_knows(version, engine):
    made, _ = dumps([made_ring(0, range(1), size=1, torch=version)])
    assert made[0]["entries"][0]["profiling_name"] == f"{engine}:all_reduce"


def test_old_dumps_are_replaced(tmp_path):
    (tmp_path / f"{PREFIX}7").write_bytes(b"")
    write_dumps([made_ring(0, range(2), size=1)], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{PREFIX}0"]
