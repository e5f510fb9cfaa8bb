"""HierarchicalGroup on every kind of layout passes the suite that every group passes.

With threads for both parts, so that many layouts can be tried in little time, and without a store; `test_groups.py` has shared
memory and gloo, two ranks on each of two hosts.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gradwire.groups import Group, HierarchicalGroup
from gradwire.groups.hierarchical import Layout
from gradwire.testing import check_group, check_names, run_ranks


def by(layout: Layout) -> Callable[[Group], Group]:
    def make(world: Group) -> Group:
        host, index = layout.place(world.rank)
        inside = world.split(host, index)
        across = world.split(index if index < layout.width else None, host)
        assert inside is not None
        if len(layout.hosts) == 1 and across is not None:
            across.close()
            across = None
        return HierarchicalGroup(inside, across, messages=world, rank=world.rank)

    return make


LAYOUTS = {
    "2 + 2": Layout(((0, 1), (2, 3))),
    "interleaved": Layout(((0, 2), (3, 1))),
    "3 + 1": Layout(((0, 2, 3), (1,))),
    "1 + 3": Layout(((3,), (0, 1, 2))),
    "3 + 2": Layout(((4, 1, 0), (3, 2))),
    "leaders": Layout(((0, 1), (2, 3)), lanes=1),
    "one each": Layout(((1,), (0,), (2,))),
    "one host": Layout(((2, 0, 1),)),
    "2 + 2 + 2": Layout(((0, 3), (1, 4), (2, 5))),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout(layout: Layout) -> None:
    report = check_group(lambda fn: run_ranks(fn, layout.size, kind="threads", wrap=by(layout)))
    assert report.ran == check_names()
