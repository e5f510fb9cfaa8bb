"""One list per seam: every group and every wrapper around a real group passes the same suite.

Adding a group or a wrapper adds one line here, and no test.
"""

import functools
import secrets
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import Store

from gradwire.collectives import Collective, OpKind, ReduceOp
from gradwire.collectives.aliasing import is_plain
from gradwire.collectives.lower import Program, lower
from gradwire.groups import (
    C10dGroup,
    Deadline,
    Group,
    GroupWrapper,
    HierarchicalGroup,
    Latched,
    NanCheck,
    Recording,
    TrackedWrapper,
    Verified,
)
from gradwire.groups.base import BuildGroup
from gradwire.hooks import quantize
from gradwire.interop import HookedGroup, register_backend
from gradwire.lab import Throttled
from gradwire.testing import check_group, check_names, run_ranks
from gradwire.testing.mpi import missing
from helpers import adapters

Wrap = Callable[[Group], Group]


class ThereAndBack(adapters.ThereAndBack):
    @property
    def in_one_process(self) -> bool:  # type: ignore[override]
        return self.far.in_one_process


class ThroughTorch(GroupWrapper):
    """A C10dGroup over the world that `dist.init_process_group` makes; the group under it only brings the store about."""

    kind: str | BuildGroup = "mpi"

    def __init__(self, group: Group, folder: Path) -> None:
        self.far = group
        # A file, which all leave when they close: a TCPStore asks for the names of its peers, in every world that a check makes.
        number = torch.tensor([secrets.randbits(62)])
        group.broadcast(number, src=0)
        store = dist.FileStore(str(folder / f"{int(number)}"), group.size)
        name = type(self).__name__.lower()
        register_backend(name, kind=self.kind)
        seconds = timedelta(seconds=group.timeout)
        dist.init_process_group(name, store=store, rank=group.rank, world_size=group.size, timeout=seconds)
        super().__init__(C10dGroup(dist.group.WORLD, timeout=group.timeout))

    def split(self, color: int | None, key: int | None = None) -> Group | None:
        return self.inner.split(color, key)

    def close(self, timeout: float = 5.0) -> None:
        super().close(timeout)
        if dist.is_initialized():
            dist.destroy_process_group()
        self.far.close()


class ThroughTorchShared(ThroughTorch):
    """The same over shared memory."""

    kind = "shared_memory"


def on_two_hosts(store: Store, rank: int, size: int, *, timeout: float, name: str) -> Group:
    """What `kind="hierarchical"` makes, but on hosts whose ranks are interleaved; `discover` would see one host here."""
    return HierarchicalGroup.discover(store, rank, size, timeout=timeout, name=name, host=f"host {rank % 2}")


class ThroughTorchHierarchical(ThroughTorch):
    """The same over shared memory inside hosts, of two ranks and of one, and gloo between them."""

    kind = staticmethod(on_two_hosts)


class Spartan(TrackedWrapper):
    """An engine that can move bytes and add float32, and nothing else: all the rest is lowered to that."""

    def program(self, op: Collective) -> Program:
        return lower(op, rank=self.rank, size=self.size, takes=self._takes)

    def _takes(self, op: Collective) -> bool:
        if op.kind is OpKind.ALL_REDUCE:
            (one, *more) = op.inputs
            return not more and is_plain(one) and one.dtype is torch.float32 and op.reduce_op is ReduceOp.SUM
        single, into = OpKind.ALL_TO_ALL_SINGLE, OpKind.ALL_GATHER_INTO_TENSOR
        moves = (OpKind.BROADCAST, into, single, OpKind.GATHER, OpKind.SCATTER)
        both_splits = op.kind is not single or (op.splits is not None and all(op.splits))
        plain_bytes = all(is_plain(t) and t.dtype is torch.uint8 and t.dim() == 1 for t in op.inputs + op.outputs)
        return op.kind in moves and plain_bytes and both_splits and len(op.tensors) <= 1


def with_deadline(group: Group) -> Group:
    return Deadline(group, seconds=50)


def throttled(group: Group) -> Group:
    return Throttled(group, mbit=500, latency_ms=0.2)


def hooked(group: Group) -> Group:
    return HookedGroup(group, quantize(bits=8))


def all_of_them(group: Group) -> Group:
    return Recording(Latched(Verified(NanCheck(Deadline(group, seconds=50)))))


def with_files_in(folder: Path, wrap: Wrap | type[ThroughTorch]) -> Wrap:
    """`wrap`, with the stores of worlds that torch makes in `folder`."""
    if isinstance(wrap, type) and issubclass(wrap, ThroughTorch):
        return functools.partial(wrap, folder=folder)
    return wrap


