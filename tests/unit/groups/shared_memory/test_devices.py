"""A rank warns once that its gradients on a GPU are copied through the host."""

from __future__ import annotations

import warnings

import pytest
import torch

from gradwire.groups import Group, SharedMemoryGroup
from gradwire.groups.shared_memory import segment
from gradwire.testing import run_ranks


@pytest.fixture(autouse=True)
def _not_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "_WARNED_OF_COPIES", [])


def test_one_warning_says_what_to_do() -> None:
    with pytest.warns(RuntimeWarning, match=r"cuda:1 are copied to the host.*the 2 ranks.*GPU of its own.*NCCL"):
        segment.warn_of_copies(torch.device("cuda:1"), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        segment.warn_of_copies(torch.device("cuda:1"), 2)


@pytest.mark.parametrize(("device", "size"), [("cpu", 2), ("meta", 2), ("cuda", 1)])
def test_no_warning_where_nothing_is_copied(device: str, size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        segment.warn_of_copies(torch.device(device), size)
    assert not segment._WARNED_OF_COPIES


def test_asked_when_a_bucket_is_allocated() -> None:
    """Without a GPU: what would allocate on it is replaced."""

    def rank_main(group: Group) -> list[str]:
        assert isinstance(group, SharedMemoryGroup)
        ordinary, warned = Group.allocate, list(segment._WARNED_OF_COPIES)
        Group.allocate = lambda self, numel, **_: torch.empty(numel)  # type: ignore[method-assign, assignment, misc]
        segment._WARNED_OF_COPIES.clear()
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                group.allocate(4)
                group.allocate(4, device="cuda")
                group.allocate(4, device=torch.device("cuda"))
        finally:
            Group.allocate = ordinary  # type: ignore[method-assign]
            segment._WARNED_OF_COPIES[:] = warned
        return [str(warning.message) for warning in told]

    for told in run_ranks(rank_main, 2, kind="shared_memory"):
        assert len(told) == 1
        assert "are copied to the host" in told[0]
