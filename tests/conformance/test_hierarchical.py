"""HierarchicalGroup on every kind of layout passes the suite that every group passes.

With threads for both parts, so that many layouts can be tried in little time, and without a store; and with shared memory and
gloo on hosts that are not alike. `test_groups.py` has two ranks on each of two hosts.
"""

from collections.abc import Callable, Sequence

import pytest
from torch.distributed import PrefixStore

from gradwire.groups import C10dGroup, Group, GroupWrapper, HierarchicalGroup, Recording, Verified
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
ranks are interleaved. `test_groups.py` has "2 + 2"."""


MEMORY = ("layouts", "dtypes_without_arithmetic", "channels_last", "gaps", "leaves", "inference_tensors")
"""`lower` makes plain tensors of what these pass, before it matters who is where. "2 + 2" runs them."""
NAMES = tuple(name for name in check_names() if name not in MEMORY)

DATA = NAMES[: NAMES.index("split")]
"""The checks that depend on who is where: what reduces, moves and sends."""
ONE_EACH = tuple(name for name in DATA if name not in ("many_in_flight", "large", "aliasing"))
"""Those of one operation at a time, on little memory: three hosts take the steps of two, and hosts of one rank, or one host, those
of one part."""
LEADERS = tuple(name for name in DATA if name in ("aliasing", *ONE_EACH))

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
    report = check_group(lambda fn: run_ranks(fn, layout.size, kind="threads", wrap=by(layout)), only=NAMES)
    assert report.ran == NAMES


class Discovered(GroupWrapper):
    """A HierarchicalGroup that is found over a gloo group's store, in hosts of its own making; closes that group too."""

    def __init__(self, world: C10dGroup, hosts: Sequence[str]) -> None:
        store = PrefixStore("discovered", world._store)
        super().__init__(
            HierarchicalGroup.discover(store, world.rank, world.size, timeout=world.timeout, host=hosts[world.rank])
        )
        self.world = world

    def split(self, color: int | None, key: int | None = None) -> Group | None:
        return self.inner.split(color, key)

    def close(self, timeout: float = 5.0) -> None:
        super().close(timeout)
        self.world.close(timeout=0)


def test_shared_memory_and_gloo() -> None:
    """On hosts of two ranks and of one, whose ranks are interleaved."""
    report = check_group(lambda fn: run_ranks(fn, 3, kind="gloo", wrap=lambda g: Discovered(g, "aba")), only=ONE_EACH)
    assert report.ran == ONE_EACH


@pytest.mark.parametrize("wrap", [Recording, Verified], ids=lambda wrap: wrap.__name__)
def test_sub_groups_of_wrapped_parts(wrap: Callable[[Group], Group]) -> None:
    layout = LAYOUTS["3 + 1"]
    report = check_group(lambda fn: run_ranks(fn, layout.size, kind="threads", wrap=by(layout, wrap)), only=SUBGROUPS)
    assert report.ran == SUBGROUPS
