"""What a rank of `gradwire run` finds in its environment."""

from __future__ import annotations

import pytest

from gradwire.launch import Address, Launcher, find_world
from gradwire.launch.environment import LocalWorld, rank_environment

STORE = Address("127.0.0.1", 4000)
PRIVATE = "123:4:5:678"


def environment(base=None, extra=None, *, rank=1, size=4, cpus=10):
    return rank_environment(base or {}, extra or {}, rank, LocalWorld(size, PRIVATE, STORE, cpus))


def test_a_rank_finds_its_world():
    world = find_world(environment())
    assert (world.rank, world.size, world.launcher) == (1, 4, Launcher.GRADWIRE)
    assert (world.private, world.store) == (PRIVATE, None)


def test_scripts_written_for_torchrun_find_theirs():
    ours = environment()
    world = find_world({name: value for name, value in ours.items() if not name.startswith("GRADWIRE_")})
    assert (world.rank, world.size, world.launcher, world.store) == (1, 4, Launcher.TORCHRUN, STORE)
    assert (world.local_rank, world.local_size, world.hosted) == (1, 4, True)


def test_a_launcher_around_us_is_forgotten():
    outer = {"RANK": "7", "WORLD_SIZE": "9", "TORCHELASTIC_RUN_ID": "outer", "GROUP_RANK": "3", "HOME": "/home"}
    inner = environment(outer)
    assert (inner["RANK"], inner["WORLD_SIZE"], inner["HOME"]) == ("1", "4", "/home")
    assert not {"TORCHELASTIC_RUN_ID", "GROUP_RANK"} & inner.keys()


@pytest.mark.parametrize(("cpus", "size", "threads"), [(10, 4, "2"), (2, 4, "1"), (1, 1, "1")])
def test_ranks_share_the_cores(cpus, size, threads):
    assert environment(cpus=cpus, size=size, rank=0)["OMP_NUM_THREADS"] == threads


def test_what_the_user_says_counts():
    base = {"OMP_NUM_THREADS": "7", "PYTHONUNBUFFERED": ""}
    ours = environment(base, {"PYTHONFAULTHANDLER": "0", "MASTER_ADDR": "mine"})
    assert (ours["OMP_NUM_THREADS"], ours["PYTHONUNBUFFERED"]) == ("7", "")
    assert (ours["PYTHONFAULTHANDLER"], ours["MASTER_ADDR"]) == ("0", "mine")
    assert environment({"A": "1"}, {"A": "2"})["A"] == "2"
