"""A stage where a hook is expected: every entry point's error states how to make it a hook."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire import hooks
from gradwire.groups import Group
from gradwire.interop import as_fsdp_hook, as_torch_hook
from gradwire.testing import check_hook, simulate

STAGES: dict[str, Any] = {
    "random_k(0.5)": hooks.random_k(0.5),
    "cast(torch.bfloat16)": hooks.cast(torch.bfloat16),
    "scaled_cast(torch.float16)": hooks.scaled_cast(torch.float16),
    "clip(norm=1.0)": hooks.clip(norm=1.0),
    "clip(value=2.0)": hooks.clip(value=2.0),
    "add_noise(std=0.1)": hooks.add_noise(std=0.1),
    "error_feedback()": hooks.error_feedback(),
}

DOORS: dict[str, Callable[[Group, Any], Any]] = {
    "set_hook": lambda group, stage: gw.DistributedDataParallel(nn.Linear(1, 1), process_group=group).set_hook(stage),
    "register_comm_hook": lambda group, stage: gw.DistributedDataParallel(
        nn.Linear(1, 1), process_group=group
    ).register_comm_hook(None, stage),
    "replicate": lambda group, stage: gw.replicate(nn.Linear(1, 1), group=group, hook=stage),
    "as_torch_hook": lambda group, stage: as_torch_hook(stage, group),
    "as_fsdp_hook": lambda group, stage: as_fsdp_hook(stage, group),
    "diloco": lambda group, stage: hooks.diloco(every=2, hook=stage),
    "after": lambda group, stage: hooks.after(1, stage),
    "partition": lambda group, stage: hooks.partition({"*": stage}),
    "hierarchical": lambda group, stage: hooks.hierarchical(inside=hooks.mean(), across=stage),
    "simulate": lambda group, stage: simulate(stage, [torch.ones(1)]),
    "check_hook": lambda group, stage: check_hook(stage),
}


@pytest.mark.parametrize("door", DOORS)
def test_the_error_shows_the_chain(group: Group, door: str) -> None:
    for written, stage in STAGES.items():
        with pytest.raises((gw.HookError, TypeError), match=re.escape(f"chain({written}, mean())")) as caught:
            DOORS[door](group, stage)
        assert door in str(caught.value)


@pytest.mark.parametrize("written", STAGES)
def test_the_chain_it_shows_can_be_set(group: Group, written: str) -> None:
    assert repr(STAGES[written]) == written
    DOORS["set_hook"](group, hooks.chain(STAGES[written], hooks.mean()))


@pytest.mark.parametrize("wrong", ["mean", print, 3])
def test_anything_else_is_named(group: Group, wrong: Any) -> None:
    with pytest.raises(gw.HookError, match=rf"`hook` must be a CommHook, got {re.escape(repr(wrong))}"):
        DOORS["set_hook"](group, wrong)
