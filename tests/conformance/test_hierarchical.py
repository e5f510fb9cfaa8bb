"""HierarchicalGroup on every kind of layout passes the suite that every group passes.

With threads for both parts, so that many layouts can be tried in little time, and without a store. `test_groups.py` has shared
memory and gloo, on hosts that are not alike.
"""

from collections.abc import Callable

import pytest

from gradwire.groups import Group, HierarchicalGroup, Recording, Verified
from gradwire.groups.hierarchical import Layout
from gradwire.testing import check_group, check_names, run_ranks


def by(layout: Layout, wrap: Callable[[Group], Group] = lambda group: group) -> Callable[[Group], Group]:
    """Makes a two-level group of parts that `wrap` has wrapped."""

    def make(world: Group) -> Group:
        host, index = layout.place(world.rank)
        inside = world.split(host, index)
        across = world.split(index if index < layout.width else None, host)
        assert inside is not None
        if len(layout.hosts) == 1 and across is not None:
            across.close()
            across = None
        rail = None if across is None else wrap(across)
        return HierarchicalGroup(wrap(inside), rail, messages=wrap(world), rank=world.rank)

    return make


LAYOUTS = {
    "3 + 2": Layout(((4, 1, 0), (3, 2))),
    "3 + 1": Layout(((0, 2, 3), (1,))),
    "leaders": Layout(((0, 1), (2, 3)), rails=1),
    "one each": Layout(((1,), (0,), (2,))),
    "one host": Layout(((2, 0, 1),)),
    "2 + 2 + 2": Layout(((0, 3), (1, 4), (2, 5))),
}
"""One for each trait: hosts that are not alike, in an order of their own; one rail; hosts of one rank; one host; three hosts, whose
ranks are interleaved."""


LARGER = (
    "many_in_flight",
    "large",
    "aliasing",
    "layouts",
    "dtypes_without_arithmetic",
    "channels_last",
    "gaps",
    "leaves",
)
LISTS = ("inference_tensors", "reduce_scatter", "all_gather", "all_to_all")
NAMES = check_names()[: check_names().index("split")]
ONE_EACH = tuple(name for name in NAMES if name not in (*LARGER, *LISTS))
"""The checks that depend on who is where: what reduces, moves and sends, one operation at a time, on little memory, not on lists:
three hosts take the steps of two, and hosts of one rank, or one host, those of one part."""
LEADERS = tuple(name for name in NAMES if name in ("aliasing", *ONE_EACH))

SUBGROUPS = tuple(name for name in check_names() if name.startswith("split"))


@pytest.mark.parametrize(
    ("name", "names"), [("leaders", LEADERS), ("one each", ONE_EACH), ("one host", ONE_EACH), ("2 + 2 + 2", ONE_EACH)]
)
def test_data_on_every_layout(name: str, names: tuple[str, ...]) -> None:
    layout = LAYOUTS[name]
    report = check_group(lambda fn: run_ranks(fn, layout.size, kind="threads", wrap=by(layout)), only=names)
    assert report.ran == names


def test_everything_without_a_store() -> None:
    layout = LAYOUTS["3 + 2"]
    report = check_group(lambda fn: run_ranks(fn, layout.size, kind="threads", wrap=by(layout)))
    assert report.ran == check_names()


@pytest.mark.parametrize("wrap", [Recording, Verified], ids=lambda wrap: wrap.__name__)
def test_sub_groups_of_wrapped_parts(wrap: Callable[[Group], Group]) -> None:
    layout = LAYOUTS["3 + 1"]
    report = check_group(lambda fn: run_ranks(fn, layout.size, kind="threads", wrap=by(layout, wrap)), only=SUBGROUPS)
    assert report.ran == SUBGROUPS
