"""The heap against a model: no overlap, everything is returned, and what may still be written is kept."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from gradwire.errors import GroupError, SharedMemoryFull
from gradwire.groups.shared_memory.heap import ALIGNMENT, Heap
from helpers.threads import run_threads

START, ROOM = 8192, 64 << 20
DTYPES = [torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex128, torch.bool]


class Reserved:
    """Records what was requested; can be set to refuse."""

    def __init__(self, limit: int = ROOM) -> None:
        self.limit = limit
        self.ranges: list[tuple[int, int]] = []
        self.refused: list[int] = []

    def __call__(self, offset: int, nbytes: int) -> None:
        if sum(n for _, n in self.ranges) + nbytes > self.limit:
            self.refused.append(nbytes)
            raise SharedMemoryFull(f"no room for {nbytes}")
        self.ranges.append((offset, nbytes))


def make(room: int = ROOM, limit: int | None = None) -> tuple[Heap, np.ndarray, Reserved]:
    memory = np.zeros(START + room + 4096, np.uint8)
    reserve = Reserved(room if limit is None else limit)
    return Heap(memory, START, START + room, reserve), memory, reserve


def place(memory: np.ndarray, t: Tensor) -> tuple[int, int]:
    return t.data_ptr() - memory.ctypes.data, t.nbytes


def free_blocks(heap: Heap) -> list[tuple[int, int]]:
    heap._collect()
    return heap._free


def available(heap: Heap) -> int:
    return sum(nbytes for _, nbytes in free_blocks(heap))


Step = tuple[str, int, int]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 3_000_000), st.integers(0, len(DTYPES) - 1)),
        st.tuples(st.just("take"), st.integers(1, 3000), st.integers(0, len(DTYPES) - 1)),
        st.tuples(st.just("drop"), st.integers(0, 1000), st.just(0)),
        st.tuples(st.sampled_from(["hold", "let go"]), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=60)
@given(STEPS)
def test_against_a_model(steps: list[Step]) -> None:
    heap, memory, reserve = make()
    alive: dict[int, tuple[Tensor, int]] = {}
    kept: list[tuple[int, int]] = []
    holding, count = False, 0
    for what, number, which in steps:
        if what == "take":
            dtype = DTYPES[which]
            try:
                t = heap.tensor(number // dtype.itemsize + 1, dtype)
            except GroupError:
                assert number > (ROOM - sum(x.nbytes + ALIGNMENT for x, _ in alive.values())) / 64 or kept
                continue
            offset, nbytes = place(memory, t)
            assert offset % ALIGNMENT == 0
            assert t.numel() * dtype.itemsize == nbytes
            assert any(o <= offset and offset + nbytes <= o + n for o, n in _joined(reserve.ranges))
            for other_offset, other_nbytes in [*(place(memory, x) for x, _ in alive.values()), *kept]:
                assert offset + nbytes <= other_offset or other_offset + other_nbytes <= offset
            count += 1
            t.view(torch.uint8).fill_(count % 251)
            alive[count] = t, count % 251
            del t
        elif what == "drop" and alive:
            key = sorted(alive)[number % len(alive)]
            if holding:
                kept.append(place(memory, alive[key][0]))
            del alive[key]
        elif what == "hold":
            heap.holds_back = True
            holding = True
        elif what == "let go":
            heap.holds_back = False
            holding = False
            kept.clear()
        assert all(x.view(torch.uint8).eq(value).all() for x, value in alive.values() if x.nbytes < 100_000)
    alive.clear()
    heap.holds_back = False
    blocks = free_blocks(heap)
    assert available(heap) == heap.reserved
    assert len(blocks) <= 1, "adjacent free blocks are merged"


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Growth is without gaps, so all ranges are one."""
    return [(ranges[0][0], sum(n for _, n in ranges))] if ranges else []


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [0, 2, 1], [1, 0, 2], [1, 2, 0]])
def test_adjacent_blocks_are_merged_in_whatever_order_they_are_freed(order: list[int]) -> None:
    heap, _, reserve = make()
    tensors: list[Tensor | None] = [heap.tensor(1_500_000, torch.uint8) for _ in range(3)]
    reserved = heap.reserved
    for i in order:
        tensors[i] = None
    assert len(free_blocks(heap)) == 1
    whole = heap.tensor(4_500_000, torch.uint8)
    assert whole.numel() == 4_500_000
    assert heap.reserved == reserved
    assert reserve.ranges[0][0] == START


