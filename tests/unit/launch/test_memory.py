"""Options of shared memory: arguments of `gw.init`, or variables of the environment."""

from typing import Any

import pytest
from torch.distributed import HashStore

import gradwire as gw
from gradwire.errors import UsageError
from gradwire.groups.kinds import find_kind
from gradwire.launch.environment import shared_memory_options


@pytest.mark.parametrize(
    ("text", "room"), [("1048576", 1 << 20), ("3K", 3 << 10), ("2G", 2 << 30), ("1 TiB", 1 << 40), ("5mb", 5 << 20)]
)
def test_room_in_the_environment(text: str, room: int) -> None:
    assert shared_memory_options({"GRADWIRE_SHM_ROOM": text})["room"] == room


def test_arguments_come_before_the_environment() -> None:
    environ = {"GRADWIRE_SHM_ROOM": "2G", "GRADWIRE_SHM_DIRECTORY": "/a"}
    assert shared_memory_options(environ) == {"directory": "/a", "room": 2 << 30}
    assert shared_memory_options(environ, directory="/b", room=7) == {"directory": "/b", "room": 7}
    assert shared_memory_options({}) == {"directory": None, "room": None}


def test_a_room_that_is_no_number() -> None:
    with pytest.raises(UsageError, match="GRADWIRE_SHM_ROOM is 'much'"):
        shared_memory_options({"GRADWIRE_SHM_ROOM": "much"})


@pytest.mark.parametrize("kind", ["shared_memory", "hierarchical"])
def test_both_kinds_take_them(kind: str, tmp_path: object) -> None:
    memory = {"directory": str(tmp_path), "room": 3 << 30}
    build: Any = find_kind(kind, who="test").build
    with build(HashStore(), 0, 1, timeout=10, name="x", **memory) as group:
        inner = getattr(group, "inside", group)
        assert inner._segment.nbytes == 3 << 30
        assert inner._options["directory"] == str(tmp_path)


def test_kinds_that_share_no_memory_refuse_them() -> None:
    with pytest.raises(UsageError, match="has no shared memory"):
        gw.init(kind="gloo", room=1 << 30)
