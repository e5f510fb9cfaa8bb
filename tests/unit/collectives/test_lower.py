"""What a plain tensor's bytes are. How collectives are composed is covered by the conformance suite."""

from __future__ import annotations

import pytest
import torch

from gradwire.collectives.aliasing import is_plain
from gradwire.collectives.lower import as_bytes


@pytest.mark.parametrize("numel", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.complex64])
def test_bytes_of_a_row(numel: int, dtype: torch.dtype) -> None:
    t = torch.arange(numel + 2).to(dtype)[2:]
    found = as_bytes(t)
    assert found.numel() == t.nbytes
    assert torch.equal(found.clone().view(dtype), t)
    if numel:
        assert found.data_ptr() == t.data_ptr()


@pytest.mark.parametrize("numel", [0, 1])
def test_none_or_one_element_with_a_stride_is_plain_and_has_bytes(numel: int) -> None:
    t = torch.ones(numel, 2, dtype=torch.complex64)[:, 0]
    assert t.stride() == (2,)
    assert is_plain(t)
    assert torch.equal(as_bytes(t).clone().view(torch.complex64), t)
