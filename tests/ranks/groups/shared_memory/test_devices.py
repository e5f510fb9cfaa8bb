"""A rank warns once that its gradients on a GPU are copied through the host."""

import warnings
from typing import Any

import pytest
import torch

from gradwire.groups import Group
from gradwire.groups.shared_memory import group as module


@pytest.mark.parametrize(
    ("size", "devices", "times"), [(2, ["cpu", "cuda:1", "cuda"], 1), (2, ["meta"], 0), (1, ["cuda"], 0)]
)
def test_one_warning_where_buckets_are_copied(
    world: Any, monkeypatch: pytest.MonkeyPatch, size: int, devices: list[str], times: int
) -> None:
    """Without a GPU: what would allocate on it is replaced."""
    group = world(size)[0]
    monkeypatch.setattr(module, "_WARNED", set())
    monkeypatch.setattr(Group, "allocate", lambda self, numel, **_: torch.empty(numel))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for device in devices:
            group.allocate(4, device=device)
    texts = [str(warning.message) for warning in seen]
    assert len(texts) == times
    for text in texts:
        assert text.startswith("gradients on cuda:1 are copied to the host")
        assert "the 2 ranks" in text
        assert "GPU of its own, and gw.init() takes NCCL" in text
