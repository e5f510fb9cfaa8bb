"""Policies refuse invalid values; torch's flags become policies."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from gradwire.errors import UsageError, UsageTypeError
from gradwire.groups import Group
from gradwire.parallel import DistributedDataParallel as DDP, replicate
from gradwire.parallel.torch_arguments import buckets_policy, buffers_policy
from gradwire.policies import Buckets, Buffers, Gradients, Graph, MiB, ScaleCheck


@pytest.mark.parametrize("limits", [(), (0,), (5, -1)])
def test_a_bucket_must_be_allowed_something(limits: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="every bucket must be allowed more than 0 bytes"):
        Buckets(limits)


@pytest.mark.parametrize("values", [{"every": 0}, {"tolerance": 0.0}, {"tolerance": 1.0}, {"tolerance": -1}])
def test_a_scale_check_must_make_sense(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="every must be at least 1 and tolerance between 0 and 1"):
        ScaleCheck(**values)


def test_defaults_are_torchs() -> None:
    assert Buckets() == Buckets((1 * MiB, 25 * MiB), from_start=False)
    assert buckets_policy(None, None) == Buckets()
    assert buffers_policy(None, None) is Buffers.EVERY_FORWARD


@pytest.mark.parametrize(
    ("cap", "caps", "buckets", "bytes_cap"),
    [
        (None, None, Buckets(), 25 * MiB),
        (2, (), Buckets((2 * MiB,)), 2 * MiB),
        (0.5, None, Buckets((MiB // 2,)), MiB // 2),
        (1e-9, None, Buckets((1,)), 0),
        (None, (1, 3), Buckets((MiB, 3 * MiB), from_start=True), 3 * MiB),
        (9, (1,), Buckets((MiB,), from_start=True), MiB),
    ],
)
def test_caps(group: Group, cap: float | None, caps: Any, buckets: Buckets, bytes_cap: int) -> None:
    assert buckets_policy(cap, caps) == buckets
    assert (
        DDP(nn.Linear(1, 1), process_group=group, bucket_cap_mb=cap, bucket_cap_mb_list=caps).bucket_bytes_cap
        == bytes_cap
    )


@pytest.mark.parametrize("static", [False, True])
def test_static_beats_searching(group: Group, static: bool) -> None:
    ddp = DDP(nn.Linear(1, 1), process_group=group, find_unused_parameters=True, static_graph=static)
    assert ddp.replica.graph is (Graph.STATIC if static else Graph.FIND_UNUSED)


@pytest.mark.parametrize(
    ("flags", "policy", "warned"),
    [
        ({"broadcast_buffers": True}, Buffers.EVERY_FORWARD, "Use `forward_sync_buffers`"),
        ({"broadcast_buffers": False}, Buffers.NEVER, "Use `forward_sync_buffers`"),
        ({"forward_sync_buffers": False}, Buffers.AT_START, None),
        ({"forward_sync_buffers": True}, Buffers.EVERY_FORWARD, None),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, Buffers.EVERY_FORWARD, "ignored because"),
    ],
)
def test_the_two_flags_about_buffers(flags: dict[str, bool], policy: Buffers, warned: str | None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = buffers_policy(flags.get("broadcast_buffers"), flags.get("forward_sync_buffers"))
    assert made is policy
    assert [warned in str(w.message) for w in caught] == ([True] if warned else [])


def test_every_member_says_what_it_means() -> None:
    for policy in (Graph, Gradients, Buffers):
        assert policy.__doc__
        assert len({member.value for member in policy}) == len(policy)


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        (
            {"nonfinite": True},
            "nonfinite=True: not a gradwire.policies.NonFinite. Pass NonFinite.PASS, NonFinite.RECORD, NonFinite.SKIP or "
            "NonFinite.RAISE.",
        ),
        ({"nonfinite": "raise"}, "nonfinite='raise': not a gradwire.policies.NonFinite"),
        ({"graph": "static"}, "Pass Graph.ALL_USED, Graph.FIND_UNUSED or Graph.STATIC."),
        ({"gradients": "views"}, "not a gradwire.policies.Gradients"),
        ({"buffers": False}, "not a gradwire.policies.Buffers"),
        ({"buckets": 25}, r"buckets=25: not a gradwire.policies.Buckets. Pass Buckets\(...\)."),
        ({"scale_check": True}, r"Pass ScaleCheck\(...\)."),
    ],
)
def test_a_value_that_is_no_policy_is_refused(group: Group, values: dict[str, Any], advice: str) -> None:
    with pytest.raises(UsageTypeError, match=advice):
        replicate(nn.Linear(1, 1), group=group, **values)
    if "nonfinite" in values:
        with pytest.raises(UsageTypeError, match=advice):
            DDP(nn.Linear(1, 1), process_group=group, **values)


@pytest.mark.parametrize("config", [torch.bfloat16, True, {"param_dtype": torch.bfloat16}])
def test_mixed_precision_without_a_dtype_is_refused(group: Group, config: Any) -> None:
    with pytest.raises(UsageTypeError, match="has none of param_dtype, reduce_dtype and buffer_dtype"):
        DDP(nn.Linear(1, 1), process_group=group, mixed_precision=config)
