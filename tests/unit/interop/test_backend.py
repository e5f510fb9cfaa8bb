"""register_backend, with one rank: what can go wrong, and the ways to initialize."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradwire as gw
from gradwire import C10dGroup, Group, Recording
from gradwire.errors import UsageError, UsageTypeError
from gradwire.interop import GradwireProcessGroup


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


def test_registering_is_silent_and_may_be_repeated() -> None:
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


def test_a_mixed_back_end_string_gives_gradwire_alone() -> None:
    """torch replaces the whole by the Python group: see docs/interop.md."""
    gw.register_backend()
    init("cpu:gradwire,meta:gloo")
    assert isinstance(dist.group.WORLD, GradwireProcessGroup)


# -- mistakes ------------------------------------------------------------------------------------------------------------


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
