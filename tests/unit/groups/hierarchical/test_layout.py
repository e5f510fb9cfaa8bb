"""Who is where, and which groups fit together."""

from typing import Any

import pytest

from gradwire.errors import UsageError
from gradwire.groups.hierarchical.discovery import Column, HostReport, Layout, from_reports


def test_lanes_cover_every_rank_once() -> None:
    layout = Layout(((0, 1, 2, 3, 4), (7, 6), (5, 8, 9)))
    assert layout.width == 2
    for host, ranks in enumerate(layout.hosts):
        assert sorted(layout.rail(host, 0) + layout.rail(host, 1)) == sorted(ranks)
        assert [layout.rail(host, i)[0] for i in range(2)] == list(ranks[:2])
    assert not layout.even
    assert Layout(((0, 1), (2, 3))).even


@pytest.mark.parametrize("hosts", [(), ((),), ((0, 1), ()), ((0, 2),), ((0, 1), (1,)), ((-1, 0),)])
def test_a_layout_has_every_rank_once(hosts: Any) -> None:
    with pytest.raises(UsageError, match="each of the ranks from 0 up must be on one host"):
        Layout(hosts)


@pytest.mark.parametrize("rails", [0, 2])
def test_rails_are_no_more_than_the_smallest_host_has(rails: int) -> None:
    with pytest.raises(UsageError, match="the smallest host has 1 ranks. Choose from 1 to 1"):
        Layout(((0, 1), (2,)), rails=rails)


def test_a_rank_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="rank 4 of Layout.*there is no such rank. Ranks count from 0 to 1"):
        Layout(((0, 1),)).place(4)


def test_sub_groups_keep_to_their_hosts() -> None:
    layout = Layout(((0, 2, 4), (1, 3, 5)))
    assert layout.within([5, 4, 3, 0]).hosts == ((0, 2), (1, 3))
    assert layout.within([3, 1]).hosts == ((0, 1),)


# -- reports -----------------------------------------------------------------------------------------------------------------


def _host(number: int, carries: str, *, of: int = 2, ranks: list[int] | None = None) -> list[HostReport]:
    """A host's reports; `carries` has a letter per rank, "c" for a carrier."""
    return [
        HostReport(c == "c", number if c == "c" else 0, of if c == "c" else 1, None if ranks is None else ranks[i])
        for i, c in enumerate(carries)
    ]


def _columns(*hosts: list[HostReport]) -> list[Column | None]:
    """The reports that carriers of the first host have received when nothing failed."""
    return [[(i, host) for host in hosts] if report.carries else None for i, report in enumerate(hosts[0])]


def test_ranks_are_numbered_host_by_host_unless_they_say_otherwise() -> None:
    one, two = _host(0, "cc."), _host(1, "cc")
    assert from_reports(one, _columns(one, two)) == Layout(((0, 1, 2), (3, 4)), rails=2)
    one, two = _host(0, "c.", ranks=[3, 0]), _host(1, "c.", ranks=[1, 2])
    assert from_reports(one, _columns(one, two)) == Layout(((3, 0), (1, 2)), rails=1)


def test_no_lane_is_one_host() -> None:
    assert from_reports(_host(0, "..."), [None] * 3).hosts == ((0, 1, 2),)


@pytest.mark.parametrize(
    ("hosts", "problem"),
    [
        ([_host(0, ".c"), _host(1, "c.")], "with an `across` are not the first"),
        ([_host(0, "cc"), _host(1, "c.")], r"hosts have \[2, 1\] ranks with an `across`"),
        ([_host(0, "cc", ranks=[0, 1]), _host(1, "cc")], "some ranks were given their number, some not"),
        ([_host(0, "cc", ranks=[0, 1]), _host(1, "cc", ranks=[1, 2])], "each of the ranks from 0 up"),
        (
            [[HostReport(True, 0, 2, None), HostReport(True, 1, 2, None)], _host(1, "cc")],
            "different ranks in their `across`",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hosts_that_do_not_fit(hosts: list[list[HostReport]], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        from_reports(hosts[0], [[(0, host) for host in hosts]])


def test_rails_that_do_not_fit() -> None:
    one, two = _host(0, "cc"), _host(1, "cc")
    with pytest.raises(
        UsageError, match=r"joins ranks whose places in their hosts are \[\[0, 1\], \[1, 0\]\].* join the ranks"
    ):
        from_reports(one, [[(0, one), (1, two)], [(1, one), (0, two)]])
    with pytest.raises(UsageError, match="do not have the same hosts in the same order"):
        from_reports(one, [[(0, one), (0, two)], [(1, one), (1, _host(1, "cc."))]])
