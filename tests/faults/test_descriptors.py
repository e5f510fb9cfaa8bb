"""A rank that has no file descriptors left cannot inspect its peers' processes; it must not take them for dead."""

from __future__ import annotations

import os
import resource
import time

import pytest
import torch

from gradwire.groups import Group
from gradwire.testing import run_ranks


def _without_descriptors(group: Group) -> tuple[float, str]:
    group.barrier()
    if group.rank != 0:
        time.sleep(2.5)  # the operation is slow, and rank 0 looks for the others
    held: list[int] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if group.rank == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 400), hard))
        try:
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
    t = torch.ones(3)
    try:
        group.all_reduce(t)
        return t[0].item(), ""
    except Exception as error:
        return 0.0, repr(error)
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        group.barrier()


@pytest.mark.parametrize("kind", ["gloo", "hierarchical", "shared_memory"])
def test_a_rank_without_descriptors_loses_nobody(kind: str) -> None:
    assert run_ranks(_without_descriptors, 2, kind=kind) == [(2.0, "")] * 2
