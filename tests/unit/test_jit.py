"""The runtime: compiled functions and private files."""

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradwire.runtime import jit
from gradwire.runtime.private_file import read_private, write_private
from helpers.waiting import wait_until


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Whether numba is available is cached per process; these tests change it."""
    jit._njit.cache_clear()
    yield
    jit._njit.cache_clear()


def test_one_compiles_and_the_others_wait_until_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_PATIENCE", 60.0)
    refused, lock, together, order = set[int](), jit._lock, threading.Barrier(3), list[str]()

    def locks(file: Any, kind: int) -> bool:
        if not (locked := lock(file, kind)):
            refused.add(threading.get_ident())
        return locked

    def other() -> None:
        with jit.compiled_once():
            order.append("other")
            together.wait(60.0)

    threads = [threading.Thread(target=other) for _ in range(2)]
    with jit.compiled_once():
        monkeypatch.setattr(jit, "_lock", locks)
        for thread in threads:
            thread.start()
        wait_until(lambda: len(refused) == 2, "both others wait")
        order.append("first")
    together.wait(60.0)
    for thread in threads:
        thread.join(60.0)
    assert order == ["first", "other", "other"]


def test_who_compiles_forever_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_PATIENCE", 0.01)
    with jit.compiled_once(), jit.compiled_once():
        pass


def twice(x: Any) -> None:
    """Double every element."""
    for i in range(x.shape[0]):
        x[i] = x[i] + x[i]


def test_a_loop_runs_compiled_and_in_place() -> None:
    pytest.importorskip("numba")
    loop = jit.loop(twice)
    fast = loop.compiled()
    assert fast is not None
    assert loop.compiled() is fast
    assert loop.__doc__ == twice.__doc__
    for dtype in (np.float32, np.float64, np.int32):
        x = np.arange(7, dtype=dtype)
        fast(x)
        assert x.tolist() == [0, 2, 4, 6, 8, 10, 12]


def test_without_numba_there_is_no_compiled_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    assert jit.loop(twice).compiled() is None


def test_numba_told_not_to_compile_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(numba.config, "DISABLE_JIT", True)
    assert jit.loop(twice).compiled() is None


def test_a_loop_is_compiled_where_no_folder_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    numba = pytest.importorskip("numba")
    options: list[dict[str, Any]] = []

    def njit(function: Any, **given: Any) -> Any:
        options.append(given)
        if given.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return numba.core.decorators.jit(function, nopython=True, **given)

    monkeypatch.setattr(numba, "njit", njit)
    fast = jit.loop(twice).compiled()
    assert fast is not None
    x = np.ones(2)
    fast(x)
    assert x.tolist() == [2, 2]
    assert [o.get("cache", False) for o in options] == [True, False]


def test_the_compiler_has_a_name_and_a_version_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    numba = pytest.importorskip("numba")
    assert jit.compiler() == f"numba {numba.__version__}"
    jit._njit.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    assert jit.compiler() is None


def test_a_file_is_private_whole_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for data in (b"one", b"two" * 100_000):
        write_private(path, data)
        assert read_private(path) == data
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["x.json"]
    assert read_private(path, limit=3) == b"two"


def test_a_planted_link_is_replaced_and_not_read(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "x.json"
    victim.write_bytes(b"precious")
    path.symlink_to(victim)
    with pytest.raises(OSError):
        read_private(path)
    write_private(path, b"ours")
    assert (victim.read_bytes(), read_private(path), path.is_symlink()) == (b"precious", b"ours", False)


def test_directories_and_files_of_other_users_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_private(tmp_path / "x.json", b"ours")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="another user"):
        write_private(tmp_path / "y.json", b"")
    with pytest.raises(PermissionError, match="not a regular file of this user"):
        read_private(tmp_path / "x.json")
    assert os.listdir(tmp_path) == ["x.json"]


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.json")
    with pytest.raises(PermissionError):
        read_private(tmp_path / "x.json")
