"""Bucket memory: gradients come in, the result is put, views stay views."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.groups import Group, GroupWrapper, ThreadGroup
from gradwire.hooks import BucketSpec
from gradwire.reducer.buckets.buffers import BucketBuffers, Storage
from gradwire.reducer.buckets.layout import BucketLayout, ParameterSpec

CPU = torch.device("cpu")
SPEC = BucketSpec(0, ("a", "b", "c"), ((2,), (2, 2), ()), ((1,), (1, 2), ()), torch.float32, CPU)


class Arena(GroupWrapper):
    """A group with memory of its own."""

    def allocate(self, numel: int, **kind: Any) -> Tensor:
        self.memory = torch.full((numel,), float("nan"), **kind)
        return self.memory


@pytest.fixture
def group() -> Any:
    (only,) = ThreadGroup.world(1)
    yield Arena(only)
    only.close()


@pytest.fixture
def storage(group: Group) -> Storage:
    return Storage(SPEC, group)


def test_memory_comes_from_the_group_and_begins_as_zeros(group: Any, storage: Storage) -> None:
    assert storage.buffer is group.memory
    assert group.memory.tolist() == [0.0] * 7
    assert [view.stride() for view in storage.views] == [(1,), (1, 2), ()]


def test_gradients_elsewhere_are_copied_and_absent_ones_are_zero(storage: Storage) -> None:
    assert storage.buffer is not None
    storage.buffer.fill_(9.0)
    second = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    storage.copy_in([None, second, torch.tensor(7.0)])
    assert storage.views[0].tolist() == [0.0, 0.0]
    assert torch.equal(storage.views[1], second)
    assert storage.buffer.tolist() == [0.0, 0.0, 1.0, 3.0, 2.0, 4.0, 7.0]


def test_gradients_that_are_views_are_not_copied(storage: Storage) -> None:
    storage.views[1].fill_(5.0)
    versions = [view._version for view in storage.views]
    again = storage.views[0].as_strided((2,), (1,))  # the same place under another object
    storage.copy_in([again, storage.views[1], storage.views[2]])
    assert [view._version for view in storage.views] == versions
    assert storage.views[1].tolist() == [[5.0, 5.0], [5.0, 5.0]]


def test_a_gradient_in_the_same_place_with_other_strides_is_read_before_it_is_written(storage: Storage) -> None:
    assert storage.buffer is not None
    storage.buffer.copy_(torch.arange(7.0))
    transposed = storage.views[1].as_strided((2, 2), (2, 1), storage.views[1].storage_offset())
    expected = transposed.clone()
    storage.copy_in([storage.views[0], transposed, storage.views[2]])
    assert torch.equal(storage.views[1], expected)


def test_gradients_of_another_dtype_are_converted(storage: Storage) -> None:
    storage.copy_in([torch.ones(2, dtype=torch.float16), None, None])
    assert storage.views[0].tolist() == [1.0, 1.0]


def test_a_gradient_with_a_graph_is_taken_without_it(storage: Storage) -> None:
    grad = torch.ones(2, requires_grad=True) * 2
    storage.copy_in([grad, None, None])
    assert storage.views[0].tolist() == [2.0, 2.0]
    assert not storage.views[0].requires_grad


@pytest.mark.parametrize(
    "result",
    [
        torch.arange(7.0),
        torch.arange(7.0, dtype=torch.float64),
        torch.arange(7.0).reshape(7, 1),
        torch.stack([torch.arange(7.0), torch.zeros(7)], 1)[:, 0],
    ],
    ids=["elsewhere", "of another dtype", "of another shape", "not contiguous"],
)
def test_a_result_elsewhere_is_put_into_the_buffer(storage: Storage, result: Tensor) -> None:
    storage.put(result)
    assert storage.buffer is not None
    assert storage.buffer.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_a_result_in_the_buffer_stays_there(storage: Storage) -> None:
    assert storage.buffer is not None
    before = storage.buffer._version
    storage.put(storage.buffer)
    assert storage.buffer._version == before


def test_a_sparse_bucket_has_no_buffer(group: Any) -> None:
    storage = Storage(BucketSpec(0, ("e",), ((5, 2),), ((2, 1),), torch.float32, CPU, sparse=True), group)
    assert storage.buffer is None
    assert storage.views == []


def test_averages_of_all_buckets_are_put_back_whatever_the_gradients_are(group: Any) -> None:
    """In two buckets of one type and one of another: gradients that are there, absent, sparse, and unused."""
    parameters = [torch.zeros(2, 2, dtype=dtype) for dtype in (torch.float32,) * 5 + (torch.float64,)]
    specs = [ParameterSpec.of(str(i), p) for i, p in enumerate(parameters)]
    layout = BucketLayout.make(specs, [[0, 1, 2], [3, 4], [5]])
    buckets = BucketBuffers(parameters, layout, keep_views=False, lazy=False)
    buckets.allocate(layout, group)
    gradients: list[Tensor | None] = [torch.zeros_like(p) for p in parameters]
    gradients[1], gradients[3] = None, torch.eye(2).to_sparse()
    for p, grad in zip(parameters, gradients, strict=True):
        p.grad = grad
    rows = [
        (b, torch.full((4 * len(members),), b + 1.0, dtype=specs[members[0]].dtype))
        for b, members in enumerate(layout.members)
    ]
    buckets.put_back(rows, unused={4})
    assert [p.grad.to_dense().unique().tolist() for p in parameters if p.grad is not None] == [[1]] * 3 + [
        [2],
        [0],
        [3],
    ]
    assert all(
        p.grad is grad
        for p, grad in zip(parameters, gradients, strict=True)
        if grad is not gradients[1] and grad is not gradients[3]
    )
    assert parameters[3].grad is not None
    assert not parameters[3].grad.is_sparse
    assert parameters[1].grad is not None
    assert parameters[1].grad.data_ptr() != buckets.storages[0].views[1].data_ptr()


@pytest.mark.parametrize(
    "lazy",
    [torch.ones(3, dtype=torch.complex64).conj(), torch.full((3,), 1j).conj().imag],
    ids=["conjugate", "negative"],
)
def test_gradients_of_which_the_sign_is_not_computed_yet(group: Any, lazy: Tensor) -> None:
    parameter, plain = torch.zeros_like(lazy), torch.zeros_like(lazy)
    layout = BucketLayout.make([ParameterSpec.of(name, parameter) for name in "pq"], [[0, 1]])
    buckets = BucketBuffers([parameter, plain], layout, keep_views=False, lazy=False)
    buckets.allocate(layout, group)
    parameter.grad, plain.grad = lazy, torch.zeros_like(lazy)
    buffer = buckets.fill(0, [lazy, plain.grad], group, last=True, unused=()).buffer()
    assert buffer.tolist() == [*lazy.tolist(), 0, 0, 0]
    buckets.put_back([(0, torch.arange(6).to(lazy.dtype))])
    assert parameter.grad is lazy
    assert lazy.tolist() == [0, 1, 2]
    assert plain.grad.tolist() == [3, 4, 5]


def test_averages_that_cannot_be_copied_are_an_error(group: Any) -> None:
    parameter = torch.zeros(3)
    layout = BucketLayout.make([ParameterSpec.of("p", parameter)], [[0]])
    buckets = BucketBuffers([parameter], layout, keep_views=False, lazy=False)
    buckets.allocate(layout, group)
    parameter.grad = torch.zeros(3)
    parameter.grad.resize_(5)
    with pytest.raises(RuntimeError, match="size"):
        buckets.put_back([(0, torch.ones(3))])


def test_gradients_that_are_views_of_one_bucket_may_change_places(group: Any) -> None:
    parameters = [torch.zeros(2) for _ in range(3)]
    layout = BucketLayout.make([ParameterSpec.of(str(i), p) for i, p in enumerate(parameters)], [[0, 1, 2]])
    buckets = BucketBuffers(parameters, layout, keep_views=True, lazy=False)
    buckets.allocate(layout, group)
    first, second, third = buckets.storages[0].views
    buckets.storages[0].buffer.copy_(torch.arange(6.0))  # type: ignore[union-attr]
    for order, expected in (
        ([second, first, third], [2, 3, 0, 1, 4, 5]),
        ([second, third, first], [0, 1, 4, 5, 2, 3]),
        ([second, None, first], [4, 5, 0, 0, 0, 1]),
    ):
        assert buckets.fill(0, order, group, last=True, unused=()).buffer().tolist() == expected
