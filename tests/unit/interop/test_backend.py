"""register_backend, with one rank: what can go wrong, and the ways to initialize."""

import json
import math
import os
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import gradwire as gw
from gradwire import C10dGroup, Group, Recording, ReduceOp
from gradwire.errors import UsageError, UsageTypeError
from gradwire.interop import GradwireProcessGroup
from gradwire.interop.backend import _alone
from gradwire.interop.process_group import PYTHON_BACKENDS, GradwireBackend
from gradwire.interop.process_group_base import Settings, read_settings, translate_reduce_op


@pytest.fixture(autouse=True)
def no_world_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def init(backend: str = "gradwire", **named: Any) -> Group:
    if "init_method" not in named:
        named["store"] = dist.HashStore()
    dist.init_process_group(backend, rank=0, world_size=1, **named)
    return gw.from_process_group()


def test_registering_warns_of_nothing_and_may_be_repeated() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gw.register_backend()
        gw.register_backend()
    assert dist.is_backend_available("gradwire")
    assert dist.Backend("gradwire") == "gradwire"
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"  # the default of others is not touched


def test_a_world_of_one() -> None:
    gw.register_backend()
    group = init(timeout=timedelta(seconds=17))
    world = dist.group.WORLD
    assert isinstance(world, GradwireProcessGroup)
    assert isinstance(group, C10dGroup)
    assert (dist.get_backend(), group.timeout, group.name) == ("gradwire", 17.0, "gradwire:0")
    t = torch.ones(2)
    dist.all_reduce(t)
    assert t.tolist() == [1, 1]
    dist.destroy_process_group()
    assert group.closed


