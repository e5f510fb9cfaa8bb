"""The digest of a tensor's bits: equal exactly for equal bits, whatever their layout."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from gradwire.errors import UsageError
from gradwire.parallel import divergence as module
from gradwire.parallel.divergence import digest, digests

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.float8_e4m3fn,
]
WORD = 2**64


def of_bytes(data: bytes) -> int:
    """The digest as the note defines it, in Python's integers."""

    def mix(z: int) -> int:
        for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            z = (z ^ (z >> bits)) * factor % WORD
        return z

    golden = 0x9E3779B97F4A7C15
    words = [int.from_bytes(data[i : i + 8].ljust(8, b"\0"), "little") for i in range(0, len(data), 8)]
    total = mix(golden * (len(data) + 1) % WORD) + sum(
        mix((word + place * golden) % WORD) for place, word in enumerate(words, 1)
    )
    return total % WORD


def bits(t: Tensor) -> Tensor:
    return t.view(-1).view(torch.uint8)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits, NaN and infinity among them."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def value(t: Tensor) -> int:
    return int(digest(t)) % WORD


TENSORS = st.tuples(
    st.lists(st.integers(0, 5), max_size=4).map(tuple), st.sampled_from(DTYPES), st.integers(0, 2**31)
).map(lambda drawn: random_bits(*drawn))


@settings(max_examples=60)
@given(t=TENSORS, chunk=st.integers(1, 9))
def test_it_is_that_of_the_bytes(t: Tensor, chunk: int) -> None:
    before, module._CPU_CHUNK = module._CPU_CHUNK, chunk
    try:
        assert value(t) == of_bytes(bytes(bits(t).tolist()))
    finally:
        module._CPU_CHUNK = before


@settings(max_examples=60)
@given(t=TENSORS.filter(lambda t: t.numel() > 0), data=st.data())
def test_every_flipped_bit_is_seen(t: Tensor, data: st.DataObject) -> None:
    before = value(t)
    place, bit = data.draw(st.integers(0, t.numel() * t.dtype.itemsize - 1)), data.draw(st.integers(0, 7))
    bits(t)[place] ^= 1 << bit
    assert value(t) != before
    bits(t)[place] ^= 1 << bit
    assert value(t) == before


def test_flips_of_the_same_bit_do_not_cancel() -> None:
    """In a sum of products they would: two sign bits are twice the highest bit."""
    t = torch.ones(1000)
    seen = {value(t)}
    for i in range(0, 1000, 7):
        for j in (1, 2, 3, 501):
            flipped = t.clone()
            flipped[[i, (i + j) % 1000]] = -1.0
            seen.add(value(flipped))
    assert len(seen) == 1 + len(range(0, 1000, 7)) * 4


def test_the_layout_does_not_matter_and_the_order_does() -> None:
    t = torch.randn(6, 5)
    assert value(t.T.contiguous().T) == value(t)
    assert value(t.T) != value(t)
    row = torch.randn(9)
    assert value(row[1:]) == value(row[1:].clone())  # not aligned to 8 bytes
    assert value(torch.randn(4, 4, dtype=torch.complex64).conj()) != 0
    z = torch.randn(4, dtype=torch.complex64)
    assert value(z.conj()) == value(z.conj_physical())
    assert value(nn_parameter := torch.nn.Parameter(row)) == value(row), nn_parameter


def test_lengths_differ_in_the_digest() -> None:
    zeros = [torch.zeros(n, dtype=torch.uint8) for n in range(20)]
    assert len({value(t) for t in zeros}) == 20


def test_nan_is_compared_by_its_bits() -> None:
    one, other = (
        torch.tensor([pattern], dtype=torch.int32).view(torch.float32) for pattern in (0x7FC00000, 0x7FC00001)
    )
    assert value(one) == value(one.clone())
    assert value(one) != value(other)
    assert value(torch.tensor(0.0)) != value(torch.tensor(-0.0))


def test_several() -> None:
    tensors = [torch.tensor(1.0), torch.zeros(0), torch.ones(2, 2, dtype=torch.bfloat16)]
    assert digests(tensors, torch.device("cpu")).tolist() == [int(digest(t)) for t in tensors]
    assert digests([], torch.device("cpu")).tolist() == []


@pytest.mark.parametrize("t", [torch.zeros(2, 2).to_sparse(), torch.zeros(2, device="meta")], ids=["sparse", "meta"])
def test_what_has_no_bytes_is_refused(t: Tensor) -> None:
    with pytest.raises(UsageError, match="no bytes"):
        digest(t)
