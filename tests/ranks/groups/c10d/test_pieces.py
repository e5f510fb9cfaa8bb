"""Large exchanges over gloo in pieces: the same bytes, in any order of waiting, and errors as without."""

import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from gradwire.collectives import build
from gradwire.errors import CollectiveTimeout
from gradwire.groups import Group
from gradwire.groups.c10d.engine import PIECE, Pieces, cut
from gradwire.testing import run_ranks

LENGTHS = [2 * PIECE - 1, 2 * PIECE, 3 * PIECE + 7, 70 * PIECE]


def _numbers(n: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _exchange(group: Group) -> list[bool]:
    right = []
    for n in LENGTHS if group.size == 2 else LENGTHS[:3]:
        mine = [_numbers(group.size * n, r) for r in range(group.size)]
        came, whole = torch.empty_like(mine[0]), torch.empty(group.size * n, dtype=torch.uint8)
        works = [
            group.all_to_all_single(came, mine[group.rank], async_op=True),
            group.all_gather_into_tensor(whole, mine[group.rank][:n], async_op=True),
        ]
        small = torch.ones(1)
        works.append(group.all_reduce(small, async_op=True))
        for work in works if n % 2 else works[::-1]:
            work.wait()
        expected = torch.cat([one[group.rank * n :][:n] for one in mine])
        right += [torch.equal(came, expected), torch.equal(whole, torch.cat([one[:n] for one in mine]))]
        right.append(small.item() == group.size)
    return right


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_same_bytes_come(ranks: int) -> None:
    for right in run_ranks(_exchange, ranks, kind="gloo"):
        assert right == [True] * len(right)


def _floats_in_rows(group: Group) -> bool:
    rows = torch.arange(4 * PIECE, dtype=torch.float32).view(4, -1) + group.rank
    came = torch.empty_like(rows)
    future = group.all_to_all_single(came, rows, async_op=True).get_future()
    future.wait()
    half = rows[group.rank * 2 :][:2] - group.rank
    return torch.equal(came, torch.cat([half, half + 1]))


def test_floats_in_rows_and_a_future() -> None:
    assert run_ranks(_floats_in_rows, 2, kind="gloo") == [True, True]


def _alone(group: Group) -> str:
    if group.rank == 1:
        time.sleep(1.0)
        return ""
    t = torch.empty(8 * PIECE, dtype=torch.uint8)
    with pytest.raises(CollectiveTimeout) as caught:
        group.submit(replace(build.all_to_all_single(torch.empty_like(t), t), timeout=0.3)).wait()
    return str(caught.value)


def test_a_peer_that_does_not_come_is_named_in_time() -> None:
    began = time.perf_counter()
    said = run_ranks(_alone, 2, kind="gloo")[0]
    assert "all_to_all_single" in said
    assert "Joined: ranks [0]" in said
    assert time.perf_counter() - began < 30


class Native:
    """c10d's Work, as far as it is used."""

    def __init__(self, error: str | None = None, *, done: bool = True) -> None:
        self.error, self.done = error, threading.Event()
        if done:
            self.done.set()

    def wait(self, timeout: timedelta = timedelta(seconds=10)) -> bool:
        if not self.done.wait(timeout.total_seconds()):
            raise RuntimeError("timed out")
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()


def test_each_piece_is_put_once_and_only_when_it_has_come() -> None:
    put: list[int] = []
    natives = [Native(), Native(done=False), Native()]
    pieces = Pieces([(native, lambda i=i: put.append(i)) for i, native in enumerate(natives)])
    with pytest.raises(RuntimeError, match="timed out"):
        pieces.wait(timedelta(seconds=0.01))
    assert not pieces.is_completed()
    assert put == [0]
    waiting = [threading.Thread(target=pieces.wait) for _ in range(3)]
    for thread in waiting:
        thread.start()
    with pytest.raises(RuntimeError, match="another thread is still waiting"):
        pieces.wait(timedelta(seconds=0.01))
    natives[1].done.set()
    for thread in waiting:
        thread.join(100)
    assert put == [0, 1, 2]
    assert pieces.is_completed()
    assert pieces.wait()


def test_what_a_piece_raises_is_raised() -> None:
    pieces = Pieces([(Native(), lambda: None), (Native("connection reset"), lambda: None)])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="connection reset"):
            pieces.wait(timedelta(seconds=1))


class Gloo:
    """A backend of two ranks."""

    def size(self) -> int:
        return 2


def test_what_is_small_or_uneven_or_in_place_is_not_cut() -> None:
    large = torch.empty(8 * PIECE, dtype=torch.uint8)
    half = large[: 4 * PIECE]
    splits = [5 * PIECE, 3 * PIECE]
    for op in (
        build.all_to_all_single(large[: 4 * PIECE - 2], torch.empty(4 * PIECE - 2, dtype=torch.uint8)),
        build.all_to_all_single(large, large.clone(), output_split_sizes=splits, input_split_sizes=splits),
        build.all_gather_into_tensor(large[: 4 * PIECE - 2], torch.empty(2 * PIECE - 1, dtype=torch.uint8)),
        build.all_to_all_single(large[:0], large[:0].clone()),
        build.all_reduce(large),
        build.broadcast(half, src=0),
        build.barrier(),
    ):
        assert cut(Gloo(), op, 1.0) is None
    with pytest.raises(AttributeError, match="_allgather_base"):
        cut(Gloo(), build.all_gather_into_tensor(large, half.clone()), 1.0)
