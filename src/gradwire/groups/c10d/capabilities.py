"""Which engine serves a process group on a device, and what it supports: known engines by name, Python ones by their class.

Note [What a group written in Python supports]
A subclass of torch's ProcessGroup inherits a method for every collective. So the class is inspected, once, for those that it
overrides; what it lacks is composed of them (`collectives.lower`). Nothing is tried on the wire, where ranks would get out of step.
A method that is abstract, or can only raise NotImplementedError, does not count. What a C++ backend of its supports counts too.

The class does not show which tensors and reductions a method can handle, so it gets no more than torch's DDP would pass: plain
tensors of the usual dtypes, one at a time, and SUM as the only reduction. `reduce` is not used: some engines write into the tensors
of ranks that are not the root.

Its methods may block until the peers have called too, unless the class declares `asynchronous = True`, as our own adapter does:
then they are called by the submitting thread.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import BuiltinFunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from gradwire.collectives import Collective, OpKind, ReduceOp
from gradwire.collectives.timeouts import LONGEST
from gradwire.groups.c10d.engine import GLOO, NCCL, C10dEngine, call, takes_tensors
from gradwire.groups.c10d.python_work import adapt
from gradwire.groups.failure.store_calls import innermost
from gradwire.recorder.source import derived_id

METHODS: Mapping[OpKind, tuple[str, ...]] = {
    OpKind.ALL_REDUCE: ("allreduce",),
    OpKind.BROADCAST: ("broadcast",),
    OpKind.ALL_GATHER: ("allgather",),
    OpKind.ALL_GATHER_INTO_TENSOR: (
        "_allgather_base",
        "all_gather_single",
        "allgather_into_tensor_coalesced",
        "all_gather_single_coalesced",
    ),
    OpKind.REDUCE_SCATTER: ("reduce_scatter",),
    OpKind.REDUCE_SCATTER_TENSOR: (
        "_reduce_scatter_base",
        "reduce_scatter_single",
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_single_coalesced",
    ),
    OpKind.ALL_TO_ALL: ("alltoall",),
    OpKind.ALL_TO_ALL_SINGLE: ("alltoall_base", "all_to_all_single"),
    OpKind.GATHER: ("gather",),
    OpKind.SCATTER: ("scatter",),
    OpKind.SEND: ("send",),
    OpKind.RECV: ("recv",),
    OpKind.BARRIER: ("barrier",),
}
"""The method names of each kind in torch's versions, in search order."""

_RECV_ANY = "recv_anysource"
_NAMES = frozenset({_RECV_ANY}).union(*METHODS.values())
_KINDS = frozenset(METHODS)


def find_engine(pg: Any, device: torch.device) -> tuple[Any, C10dEngine]:
    """The object to call for tensors on `device`, and what is known about it."""
    own = own_methods(pg)
    if own:
        beneath = _cpp_backends(pg).get(device.type)
        return pg, _python_engine(pg, own, None if beneath is None else _engine_named(name_of(beneath), device))
    backend = pg._get_backend(device) if isinstance(pg, dist.ProcessGroup) else pg
    own = own_methods(backend)  # torch 2.15 lets Python derive from Backend
    return backend, _python_engine(backend, own, None) if own else _engine_named(name_of(backend), device)


def name_of(pg: Any) -> str:
    """The name of a process group or backend; its class name if it has none."""
    name = pg.name() if callable(getattr(pg, "name", None)) else getattr(pg, "name", "")
    return str(name) if name and name != "undefined" else type(pg).__name__


def identity_of(pg: Any) -> int | None:
    """An identity for records that all ranks of a process group derive alike; None if torch does not list it."""
    try:
        return derived_id("c10d", pg.group_name, dist.get_process_group_ranks(pg))
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return None


def engines_of(pg: Any) -> dict[str, str]:
    """By type of device: the name of the C++ backend that serves it. Empty for a group written in Python."""
    return {device: name_of(backend) for device, backend in _cpp_backends(pg).items()}


def store_of(pg: Any) -> Any:
    """The store of a process group; None if it has none that works: torch's FakeStore has no methods at all, and once its Python
    half is gone it is an object of the abstract class."""
    try:
        store = pg.get_group_store()
    except (AttributeError, RuntimeError):
        return None
    inner = innermost(store)
    in_python = type(inner).__dictoffset__ != 0  # C++ binds its classes without a dict
    abstract = type(inner) is Store or (in_python and isinstance(inner, Store) and type(inner).add is Store.add)
    return None if abstract else store


