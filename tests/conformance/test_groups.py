"""One list per seam: every group and every wrapper around a real group passes the same suite.

Adding a group or a wrapper adds one line here, and no test.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gradwire.groups import C10dGroup, Deadline, Group, GroupWrapper, Latched, NanCheck, Recording, Verified
from gradwire.interop import as_process_group
from gradwire.testing import check_group, check_names, run_ranks

Wrap = Callable[[Group], Group]


class ThereAndBack(GroupWrapper):
    """A C10dGroup over a torch process group over the group, which it closes too."""

    def __init__(self, group: Group) -> None:
        super().__init__(C10dGroup(as_process_group(group), timeout=group.timeout))
        self.far = group

    def split(self, color: int | None, key: int | None = None) -> Group | None:
        return self.inner.split(color, key)

    def close(self, timeout: float = 5.0) -> None:
        super().close(timeout)
        self.far.close(timeout=0)


def with_deadline(group: Group) -> Group:
    return Deadline(group, seconds=50)


def all_of_them(group: Group) -> Group:
    return Recording(Latched(Verified(NanCheck(Deadline(group, seconds=50)))))


WRAPPERS: list[Wrap] = [Recording, with_deadline, NanCheck, Verified, Latched, all_of_them, ThereAndBack]


@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda w: w.__name__)
def test_wrapped_thread_group(wrap: Wrap) -> None:
    report = check_group(lambda fn: run_ranks(fn, 3, kind="threads", wrap=wrap))
    assert report.ran == check_names()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [2, 4], ids="{} processes".format)
def test_gloo(size: int) -> None:
    report = check_group(lambda fn: run_ranks(fn, size, kind="gloo"))
    assert report.ran == check_names()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("wrap", [all_of_them, ThereAndBack], ids=lambda w: w.__name__)
def test_wrapped_gloo(wrap: Wrap) -> None:
    report = check_group(lambda fn: run_ranks(fn, 2, kind="gloo", wrap=wrap))
    assert report.ran == check_names()
