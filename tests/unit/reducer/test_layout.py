"""Layouts are data: what hooks see of them, and a fingerprint that is equal exactly if they are."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

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


def test_the_fingerprint_tells_every_difference() -> None:
    layout = BucketLayout.make([A, B, C], [[1, 0], [2]])
    same = BucketLayout.make(iter([A, B, C]), ((1, 0), (2,)))
    others = [BucketLayout.make(parameters, [[1, 0], [2]]) for parameters in OTHERS.values()]
    others += [BucketLayout.make([A, B, C], members) for members in ([[0, 1], [2]], [[2], [1, 0]], [[1], [0], [2]])]
    assert layout == same
    assert layout.fingerprint() == same.fingerprint()
    assert len({other.fingerprint() for other in others} | {layout.fingerprint()}) == len(others) + 1


def test_the_number_of_a_device_may_differ_between_ranks() -> None:
    one, two = (replace(A, device=torch.device("cuda", n)) for n in (0, 1))
    assert BucketLayout.make([one], [[0]]).fingerprint() == BucketLayout.make([two], [[0]]).fingerprint()


names = st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=4)


@given(st.lists(names, min_size=1, max_size=4), st.lists(names, min_size=1, max_size=4))
def test_no_two_lists_of_names_look_alike(a: list[str], b: list[str]) -> None:
    one, two = (BucketLayout.make([replace(B, name=n) for n in names], [range(len(names))]) for names in (a, b))
    assert (one.fingerprint() == two.fingerprint()) == (a == b)
