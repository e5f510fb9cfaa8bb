"""Which kind of group a world gets."""

from __future__ import annotations

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from gradwire.errors import UsageError
from gradwire.launch import Launcher, World
from gradwire.launch.engines import BUILDERS, choose

ALL = ("threads", "gloo", "nccl", "shared_memory", "hierarchical")


def world(size: int, local_size: int | None) -> World:
    return World(0, size, Launcher.TORCHRUN, local_size=local_size)


@pytest.mark.parametrize(
    ("size", "local_size", "everything", "without"),
    [
        (1, 1, "threads", "threads"),
        (1, None, "threads", "threads"),
        (4, 4, "shared_memory", "gloo"),
        (4, 2, "hierarchical", "gloo"),
        (4, 1, "gloo", "gloo"),
        (4, None, "gloo", "gloo"),
    ],
)
def test_auto_takes_the_best_that_is_there(size, local_size, everything, without):
    assert choose("auto", world(size, local_size), ALL) == everything
    assert choose("auto", world(size, local_size), ("threads", "gloo", "nccl")) == without


def test_a_kind_that_is_asked_for_is_taken():
    assert choose("nccl", world(4, 4)) == "nccl"


def test_a_kind_that_is_not_there_is_an_error_with_those_that_are():
    with pytest.raises(
        UsageError,
        match=r"kind='pigeons'\): there is no such kind. Known kinds: auto, threads, shared_memory, hierarchical, gloo, nccl, mpi",
    ):
        choose("pigeons", world(4, 4))


def test_processes_are_no_threads():
    with pytest.raises(
        UsageError, match="cannot be threads of one. Choose another kind: shared_memory, hierarchical, gloo, nccl, mpi"
    ):
        BUILDERS["threads"](HashStore(), world(2, 2), timeout=1, name="x")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_nccl_without_a_device_is_a_usage_error():
    with pytest.raises(UsageError, match="there is no CUDA device here"):
        BUILDERS["nccl"](HashStore(), world(1, 1), timeout=1, name="x")