MEMORY = ("many_in_flight", "layouts", "dtypes_without_arithmetic", "large", "inference_tensors", "aliasing")
"""Where tensors are and how large: the checks that take longest. Every group runs them, and `test_wrapped_shared_memory`."""
PASSED = tuple(name for name in check_names() if name not in MEMORY)
PASS_ON: list[Wrap] = [Recording, with_deadline, NanCheck, Verified, Latched, throttled, Spartan]
"""Wrappers that pass tensors on as they are. `test_wrapped_shared_memory` has the first five together, and the adapters; `lower`,
which is all of the last, gets the other tensors in `test_python_groups.py`."""
LISTS = ("reduce_scatter", "all_gather", "all_to_all")
"""The same operations on lists of tensors. `test_wrapped_shared_memory` has them."""
SINGLE = tuple(name for name in PASSED if name not in LISTS)
WRAPPERS = [*((wrap, SINGLE) for wrap in PASS_ON), (hooked, check_names())]


@pytest.mark.parametrize(("wrap", "names"), WRAPPERS, ids=lambda w: getattr(w, "__name__", ""))
def test_wrapped_thread_group(wrap: Wrap, names: tuple[str, ...]) -> None:
    report = check_group(lambda fn: run_ranks(fn, 3, kind="threads", wrap=wrap), only=names)
    assert report.ran == names


def test_gloo() -> None:
    report = check_group(lambda fn: run_ranks(fn, 3, kind="gloo"))
    assert report.ran == check_names()


@pytest.mark.parametrize(("size", "names"), [(2, check_names()), (5, PASSED)], ids=["2 processes", "5 processes"])
def test_shared_memory(size: int, names: tuple[str, ...]) -> None:
    report = check_group(lambda fn: run_ranks(fn, size, kind="shared_memory"), only=names)
    assert report.ran == names


PASSED_ON = (
    "all_reduce_ops", "reduce_scatter_tensor", "broadcast", "all_gather_into_tensor", "all_to_all_single", "gather", "scatter",
    "send_recv", "recv_any", "split", "split_nested", "future", "events", "usage_errors", "deadline", "missing_rank", "abort",
    "recover_again", "close", "peer_leaves", "mismatch",
)  # fmt: skip
"""What a group does differently and the adapters pass on: each kind of operation, sub-groups, errors and endings. Every group,
and both adapters over shared memory, run all checks. Not `recv_any_alone`: gloo cannot be made to give up a receive from any
rank, so a thread waits in it until the engine's own deadline, and the second group puts that off beyond the time for leftovers."""


@pytest.mark.parametrize(
    ("wrap", "names"),
    [(all_of_them, check_names()), (ThereAndBack, check_names()), (ThroughTorchShared, PASSED_ON)],
    ids=lambda w: getattr(w, "__name__", ""),
)
def test_wrapped_shared_memory(wrap: Wrap, names: tuple[str, ...], tmp_path: Path) -> None:
    """The process kind on which all wrappers are tried together, and the adapters: they are the same on the others."""
    wrap = with_files_in(tmp_path, wrap)
    report = check_group(lambda fn: run_ranks(fn, 2, kind="shared_memory", wrap=wrap), only=names)
    assert report.ran == names


TENSORS = ("layouts", "dtypes_without_arithmetic", "channels_last", "gaps", "leaves", "inference_tensors", "aliasing")
PLAIN = tuple(name for name in check_names() if name not in TENSORS)


def test_hierarchical() -> None:
    """On hosts of two ranks and of one, except what `lower` makes plain tensors of before it matters who is where:
    `test_hierarchical.py` has that on threads."""
    report = check_group(lambda fn: run_ranks(fn, 3, kind="hierarchical"), only=PLAIN)
    assert report.ran == PLAIN


def test_threads_there_and_back() -> None:
    report = check_group(lambda fn: run_ranks(fn, 3, kind="threads", wrap=ThereAndBack), only=PASSED_ON)
    assert report.ran == PASSED_ON


def test_hierarchical_through_torch(tmp_path: Path) -> None:
    wrap = with_files_in(tmp_path, ThroughTorchHierarchical)
    report = check_group(lambda fn: run_ranks(fn, 3, kind="hierarchical", wrap=wrap), only=PASSED_ON)
    assert report.ran == PASSED_ON


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_mpi() -> None:
    report = check_group(lambda fn: run_ranks(fn, 3, kind="mpi"))
    assert report.ran == check_names()


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_mpi_through_torch(tmp_path: Path) -> None:
    wrap = with_files_in(tmp_path, ThroughTorch)
    report = check_group(lambda fn: run_ranks(fn, 2, kind="mpi", wrap=wrap), only=PASSED_ON)
    assert report.ran == PASSED_ON
