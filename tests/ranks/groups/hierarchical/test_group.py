"""`HierarchicalGroup` between processes on two nominal hosts."""

from typing import Any

import pytest
import torch

from gradwire.collectives import build
from gradwire.errors import CollectiveTimeout, GroupAborted, GroupError
from gradwire.groups import Group, HierarchicalGroup
from gradwire.testing import run_ranks


def test_memory_is_the_hosts_own() -> None:
    def in_heap(group: HierarchicalGroup) -> tuple[bool, Any]:
        return group.inside.in_heap(group.allocate(1000)), group.layout.hosts  # type: ignore[attr-defined]

    assert run_ranks(in_heap, 4, kind="hierarchical") == [(True, ((0, 1), (2, 3)))] * 4


def test_one_host_needs_no_engine_between_hosts() -> None:
    def parts(group: HierarchicalGroup) -> tuple[bool, bool]:
        return group.across is None, group.messages is group.inside

    assert run_ranks(parts, 1, kind="hierarchical") == [(True, True)]


def test_an_abort_reaches_ranks_that_share_no_part() -> None:
    def abort(group: Group) -> tuple[str, str]:
        group.barrier()
        if group.rank == 0:
            group.abort("enough")
        try:
            group.submit(build.all_reduce(torch.ones(5000), label="last").within(20)).wait()
        except GroupError as error:
            return type(error).__name__, str(error)
        return "finished", ""

    for kind, text in run_ranks(abort, 4, kind="hierarchical"):
        assert kind == "GroupAborted"
        assert "enough" in text


def test_check_peers_raises_after_an_abort() -> None:
    def look(group: Group) -> str:
        side = group.split(0)
        assert side is not None
        group.check_peers()
        side.barrier()
        if group.rank == 3:
            group.abort("look here")
        side.barrier()
        try:
            group.check_peers()
        except GroupAborted as error:
            return error.reason
        finally:
            side.close()
        return "nothing"

    assert all("look here" in reason for reason in run_ranks(look, 4, kind="hierarchical"))


@pytest.mark.parametrize("failure", ["abort", "time-out"])
def test_it_recovers_together_with_its_parts(failure: str) -> None:
    def fall_and_rise(group: Group) -> tuple[str, list[float]]:
        side = group.split(0)
        assert side is not None
        group.all_reduce(torch.ones(1))
        fell = ""
        try:
            if failure == "abort" and group.rank == 1:
                group.abort("a bad step")
            if failure == "abort" or group.rank != 1:
                group.submit(build.all_reduce(torch.ones(5000)).within(60.0 if failure == "abort" else 1.0)).wait()
        except GroupError as error:
            fell = type(error).__name__
        side.barrier()
        side.close()
        group.recover(60)
        results = []
        for n in (1, 5000):
            t = torch.full((n,), float(group.rank))
            group.all_reduce(t)
            results.append(t[-1].item())
        return fell, results

    outcome = run_ranks(fall_and_rise, 4, kind="hierarchical")
    assert [results for _, results in outcome] == [[6.0, 6.0]] * 4
    want = "GroupAborted" if failure == "abort" else "CollectiveTimeout"
    assert [fell for fell, _ in outcome] == [want if failure == "abort" or rank != 1 else "" for rank in range(4)]


def test_a_time_out_names_the_rank_on_the_other_host() -> None:
    def wait(group: Group) -> tuple[Any, Any, str]:
        side = group.split(0)
        assert side is not None
        group.barrier()
        outcome: tuple[Any, Any, str] = (None, None, "")
        if group.rank != 3:
            try:
                group.submit(build.all_reduce(torch.ones(3), label="patience").within(1.0)).wait()
            except CollectiveTimeout as error:
                outcome = error.joined, error.missing, str(error)
        side.barrier()
        side.close()
        return outcome

    for joined, missing, text in run_ranks(wait, 4, kind="hierarchical")[:3]:
        assert (joined, missing) == ((0, 1, 2), (3,))
        assert "patience" in text
