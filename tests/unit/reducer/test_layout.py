"""Layouts are data: what hooks see of them, and descriptions that differ if parameters do."""

from dataclasses import replace

import pytest
import torch

from gradwire.hooks import BucketSpec
from gradwire.reducer import BucketLayout, ParameterSpec

CPU = torch.device("cpu")
A = ParameterSpec("a", (2, 3), (3, 1), torch.float32, CPU)
B = ParameterSpec("b", (4,), (1,), torch.float32, CPU)
C = ParameterSpec("c", (5, 2), (2, 1), torch.float64, CPU, sparse=True)


def test_the_spec_of_a_parameter() -> None:
    weight = torch.zeros(3, 2, dtype=torch.bfloat16).t()
    spec = ParameterSpec.of("layer.weight", weight, sparse=True)
    assert spec == ParameterSpec("layer.weight", (2, 3), (1, 2), torch.bfloat16, CPU, sparse=True)
    assert spec.nbytes == 12
    assert spec.describe() == "layer.weight: bfloat16[2, 3] stride [1, 2] on cpu sparse"
    assert ParameterSpec.of("scalar", torch.zeros(())).nbytes == 4


def test_buckets_are_what_hooks_see() -> None:
    first, second = BucketLayout.make([A, B, C], [[1, 0], [2]]).buckets
    assert first == BucketSpec(0, ("b", "a"), ((4,), (2, 3)), ((1,), (3, 1)), torch.float32, CPU)
    assert second == BucketSpec(1, ("c",), ((5, 2),), ((2, 1),), torch.float64, CPU, sparse=True)
    assert (first.numel, first.offsets) == (10, (0, 4))


OTHERS = {
    "name": [replace(A, name="z"), B, C],
    "shape": [replace(A, shape=(3, 2)), B, C],
    "stride": [replace(A, stride=(1, 2)), B, C],
    "dtype": [replace(A, dtype=torch.float16), B, C],
    "kind of device": [replace(A, device=torch.device("meta")), B, C],
    "sparse": [A, B, replace(C, sparse=False)],
    "order": [B, A, C],
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_the_description_shows_every_difference(other: list[ParameterSpec]) -> None:
    assert [p.describe() for p in (A, B, C)] != [p.describe() for p in other]


def test_the_number_of_a_device_may_differ_between_ranks() -> None:
    one, two = (replace(A, device=torch.device("cuda", n)) for n in (0, 1))
    assert one.describe() == two.describe()