def test_a_view_keeps_its_block() -> None:
    heap, memory, _ = make()
    t = heap.tensor(100_000, torch.float32)
    first = place(memory, t)[0]
    views = [t[5:9], t.view(100, 1000).t(), t.view(torch.int32), t.detach(), t.numpy()]
    del t
    while views:
        other = heap.tensor(100_000, torch.float32)
        assert place(memory, other)[0] != first
        del other
        views.pop()
    assert place(memory, heap.tensor(100_000, torch.float32))[0] == first


def test_a_block_in_a_cycle_comes_back_when_it_is_collected() -> None:
    heap, _, _ = make()

    class Holder:
        """Refers to itself."""

        def __init__(self, t: Tensor) -> None:
            self.t, self.me = t, self

    gc.disable()
    try:
        Holder(heap.tensor(100_000, torch.float32))
        taken = heap.reserved - available(heap)
        assert taken >= 400_000
    finally:
        gc.enable()
    gc.collect()
    assert available(heap) == heap.reserved


def test_nothing_leaks() -> None:
    heap, _, _ = make()
    generator = torch.Generator().manual_seed(0)
    kept: list[Tensor] = []
    sizes = torch.randint(1, 200_000, (1000,), generator=generator).tolist()
    for i, n in enumerate(sizes):
        kept.append(heap.tensor(n, torch.float32))
        if len(kept) > 5:
            kept.pop(i % 5)
    assert heap.reserved < 40 * 200_000 * 4
    kept.clear()
    assert available(heap) == heap.reserved
    assert len(free_blocks(heap)) == 1
    assert not heap._returned


def test_it_grows_by_more_than_it_must_and_by_no_more_than_it_can() -> None:
    heap, _, reserve = make(limit=6 << 20)
    first = heap.tensor(1000, torch.uint8)
    assert heap.reserved == 4 << 20
    second = heap.tensor((5 << 20) - 4096, torch.uint8)  # 8 MiB would be good, 1 MiB more is all that is needed
    assert heap.reserved < 6 << 20
    assert reserve.refused
    with pytest.raises(GroupError, match="no room for"):
        heap.tensor(2 << 20, torch.uint8)
    reserved = heap.reserved
    third = heap.tensor(1000, torch.uint8)  # a refusal leaves it as it was
    assert heap.reserved >= reserved
    del first, second, third


def test_address_space_that_is_used_up() -> None:
    heap, _, _ = make(room=1 << 20)
    t = heap.tensor(1 << 19, torch.uint8)
    with pytest.raises(GroupError, match=r"1048576 bytes asked for, but .* address space for 1048576 bytes only"):
        heap.tensor(1 << 20, torch.uint8)
    del t
    assert heap.tensor(1 << 20, torch.uint8).numel() == 1 << 20


def test_what_is_held_back_is_not_handed_out() -> None:
    heap, memory, _ = make()
    t = heap.tensor(100_000, torch.float32)
    where = place(memory, t)[0]
    heap.holds_back = True
    del t
    others = [heap.tensor(100_000, torch.float32) for _ in range(20)]
    assert where not in [place(memory, x)[0] for x in others]
    heap.holds_back = False
    assert place(memory, heap.tensor(100_000, torch.float32))[0] == where


@pytest.mark.parametrize("numel", [0, 1])
def test_the_smallest(numel: int) -> None:
    heap, _, _ = make()
    t = heap.tensor(numel, torch.float64)
    assert t.shape == (numel,)
    assert heap.reserved - available(heap) == ALIGNMENT


def test_several_threads_at_once() -> None:
    heap, memory, _ = make()
    problems: list[str] = []

    def use(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for n in torch.randint(1, 20_000, (200,), generator=generator).tolist():
            t = heap.tensor(n, torch.uint8).fill_(seed)
            u = heap.tensor(n, torch.uint8).fill_(seed + 1)
            if not (t.eq(seed).all() and u.eq(seed + 1).all()):
                problems.append(f"{place(memory, t)} was written by another thread")

    run_threads(threading.Thread(target=use, args=(10 * seed,)) for seed in range(4))
    assert problems == []
    assert available(heap) == heap.reserved


def test_a_block_leaves_pythons_registry_of_finalizers_alone():
    """Python iterates over it at exit without a lock, and a group's thread may free a block at that moment."""
    registry = weakref.finalize._registry  # type: ignore[attr-defined]
    gc.collect()
    heap, _, _ = make()
    before = len(registry)
    t = heap.tensor(100, torch.float32)
    assert len(registry) == before
    del t
    assert len(registry) == before
    assert available(heap) == heap.reserved