@pytest.mark.parametrize("how", ["env", "tcp", "file"])
def test_ways_to_initialise(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gw.register_backend()
    # Port 0 is enough: no other process has to find the store.
    methods = {"env": "env://", "tcp": "tcp://127.0.0.1:0", "file": f"file://{tmp_path}/store"}
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    init(init_method=methods[how])
    dist.barrier()
    assert os.environ["MASTER_PORT"] == "0"


def test_a_wrapper_around_every_group() -> None:
    gw.register_backend("recorded", wrap=Recording)
    group = init("recorded")
    assert isinstance(group, Recording)
    dist.barrier()
    part = gw.from_process_group(dist.new_group([0]))
    assert isinstance(part, Recording)
    assert part is not group
    assert [signature.kind.value for signature in group.submitted] == ["barrier"]
    gw.register_backend("recorded")
    assert isinstance(gw.from_process_group(dist.new_group([0])), C10dGroup)


def test_beside_another_back_end() -> None:
    gw.register_backend()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group([0], backend="gradwire")
    t = torch.ones(1)
    dist.all_reduce(t, group=group)
    assert dist.get_backend(group) == "gradwire"
    assert isinstance(group, GradwireProcessGroup)
    assert isinstance(gw.from_process_group(), C10dGroup)  # one that runs on torch's gloo, and does not own it


def test_a_mixed_back_end_string() -> None:
    """Before torch 2.15 the whole is replaced by the Python group: see docs/interop.md."""
    gw.register_backend()
    init("cpu:gradwire,meta:gloo")
    world: Any = dist.group.WORLD
    if not PYTHON_BACKENDS:
        assert isinstance(world, GradwireProcessGroup)
        return
    backend = world._get_backend(torch.device("cpu"))
    assert isinstance(backend, GradwireBackend)
    assert repr(backend).startswith("<gradwire backend over <gradwire:0 rank 0 of 1")
    assert world._get_backend(torch.device("meta")).name() == "gloo"
    assert gw.from_process_group(backend) is backend.group
    t, parts = torch.ones(3), [torch.empty(3)]
    dist.all_reduce(t)
    dist.all_gather(parts, t)
    assert dist.all_reduce(t, async_op=True).get_future().wait()[0].tolist() == parts[0].tolist() == [1.0] * 3
    with dist._coalescing_manager(group=world, async_ops=True) as together:
        dist.all_reduce(t)
        dist.all_reduce(parts[0])
    together.wait()
    part = backend.split(dist.HashStore(), [0], None)
    assert part.allreduce([t]).wait()
    part.shutdown()
    with pytest.raises(UsageError, match="torch needs every rank in one of the parts"):
        backend.split(dist.HashStore(), [1], None)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    ours = gw.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=world)
    ours(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize(("variable", "value"), [("TORCH_DIST_NAN_CHECK", "1"), ("TORCH_FR_BUFFER_SIZE", "100")])
def test_what_torch_is_told_to_watch_passes_through_its_hooks(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    gw.register_backend()
    init("gradwire")
    world: Any = dist.group.WORLD
    assert type(world) is (dist.ProcessGroup if PYTHON_BACKENDS else GradwireProcessGroup)
    assert gw.from_process_group().size == 1
    t = torch.full((2,), math.nan)
    if PYTHON_BACKENDS and value == "1":
        with pytest.raises(RuntimeError, match="NaN found in input tensor"):
            dist.all_reduce(t)
    elif PYTHON_BACKENDS:
        dist.all_reduce(t)
        dist.all_gather([torch.empty(2)], t)
        recorded = json.loads(c10d._dump_fr_trace_json(backend="gradwire"))["entries"]
        assert [one["profiling_name"] for one in recorded][-2:] == ["gradwire:all_reduce", "gradwire:all_gather"]


@pytest.mark.parametrize(("others", "alone"), [({}, True), ({"cuda": "nccl"}, False)])
def test_whether_a_process_group_has_other_back_ends_is_found_at_any_depth(others: dict[str, str], alone: bool) -> None:
    """torch makes the backend in a function with this variable; with or without `register_backend` in between."""

    def torchs_function(creator: Any) -> Any:
        backend_config = SimpleNamespace(get_device_backend_map=lambda: {"cpu": "gradwire", **others})
        return creator(), backend_config

    def created() -> bool:
        return _alone("gradwire")

    assert [torchs_function(creator)[0] for creator in (created, lambda: created())] == [alone] * 2
    assert created()  # as under another torch


@pytest.mark.parametrize("name", ["gloo", "NCCL", "undefined"])
def test_names_of_torch_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="already has a backend of this name"):
        gw.register_backend(name)


def test_a_name_that_somebody_else_registered_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = dist.Backend._BackendPlugin(lambda *args: None, False)
    monkeypatch.setitem(dist.Backend._plugins, "THEIRS", plugin)
    monkeypatch.setattr(dist.Backend, "backend_list", [*dist.Backend.backend_list, "theirs"])
    with pytest.raises(UsageError, match="already has a backend of this name"):
        gw.register_backend("theirs")


@pytest.mark.parametrize("name", ["", "a b", "cpu:gradwire", 3])
def test_names_that_torch_could_not_parse_are_refused(name: Any) -> None:
    with pytest.raises(UsageError, match="one-word name"):
        gw.register_backend(name)


def test_wrap_must_be_callable() -> None:
    with pytest.raises(UsageTypeError, match="wrap is 'Recording'"):
        gw.register_backend(wrap="Recording")  # type: ignore[arg-type]


def test_wrap_must_return_a_group() -> None:
    gw.register_backend("forgetful", wrap=lambda group: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(UsageTypeError, match=r"'forgetful': wrap, given <forgetful:0 .*>, returned None"):
        init("forgetful")


def test_a_wrap_that_raises_leaves_nothing_open() -> None:
    def fail(group: Group) -> Group:
        raise LookupError("no wrapper")

    gw.register_backend("failing", wrap=fail)
    with pytest.raises(LookupError, match="no wrapper"):
        init("failing")


def test_options_of_other_back_ends_are_refused() -> None:
    gw.register_backend()
    with pytest.raises(UsageError, match="pg_options='fast' is not supported"):
        init(pg_options="fast")


OPTION_CLASSES = [
    "AllgatherOptions", "AllreduceCoalescedOptions", "AllreduceOptions", "AllToAllOptions", "BarrierOptions",
    "BroadcastOptions", "GatherOptions", "ReduceOptions", "ReduceScatterOptions", "ScatterOptions",
]  # fmt: skip


@pytest.mark.parametrize("name", OPTION_CLASSES)
def test_untouched_options_warn_of_nothing(name: str) -> None:
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
