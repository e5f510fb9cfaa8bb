"""Loops compiled by numba, and the path without it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gradwire.runtime import jit


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Whether numba is available is cached per process; these tests change it."""
    jit._njit.cache_clear()
    yield
    jit._njit.cache_clear()


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
