"""Checks of send and receive."""

from __future__ import annotations

import torch

from gradwire.collectives import build
from gradwire.groups.base import Group
from gradwire.testing.conformance.compare import Problems, same, unlike
from gradwire.testing.conformance.data import DTYPES, arrange, blank, draw


def check_send_recv(group: Group) -> Problems:
    """From rank 0 to each other rank and back: every dtype, several sizes, strided."""
    for i, dtype in enumerate(DTYPES):
        yield from _there_and_back(group, (5,), dtype, i)
    for i, shape in enumerate(((0,), (), (13,), (3, 4), (4099,))):
        yield from _there_and_back(group, shape, torch.float32, 100 + i)
    if group.rank < 2:
        other, value = 1 - group.rank, arrange(draw((3, 4), torch.float32, 51), "transposed")
        if group.rank == 0:
            group.send(value, dst=other)
        else:
            place = arrange(blank((3, 4), torch.float32), "strided")
            group.recv(place, src=other)
            yield from unlike("send of a transposed tensor into a strided one", place, value)


def _there_and_back(group: Group, shape: tuple[int, ...], dtype: torch.dtype, key: int) -> Problems:
    peer = 1 + key % (group.size - 1)
    value = draw(shape, dtype, 52, key)
    if group.rank == 0:
        group.send(value, dst=peer)
        place = blank(shape, dtype)
        group.recv(place, src=peer)
        yield from unlike(f"{dtype}{list(shape)} sent to rank {peer} and back", place, value)
    elif group.rank == peer:
        place = blank(shape, dtype)
        work = group.recv(place, src=0)
        yield from unlike(f"{dtype}{list(shape)} received from rank 0", place, value)
        yield from same("source_rank() of a receive from rank 0", work.source_rank(), 0)
        group.send(place, dst=0)


def check_send_recv_tags(group: Group) -> Problems:
    """Tags match sends with receives in any order; messages with the same tag do not overtake each other."""
    tags = (3, 1, 2, 1)
    if group.rank == 0:
        works = [group.send(torch.tensor([10 * i + t]), dst=1, tag=t, async_op=True) for i, t in enumerate(tags)]
        for work in works:
            work.wait()
    elif group.rank == 1:
        wanted = [(2, 22), (1, 11), (1, 31), (3, 3)]
        places = [torch.tensor([-1]) for _ in wanted]
        works = [group.recv(t, src=0, tag=tag, async_op=True) for t, (tag, _) in zip(places, wanted, strict=True)]
        for work, t, (tag, want) in zip(works, places, wanted, strict=True):
            work.wait()
            yield from same(f"what was received with tag {tag}", t.item(), want)


def check_send_recv_both_ways(group: Group) -> Problems:
    """All ranks send to and receive from both neighbors at once."""
    size, rank = group.size, group.rank
    left, right = (rank - 1) % size, (rank + 1) % size
    from_left, from_right = blank((700,), torch.float32), blank((700,), torch.float32)
    for work in [
        group.send(draw((700,), torch.float32, 53, rank, 0), dst=right, tag=0, async_op=True),
        group.send(draw((700,), torch.float32, 53, rank, 1), dst=left, tag=1, async_op=True),
        group.recv(from_right, src=right, tag=1, async_op=True),
        group.recv(from_left, src=left, tag=0, async_op=True),
    ]:
        work.wait()
    yield from unlike(f"what came from rank {left}", from_left, draw((700,), torch.float32, 53, left, 0))
    yield from unlike(f"what came from rank {right}", from_right, draw((700,), torch.float32, 53, right, 1))


def check_recv_any(group: Group) -> Problems:
    """A receive from any rank gets each message once, and `source_rank` is its sender."""
    for tag in (0, 5):
        if group.rank == 0:
            sources = []
            for _ in range(group.size - 1):
                place = torch.tensor([-1, -1])
                work = group.recv(place, tag=tag)
                sources.append(work.source_rank())
                yield from same("what was received from any rank", place.tolist(), [work.source_rank(), tag])
            yield from same("the ranks received from", sorted(sources), list(range(1, group.size)))
        else:
            group.send(torch.tensor([group.rank, tag]), dst=0, tag=tag)


def check_send_recv_beside_collectives(group: Group) -> Problems:
    """Point-to-point messages between two ranks do not put the collectives of all out of step."""
    t, message = draw((5,), torch.int64, 54, group.rank), torch.tensor([4 if group.rank == 0 else 0])
    ops = {0: build.send(message, dst=1, tag=9), 1: build.recv(message, src=0, tag=9)}
    works = [group.submit(ops[group.rank])] if group.rank in ops else []
    group.all_reduce(t)
    for work in works:
        work.wait()
        yield from same("what was received while collectives ran", message.item(), 4)
    want = sum(draw((5,), torch.int64, 54, rank) for rank in range(group.size))
    yield from unlike("an all_reduce among messages", t, torch.as_tensor(want))
