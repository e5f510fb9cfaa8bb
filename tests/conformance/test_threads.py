"""Ranks as threads pass the suite that every group passes."""

import pytest

from gradwire.testing import run_ranks
from gradwire.testing.conformance import check_group, check_names


@pytest.mark.parametrize("size", [1, 5], ids="{} ranks".format)
def test_thread_group(size: int) -> None:
    report = check_group(lambda fn: run_ranks(fn, size, kind="threads"))
    assert report.size == size
    assert set(report.ran) | set(report.skipped) == set(check_names())
    if size > 1:
        assert report.ran == check_names()
