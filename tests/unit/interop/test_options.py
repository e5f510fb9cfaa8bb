"""c10d's option objects and bare values, read."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from gradwire import ReduceOp
from gradwire.errors import UsageError, UsageTypeError
from gradwire.interop.options import Settings, read_settings, translate_reduce_op

OPTION_CLASSES = [
    "AllgatherOptions", "AllreduceCoalescedOptions", "AllreduceOptions", "AllToAllOptions", "BarrierOptions",
    "BroadcastOptions", "GatherOptions", "ReduceOptions", "ReduceScatterOptions", "ScatterOptions",
]  # fmt: skip


@pytest.mark.parametrize("name", OPTION_CLASSES)
def test_untouched_options_say_nothing(name: str) -> None:
    assert read_settings("some_method", (getattr(c10d, name)(),)) == Settings()


@pytest.mark.parametrize("name", OPTION_CLASSES)
def test_options_are_read_by_position_and_by_name(name: str) -> None:
    options = getattr(c10d, name)()
    options.timeout = timedelta(milliseconds=1500)
    expected = {"timeout": 1.5}
    if hasattr(options, "rootRank"):
        options.rootRank = 3
        expected["root"] = 3
    if hasattr(options, "reduceOp"):
        options.reduceOp = dist.ReduceOp.MIN
        expected["reduce_op"] = ReduceOp.MIN
    assert read_settings("some_method", (options,)) == read_settings("m", (), {"opts": options}) == Settings(**expected)


@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"])
def test_every_reduce_op_in_both_spellings(op: str) -> None:
    theirs = getattr(dist.ReduceOp, op)
    assert translate_reduce_op(theirs) == (ReduceOp[op], None)
    assert translate_reduce_op(dist.ReduceOp(theirs)) == (ReduceOp[op], None)


def test_the_factor_of_premul_sum() -> None:
    assert translate_reduce_op(dist._make_nccl_premul_sum(0.5)) == (ReduceOp.PREMUL_SUM, 0.5)
    kind, factor = translate_reduce_op(dist._make_nccl_premul_sum(torch.tensor([0.25])))
    assert kind is ReduceOp.PREMUL_SUM
    assert torch.equal(factor, torch.tensor([0.25]))


def test_bare_values_of_the_short_overloads() -> None:
    settings = read_settings("reduce", (2, dist.ReduceOp.MAX), {"timeout": timedelta(seconds=4)})
    assert settings == Settings(reduce_op=ReduceOp.MAX, root=2, timeout=4.0)
    assert read_settings("barrier", (None,), {"timeout": timedelta(0)}) == Settings()


@pytest.mark.skipif(not hasattr(dist, "record_comm"), reason="torch before 2.13 cannot name its communication")
def test_record_comm_names_the_operation() -> None:
    with dist.record_comm("layer 3"):
        assert read_settings("barrier").label == "layer 3"
    assert read_settings("barrier").label == ""


def test_an_unknown_value_is_refused() -> None:
    with pytest.raises(UsageTypeError, match=r"allreduce: 'sum' is neither"):
        read_settings("allreduce", ("sum",))


def test_an_unknown_reduce_op_is_refused() -> None:
    class Unused:
        def __getstate__(self) -> tuple[object, None]:
            return SimpleNamespace(name="UNUSED"), None

    with pytest.raises(UsageError, match=r"UNUSED is not supported.*SUM, AVG"):
        translate_reduce_op(Unused())


def test_sparse_indices_are_refused() -> None:
    options = SimpleNamespace(timeout=timedelta(0), sparseIndices=torch.zeros(1))
    with pytest.raises(UsageError, match="sparse COO"):
        read_settings("allreduce", (options,))
