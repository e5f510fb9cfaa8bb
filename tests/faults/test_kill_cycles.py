"""Many times: make a group, kill ranks at a random moment, look. Nothing stays behind and nobody hangs."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradwire.groups.shared_memory.segment import default_directory
from helpers.warm_python import WarmPython


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[str]:
    """A tmpfs of our own where that may be made: then every byte in it is ours. Else the one that all use."""
    place = tmp_path / "tmpfs"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512m", "tmpfs", str(place)]
    if os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0:
        yield str(place)
        subprocess.run(["umount", "-l", str(place)], check=True)
    else:
        yield default_directory()


@pytest.mark.parametrize("cycles", [20, pytest.param(100, marks=pytest.mark.acceptance)])
def test_nothing_stays_and_nobody_hangs(directory: str, warm_python: WarmPython, cycles: int) -> None:
    program = Path(__file__).with_name("kill_cycles.py")
    done = warm_python.run_file(program, directory, str(cycles), "1", timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["problems"] == []
    assert report["cycles"] == cycles
    ends = report["ends"]
    assert ends["killed"] >= cycles
    assert ends["death"] >= cycles / 20, ends  # some were killed at work
    assert ends.get("late", 0) <= ends["death"] / 2, ends  # a loaded machine may delay some, not most
    if directory != default_directory():
        assert report["left"] == 0


CUT_SHORT = """
import struct, sys, time
from datetime import timedelta
from torch.distributed import FileStore, PrefixStore
from gradwire.errors import CollectiveTimeout
from gradwire.groups import SharedMemoryGroup
from gradwire.groups.failure import membership

path, wrapped = sys.argv[1], sys.argv[2] == "wrapped"
store = FileStore(path, 2)
store.set("whole", "record")
membership._STORE_PATIENCE = timedelta(seconds=0.3)
rank_0 = membership.Membership.over(store, 0, 2)
with open(path, "ab") as file:
    file.write(struct.pack("Q", 100) + b"died here")
began = time.perf_counter()
rank_0.refresh()
assert rank_0.store_lost
rank_0.refresh()
rank_0.leave("well")
try:
    SharedMemoryGroup(PrefixStore("p", store) if wrapped else store, 0, 2, timeout=0.3)
except CollectiveTimeout as error:
    print(error)
assert time.perf_counter() - began < 40
"""


@pytest.mark.parametrize("how", ["plain", "wrapped"])
def test_a_rank_that_dies_while_it_writes_to_the_store_hangs_nobody(
    tmp_path: Path, how: str, warm_python: WarmPython
) -> None:
    done = warm_python.run(CUT_SHORT, str(tmp_path / "store"), how, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "the rendezvous store has not answered" in done.stdout
    assert "within 0.3 s" in done.stdout


PROGRAM = Path(__file__).with_name("kill_meetings.py")
REPEAT = os.environ.get("KILL_MEETINGS_REPEAT", "1")


@pytest.mark.usefixtures("whole_exit")
@pytest.mark.parametrize("ranks", [3, pytest.param(8, marks=pytest.mark.acceptance)])
@pytest.mark.parametrize("kind", ["gloo", "split", "hierarchical", "shared_memory"])
def test_all_survivors_name_the_rank(kind: str, ranks: int, warm_python: WarmPython) -> None:
    """On two hosts, of which one has more ranks, or both have several."""
    options = ("--slack", "30", "--ranks", str(ranks))  # a loaded machine breaks no limit
    done = warm_python.run_file(PROGRAM, "--repeat", REPEAT, "--only", kind, *options, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["problems"] == []
    assert sum(report["errors"].values()) == (ranks - 1) * report["meetings"] > 0
