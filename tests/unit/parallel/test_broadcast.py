"""broadcast_coalesced: many tensors made equal to one rank's, in few operations."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from gradwire.collectives import Collective
from gradwire.errors import UsageError, UsageTypeError
from gradwire.groups import Group, GroupWrapper, Work
from gradwire.parallel import broadcast_coalesced
from gradwire.testing import run_ranks

DTYPES = [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bfloat16, torch.complex64, torch.bool]


class Flight(GroupWrapper):
    """Counts operations that were submitted and not yet waited for."""

    def __init__(self, inner: Group) -> None:
        super().__init__(inner)
        self.now = self.most = 0
        self.bytes: list[int] = []

    def submit(self, op: Collective) -> Work:
        self.now += 1
        self.most = max(self.most, self.now)
        self.bytes.append(op.nbytes)
        work = super().submit(op)
        waited, count = work.wait, self

        def wait(*args: Any) -> bool:
            done = waited(*args)
            count.now -= 1
            return done

        work.wait = wait  # type: ignore[method-assign]
        return work


@st.composite
def one_tensor(draw: st.DrawFn) -> Tensor:
    """Any dtype, any size, contiguous or not, maybe a leaf that requires grad."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    t = torch.randint(
        0, 2, [2 * n for n in shape], generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))
    ).to(dtype)
    form = draw(st.sampled_from(["whole", "every other", "transposed", "parameter", "conjugate"]))
    if form == "every other":
        t = t[tuple(slice(None, None, 2) for _ in shape)]
    elif form == "transposed" and len(shape) > 1:
        t = t.transpose(0, 1)
    elif form == "parameter" and (dtype.is_floating_point or dtype.is_complex):
        t = nn.Parameter(t)
    elif form == "conjugate":  # a view whose elements are conjugated when they are read
        t = t.conj()
    return t


def different(t: Tensor, rank: int) -> Tensor:
    """The same kind of tensor with this rank's own values, lying in memory as the original does."""
    mine = copy.deepcopy(t)
    assert mine.stride() == t.stride()
    if rank:
        with torch.no_grad():
            mine.copy_((mine + rank).to(t.dtype))
    return mine


@given(
    tensors=st.lists(one_tensor(), max_size=6),
    buffer_size=st.sampled_from([1, 7, 16, 64, 10_000]),
    ranks=st.integers(1, 3),
    src=st.integers(0, 2),
)
@settings(max_examples=30)
def test_all_become_those_of_the_source(tensors: list[Tensor], buffer_size: int, ranks: int, src: int) -> None:
    src %= ranks

    def rank_main(group: Group) -> list[Tensor]:
        assert isinstance(group, Flight)
        mine = [different(t, group.rank) for t in tensors]
        places = [t.data_ptr() for t in mine]
        broadcast_coalesced(group, mine, buffer_size=buffer_size, src=src)
        assert [t.data_ptr() for t in mine] == places
        assert group.most <= 2
        assert group.now == 0
        assert all(n <= max(buffer_size, 16) for n in group.bytes)  # one element may be larger than the buffer
        return [t.detach() for t in mine]

    expected = [different(t, src).detach() for t in tensors]
    for got in run_ranks(rank_main, ranks, wrap=Flight):
        assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


def test_two_buffers_are_in_flight_at_a_time() -> None:
    def rank_main(group: Group) -> tuple[int, list[int]]:
        assert isinstance(group, Flight)
        broadcast_coalesced(group, [torch.zeros(100)], buffer_size=80)
        return group.most, group.bytes

    assert run_ranks(rank_main, 2, wrap=Flight) == [(2, [80, 80, 80, 80, 80])] * 2


def test_small_tensors_share_a_buffer_and_empty_ones_need_none() -> None:
    def rank_main(group: Group) -> list[int]:
        assert isinstance(group, Flight)
        broadcast_coalesced(group, [torch.zeros(3), torch.zeros(0), torch.zeros(2), torch.zeros(2, dtype=torch.int64)])
        broadcast_coalesced(group, [])
        broadcast_coalesced(group, [torch.zeros(0)])
        return group.bytes

    assert run_ranks(rank_main, 2, wrap=Flight) == [[20, 16]] * 2


def test_what_is_too_large_is_cut_and_dtypes_are_kept_apart() -> None:
    def rank_main(group: Group) -> list[int]:
        assert isinstance(group, Flight)
        tensors = [torch.zeros(5), torch.zeros(1, dtype=torch.int64), torch.zeros(1), torch.zeros(2)]
        broadcast_coalesced(group, tensors, buffer_size=12)
        return group.bytes

    assert run_ranks(rank_main, 2, wrap=Flight) == [[12, 12, 8, 8]] * 2


@pytest.mark.parametrize(
    ("tensors", "named", "error", "words"),
    [
        ([3], {}, UsageTypeError, "expected dense tensors, got int"),
        ([torch.eye(2).to_sparse()], {}, UsageTypeError, "got a torch.sparse_coo tensor"),
        ([torch.zeros(1)], {"buffer_size": 0}, UsageError, "buffer_size 0. It must be more than 0 bytes"),
        ([torch.zeros(1)], {"src": 2}, UsageError, "src 2, but the group has ranks 0 to 1"),
        ([torch.zeros(1)], {"src": -1}, UsageError, "src -1"),
    ],
)
def test_usage_errors_come_before_any_communication(
    tensors: list[Any], named: dict[str, int], error: type[Exception], words: str
) -> None:
    def rank_main(group: Group) -> list[int]:
        assert isinstance(group, Flight)
        with pytest.raises(error, match=words):
            broadcast_coalesced(group, tensors, **named)
        return group.bytes

    assert run_ranks(rank_main, 2, wrap=Flight) == [[], []]
