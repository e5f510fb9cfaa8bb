"""What a hook sees of a bucket: its spec, its views, and torch's GradBucket methods."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from gradwire.errors import UsageError
from gradwire.hooks import BucketSpec, GradBucket

CPU = torch.device("cpu")


def spec_of(*tensors: Tensor, index: int = 0, sparse: bool = False) -> BucketSpec:
    return BucketSpec(
        index=index,
        names=tuple(f"p{i}" for i in range(len(tensors))),
        shapes=tuple(tuple(t.shape) for t in tensors),
        strides=tuple(tuple(t.stride()) for t in tensors),
        dtype=tensors[0].dtype,
        device=CPU,
        sparse=sparse,
    )


def bucket_of(*tensors: Tensor, is_last: bool = False) -> GradBucket:
    spec = spec_of(*tensors)
    return GradBucket(spec, torch.arange(float(spec.numel)), list(tensors), is_last=is_last)


def test_offsets_follow_each_other() -> None:
    spec = spec_of(torch.zeros(2, 3), torch.zeros(()), torch.zeros(0), torch.zeros(4))
    assert spec.numels == (6, 1, 0, 4)
    assert spec.offsets == (0, 6, 7, 7)
    assert spec.numel == 11


@pytest.mark.parametrize(
    "like",
    [torch.zeros(4, 6)[:, ::2], torch.zeros(1, 3).expand(4, 3), torch.zeros(8)[::2]],
    ids=["gaps", "overlap", "every 2nd"],
)
def test_strides_that_do_not_fill_memory_become_contiguous(like: Tensor) -> None:
    spec = spec_of(like, torch.zeros(1))
    view = spec.views(torch.zeros(spec.numel))[0]
    assert view.shape == like.shape
    assert view.is_contiguous()


@st.composite
def dense_tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    return torch.zeros([shape[i] for i in order]).permute([order.index(i) for i in range(len(shape))])


@given(st.lists(dense_tensors(), min_size=1, max_size=4))
@settings(max_examples=60)
def test_views_cover_the_buffer_once(tensors: list[Tensor]) -> None:
    spec = spec_of(*tensors)
    buffer = torch.zeros(spec.numel)
    for view, like in zip(spec.views(buffer), tensors, strict=True):
        assert view.shape == like.shape
        assert view.numel() == 0 or view.stride() == like.stride()
        view += 1
    assert buffer.tolist() == [1.0] * spec.numel


def test_views_of_a_part_of_a_larger_tensor_stay_in_that_part() -> None:
    whole = torch.zeros(10)
    spec = spec_of(torch.zeros(2), torch.zeros(2, 2).t())
    for view in spec.views(whole[3:9]):
        view.fill_(1.0)
    assert whole.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1, 0]


def test_str_of_a_spec_lists_its_first_parameters() -> None:
    assert str(spec_of(torch.zeros(1), torch.zeros(1), index=3)) == "bucket 3 (parameters p0, p1)"
    assert str(spec_of(*[torch.zeros(1)] * 6)) == "bucket 0 (parameters p0, p1, p2, p3 and 2 more)"


def test_the_methods_of_torchs_class() -> None:
    a, b = torch.zeros(2, 2), torch.zeros(3)
    bucket = bucket_of(a, b, is_last=True)
    assert (bucket.index(), bucket.is_last(), bucket.names()) == (0, True, ("p0", "p1"))
    assert [p is q for p, q in zip(bucket.parameters(), (a, b), strict=True)] == [True, True]
    assert repr(bucket) == "GradBucket(index=0, parameters=['p0', 'p1'], buffer=(7,))"


def test_gradients_are_views_of_the_buffer_in_parameter_shape() -> None:
    bucket = bucket_of(torch.zeros(2, 2), torch.zeros(3))
    first, second = bucket.gradients()
    assert first.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert second.tolist() == [4.0, 5.0, 6.0]
    second.zero_()
    assert bucket.buffer()[4:].tolist() == [0.0, 0.0, 0.0]


def test_after_set_buffer_gradients_are_views_of_the_new_one() -> None:
    bucket = bucket_of(torch.zeros(2, 2), torch.zeros(3))
    old, new = bucket.buffer(), torch.full((7,), 9.0, dtype=torch.float16)
    bucket.gradients()
    bucket.set_buffer(new)
    assert bucket.buffer() is new
    assert bucket.gradients()[0].tolist() == [[9.0, 9.0], [9.0, 9.0]]
    assert bucket.gradients()[0].untyped_storage().data_ptr() == new.untyped_storage().data_ptr()
    assert old.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_lists_handed_out_are_the_callers_own() -> None:
    bucket = bucket_of(torch.zeros(2), torch.zeros(3))
    bucket.gradients().clear()
    bucket.parameters().clear()
    assert len(bucket.gradients()) == len(bucket.parameters()) == 2


@pytest.mark.parametrize(("buffer", "got"), [(torch.zeros(3), r"\[3\]"), (None, "NoneType"), ([1.0], "list")])
def test_set_buffer_refuses_what_does_not_fit(buffer: object, got: str) -> None:
    bucket = bucket_of(torch.zeros(2, 2))
    with pytest.raises(UsageError, match=f"bucket 0: expected a tensor of 4 elements, got {got}"):
        bucket.set_buffer(buffer)  # type: ignore[arg-type]


def test_the_gradient_of_a_sparse_bucket_is_the_sparse_tensor() -> None:
    weight = torch.zeros(5, 2)
    grad = torch.sparse_coo_tensor(torch.tensor([[1, 3]]), torch.ones(2, 2), (5, 2))
    bucket = GradBucket(spec_of(weight, sparse=True), grad, [weight], is_last=False)
    assert bucket.buffer() is grad
    assert bucket.gradients() == [grad]
    dense = torch.zeros(5, 2)
    bucket.set_buffer(grad * 2)
    assert bucket.gradients()[0].to_dense()[1].tolist() == [2.0, 2.0]
    with pytest.raises(UsageError, match="expected a tensor"):
        bucket.set_buffer(dense[:2])
