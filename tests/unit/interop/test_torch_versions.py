"""Every method of torch's ProcessGroup and Work, version by version, is ours, or inherited for a reason that is given here."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.errors import UsageError
from gradwire.groups import ThreadGroup
from gradwire.interop import GradwireProcessGroup, TorchWork, as_process_group
from gradwire.testing import run_ranks

INHERITED = {
    "BackendType": "a type",
    "CUSTOM": "a constant",
    "GLOO": "a constant",
    "MPI": "a constant",
    "NCCL": "a constant",
    "UCC": "a constant",
    "UNDEFINED": "a constant",
    "XCCL": "a constant",
    "_backend_id": "about C++ backends, of which there is none",
    "_register_backend": "about C++ backends",
    "_set_default_backend": "about C++ backends",
    "_get_backend_name": "asks getBackendName",
    "name": "asks getBackendName",
    "_set_group_desc": "calls setGroupDesc",
    "_set_group_name": "calls setGroupName",
    "group_desc": "asks getGroupDesc",
    "group_name": "asks getGroupName",
    "_id": "the identity of the C++ half",
    "bound_device_id": "set and read by torch alone",
    "boxed": "the C++ half as a script object",
    "unbox": "a static method",
    "rank": "given to the constructor",
    "size": "given to the constructor",
    "use_pg_for_symm_mem_rendezvous": "about C++ backends",
}
"""What a gradwire group leaves to torch, and why. A new name of torch's belongs here only if it does not communicate."""

WORK_INHERITED = {"boxed": "the C++ half as a script object", "unbox": "a static method"}


def names_of(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("__") and name != "_pybind11_conduit_v1_"} - set(
        dir(object)
    )


def inherited(cls: type, base: type) -> set[str]:
    def owner(name: str) -> type:
        return next(c for c in cls.__mro__ if name in vars(c))

    return {name for name in names_of(base) if issubclass(base, owner(name))}


def test_every_method_of_torchs_process_group_is_ours_or_inherited_for_a_reason() -> None:
    assert inherited(GradwireProcessGroup, dist.ProcessGroup) <= set(INHERITED)


def test_every_method_of_torchs_work_is_ours_or_inherited_for_a_reason() -> None:
    assert inherited(TorchWork, dist.Work) <= set(WORK_INHERITED)


@pytest.fixture
def alone() -> Iterator[GradwireProcessGroup]:
    (group,) = ThreadGroup.world(1, timeout=5.0)
    yield as_process_group(group, devices=["cpu"])
    group.close()


def gather_single(group: gw.Group) -> list[float]:
    pg = as_process_group(group)
    output = torch.empty(3, 2) if group.rank == 1 else torch.empty(0)
    work = pg.gather_single(output, torch.full((1, 2), float(group.rank)), 1)
    work.wait()
    assert work._get_sequence_number() == 0
    assert 0 < work.timeout.total_seconds() <= group.timeout
    return output.flatten().tolist()


def test_gather_single() -> None:
    assert run_ranks(gather_single, 3) == [[], [0.0, 0.0, 1.0, 1.0, 2.0, 2.0], []]


def test_hooks_before_and_after_an_operation(alone: GradwireProcessGroup) -> None:
    seen: list[tuple[Any, ...]] = []
    alone.register_post_hook(1, lambda args: seen.append(("after", args.op_id, args.work.is_completed())))
    alone.register_pre_hook(2, lambda args: seen.append(("second", args.op_id)))
    alone.register_pre_hook(
        1, lambda args: seen.append((str(args.name).split(".")[-1], args.async_op, len(args.input_tensors), args.root))
    )
    options = dist.AllreduceOptions()
    options.asyncOp = False
    alone.allreduce([torch.ones(2)], options).wait()
    alone.broadcast([torch.ones(2)], 0).wait()
    assert seen == [
        ("ALLREDUCE", False, 1, -1),
        ("second", 0),
        ("after", 0, True),
        ("BROADCAST", True, 1, 0),
        ("second", 1),
        ("after", 1, True),
    ]
    for hook_id in (1, 2, 3):
        alone.unregister_pre_hook(hook_id)
        alone.unregister_post_hook(hook_id)
    alone.barrier().wait()
    assert len(seen) == 6


def test_a_pre_hook_that_raises_prevents_the_operation(alone: GradwireProcessGroup) -> None:
    def refuse(args: Any) -> None:
        raise ValueError("not now")

    alone.register_pre_hook(7, refuse)
    value = torch.ones(2)
    with pytest.raises(ValueError, match="not now"):
        alone.allreduce([value])
    assert alone._get_sequence_number_for_group() == 0


def test_abort_hooks(alone: GradwireProcessGroup) -> None:
    calls: list[int] = []
    assert alone.supports_abort_hooks
    alone.register_abort_hook(2, lambda: calls.append(2))
    alone.register_abort_hook(1, lambda: calls.append(1))
    alone.unregister_abort_hook(3)
    alone.abort()
    assert calls[:2] == [1, 2]
    alone.unregister_abort_hook(1)
    alone.unregister_abort_hook(2)


def test_an_abort_hook_that_raises_prevents_nothing(alone: GradwireProcessGroup) -> None:
    calls: list[int] = []

    def fails() -> None:
        raise ValueError("not now")

    alone.register_abort_hook(1, fails)
    alone.register_abort_hook(2, lambda: calls.append(2))
    with pytest.raises(ValueError, match="not now"):
        alone.abort()
    assert calls == [2]
    assert isinstance(alone.group.failure, gw.errors.GroupAborted)


def fail_alone(group: gw.Group) -> int:
    pg, calls = as_process_group(group), []
    pg.register_abort_hook(1, lambda: calls.append(group.rank))
    if group.rank == 0:
        with pytest.raises(gw.errors.CollectiveTimeout):
            group.submit(gw.collectives.barrier().within(0.05)).wait()
    return len(calls)


def test_abort_hooks_are_called_when_an_operation_fails() -> None:
    assert run_ranks(fail_alone, 2)[0] >= 1


def test_what_a_group_cannot_do(alone: GradwireProcessGroup) -> None:
    assert not alone.supports_reconfigure
    assert not alone.supports_window
    for refused in (lambda: alone.reconfigure(None), alone.get_reconfigure_handle, alone.new_window):
        with pytest.raises(UsageError, match=r"of <threads rank 0 of 1"):
            refused()
    assert alone.get_backend(torch.device("cpu")) is alone