def timeout_of(pg: Any) -> float | None:
    """The timeout, in seconds, of a process group; the longest, if it has several backends. None if it has no C++ backend."""
    backends = _cpp_backends(pg).values() if isinstance(pg, dist.ProcessGroup) else [pg]
    options: list[Any] = [getattr(backend, "options", None) for backend in backends]
    limits = [each._timeout.total_seconds() for each in options if hasattr(each, "_timeout")]
    return min(max(limits), LONGEST) if limits else None


def can_split(pg: Any) -> bool:
    """Whether it has a working `split_group`; a group written in Python must override it."""
    method = getattr(pg, "split_group", None)
    return method is not None and not (own_methods(pg) and _is_missing(pg, method))


def own_methods(pg: Any) -> Mapping[str, Callable[..., Any]]:
    """The collectives that a group implements in Python, by c10d's names."""
    found = {name: getattr(pg, name, None) for name in _NAMES}
    return {name: method for name, method in found.items() if callable(method) and not _is_missing(pg, method)}


def _is_missing(pg: Any, method: Any) -> bool:
    """Whether a method is only inherited from C++, abstract, or can do nothing but raise NotImplementedError."""
    function = getattr(method, "__func__", method)
    if isinstance(function, BuiltinFunctionType):
        return getattr(method, "__self__", None) is pg
    code = getattr(function, "__code__", None)
    if getattr(function, "__isabstractmethod__", False):
        return True
    if code is None or "NotImplementedError" not in code.co_names:
        return False
    return not any(step.opname.startswith("RETURN") for step in dis.get_instructions(code))


def _engine_named(name: str, device: torch.device) -> C10dEngine:
    """The engine of that name. torch has several of NCCL's: "nccl" is "nccl2" from 2.15 on. An unknown one is assumed to support
    what gloo does, and on a device to order streams, as torch demands of a Work there; gloo and MPI block the host instead."""
    if name == GLOO.name:
        return GLOO
    if name.startswith(NCCL.name):
        return replace(NCCL, name=name)
    return C10dEngine(name, GLOO.takes, call, stream_ordered=device.type != "cpu" and name != "mpi")


def _cpp_backends(pg: Any) -> dict[str, Any]:
    """By type of device: the C++ backends of a process group, as torch's own class finds them, even if `pg` overrides that."""
    torchs = dist.ProcessGroup
    devices = torchs._device_types.__get__(pg) if isinstance(pg, torchs) else ()
    return {device.type: torchs._get_backend(pg, device) for device in devices}


def _python_engine(pg: Any, own: Mapping[str, Callable[..., Any]], beneath: C10dEngine | None) -> C10dEngine:
    """See Note [What a group written in Python supports]."""
    kinds = {kind: next((name for name in names if name in own), None) for kind, names in METHODS.items()}

    def method_of(op: Collective) -> str | None:
        """The method for `op`, unless it asks for more than every implementation can be expected to support."""
        if op.reduce_op not in (None, ReduceOp.SUM) or not takes_tensors(op, _KINDS):
            return None
        if op.kind is OpKind.RECV and op.peer is None:
            return _RECV_ANY if _RECV_ANY in own else None
        return kinds.get(op.kind)

    def takes(op: Collective) -> bool:
        return method_of(op) is not None or (beneath is not None and beneath.takes(op))

    spelled = _Spelling(pg, {METHODS[kind][0]: name for kind, name in kinds.items() if name is not None})

    def submit(pg: Any, op: Collective, timeout: float) -> Any:
        method = method_of(op)
        if method is None:
            assert beneath is not None
            return beneath.call(pg, op, timeout)
        return adapt(call(spelled, op, timeout), op, f"{type(pg).__name__}.{method}", timeout)

    ordered = beneath is not None and beneath.stream_ordered
    may_block = not getattr(pg, "asynchronous", False)
    return C10dEngine(name_of(pg), takes, submit, stream_ordered=ordered, may_block=may_block)


class _Spelling:
    """A process group under the names that `engine.call` uses."""

    def __init__(self, pg: Any, names: Mapping[str, str]) -> None:
        self._pg = pg
        self._names = names

    def __getattr__(self, name: str) -> Any:
        actual = self._names.get(name, name)
        method = getattr(self._pg, actual)
        if actual.endswith("_coalesced"):
            return lambda whole, part, options: method([whole], [part], options)
        return method
