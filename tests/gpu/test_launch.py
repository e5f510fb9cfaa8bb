"""gw.init(kind="nccl") on a real device."""

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from gradwire.groups.kinds import find_kind

pytestmark = pytest.mark.gpu


def test_nccl_carries_tensors_of_both_kinds_of_memory():
    group = find_kind("nccl", who="test").build(HashStore(), 0, 1, timeout=30, name="x")
    for device in ("cpu", "cuda"):
        values = torch.ones(3, device=device)
        gathered = torch.zeros(3, device=device)
        group.all_reduce(values)
        group.all_gather_into_tensor(gathered, values)
        assert gathered.tolist() == [1.0] * 3
    assert group.orders_streams(torch.device("cuda"))
    group.close()
