"""What tests on a CUDA device share."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from gradwire.groups import C10dGroup, Group


@pytest.fixture
def nccl() -> Iterator[Group]:
    """A world of one over NCCL, which allows one rank per device."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    group = C10dGroup(dist.group.WORLD)
    yield group
    group.close()
    dist.destroy_process_group()
