"""`as_process_group`: a gradwire group with c10d's API, for everything in torch that takes a ProcessGroup.

c10d's names of collectives are in this file and nowhere else. Each method turns its arguments into one `Collective` and submits it.

Note [How torch reaches a Python group]
Python code (`dist.*`, FSDP2, ZeRO) calls these methods directly. C++ (the DDP reducer, functional collectives) calls virtual
functions of c10d::ProcessGroup, of which torch forwards only some to Python: docs/interop.md lists both. A C++ backend would bypass
the group, its wrappers and its hooks.

Note [Why there is no new_group]
torch would call it with neither the requested backend nor whether the ranks outside the new group take part. Without the method it
creates a group over the store, which gets both right.
"""

# torch's stubs give most of these methods overloads whose parameter names change from version to version.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend, Store

from gradwire.collectives import build
from gradwire.errors import UsageError, UsageTypeError
from gradwire.groups.base import Group
from gradwire.groups.c10d import C10dGroup
from gradwire.interop.process_group_base import ProcessGroupBase, read_settings
from gradwire.interop.work import TorchWork
from gradwire.runtime.dynamo import untraced

Tensors: TypeAlias = Tensor | Sequence[Tensor]
# One tensor, or c10d's list of one; one list of tensors, or c10d's list of one such list. `Collective` checks what is inside.
OneTensor: TypeAlias = Any
OneList: TypeAlias = Any


@untraced
class GradwireProcessGroup(ProcessGroupBase):
    """A gradwire group as torch sees it. Made by `as_process_group`; `.group` is the gradwire group."""

    asynchronous = True
    """Every collective returns its Work at once."""

    def _only(self, method: str, values: Any) -> Any:
        """The single element of a list: c10d's lists date from several devices per process."""
        if len(values) != 1:
            raise UsageError(
                f"{method} on {self.group}: {len(values)} tensors or lists were given. "
                "A process is one rank of the group: pass exactly one."
            )
        return values[0]

    # -- reductions ----------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, *args: Any, **named: Any) -> TorchWork:
        s = read_settings("allreduce", args, named)
        return self.submit(s, build.all_reduce(tensors, op=s.reduce_op, factor=s.factor, label=s.label))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: OneTensor, *args: Any, **named: Any) -> TorchWork:
        s = read_settings("reduce", args, named)
        tensor = tensors if isinstance(tensors, Tensor) else self._only("reduce", tensors)
        return self.submit(s, build.reduce(tensor, dst=s.root, op=s.reduce_op, factor=s.factor, label=s.label))

    def reduce_scatter(self, outputs: OneTensor, inputs: OneList, *args: Any, **named: Any) -> TorchWork:
        s = read_settings("reduce_scatter", args, named)
        if not isinstance(outputs, Tensor):
            outputs, inputs = self._only("reduce_scatter", outputs), self._only("reduce_scatter", inputs)
        op = build.reduce_scatter(outputs, inputs, op=s.reduce_op, factor=s.factor, label=s.label)
        return self.submit(s, op)

    def reduce_scatter_single(self, output: Tensors, input: Tensors, *args: Any, **named: Any) -> TorchWork:
        """Split each input into one part per rank and reduce part i into rank i's output."""
        s = read_settings("reduce_scatter_single", args, named)
        op = build.reduce_scatter_tensor(output, input, op=s.reduce_op, factor=s.factor, label=s.label)
        return self.submit(s, op)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_single_coalesced = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single

    # -- broadcast, gather and scatter ---------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, *args: Any, **named: Any) -> TorchWork:
        s = read_settings("broadcast", args, named)
        return self.submit(s, build.broadcast(tensors, src=s.root, label=s.label))

    def allgather(self, outputs: OneList, inputs: OneTensor, *args: Any, **named: Any) -> TorchWork:
        s = read_settings("allgather", args, named)
        if not isinstance(inputs, Tensor):
            outputs, inputs = self._only("allgather", outputs), self._only("allgather", inputs)
        return self.submit(s, build.all_gather(outputs, inputs, label=s.label))

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], input_list: Sequence[Tensor], *args: Any, **named: Any
    ) -> TorchWork:
        """Gather several tensors: `output_lists[rank][i]` becomes that rank's `input_list[i]`. One operation per tensor."""
        s = read_settings("allgather_coalesced", args, named)
        lengths = [len(outputs) for outputs in output_lists]
        if lengths != [len(input_list)] * self.group.size:
            raise UsageError(
                f"allgather_coalesced on {self.group}: lists of {lengths} outputs for {len(input_list)} inputs. "
                "Pass one list per rank with one output per input."
            )
        per_input = zip(zip(*output_lists), input_list)
        return self.submit(s, *(build.all_gather(outputs, tensor, label=s.label) for outputs, tensor in per_input))

    def all_gather_single(self, output: Tensors, input: Tensors, *args: Any, **named: Any) -> TorchWork:
        s = read_settings("all_gather_single", args, named)
        return self.submit(s, build.all_gather_into_tensor(output, input, label=s.label))

    _allgather_base = all_gather_single
    all_gather_single_coalesced = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single

    def gather(self, outputs: OneList, inputs: OneTensor, *args: Any, **named: Any) -> TorchWork:
        s = read_settings("gather", args, named)
        if not isinstance(inputs, Tensor):
            outputs, inputs = self._only("gather", outputs) if outputs else (), self._only("gather", inputs)
        return self.submit(s, build.gather(inputs, outputs, dst=s.root, label=s.label))

    def gather_single(self, output: Tensor, input: Tensor, *args: Any, **named: Any) -> TorchWork:
        """Concatenate all ranks' inputs in the root's output; the others' outputs are not used."""
        s = read_settings("gather_single", args, named)
        parts = torch.atleast_1d(output).tensor_split(self.group.size) if self.group.rank == s.root else ()
        return self.submit(s, build.gather(input, parts, dst=s.root, label=s.label))

    gather_into_tensor = gather_single

    def scatter(self, outputs: OneTensor, inputs: OneList, *args: Any, **named: Any) -> TorchWork:
        s = read_settings("scatter", args, named)
        if not isinstance(outputs, Tensor):
            outputs, inputs = self._only("scatter", outputs), self._only("scatter", inputs) if inputs else ()
        return self.submit(s, build.scatter(outputs, inputs, src=s.root, label=s.label))

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *args: Any, **named: Any) -> TorchWork:
        s = read_settings("alltoall", args, named)
        return self.submit(s, build.all_to_all(outputs, inputs, label=s.label))

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        *args: Any,
        **named: Any,
    ) -> TorchWork:
        """All-to-all of one tensor, split along dimension 0."""
        s = read_settings("all_to_all_single", args, named)
        op = build.all_to_all_single(
            output, input, output_split_sizes=output_split_sizes, input_split_sizes=input_split_sizes, label=s.label
        )
        return self.submit(s, op)

    alltoall_base = all_to_all_single

    # -- point-to-point and barriers -----------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int) -> TorchWork:
        s = read_settings("send")
        return self.submit(s, build.send(self._only("send", tensors), dst=dst, tag=tag, label=s.label))

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int) -> TorchWork:
        s = read_settings("recv")
        return self.submit(s, build.recv(self._only("recv", tensors), src=src, tag=tag, label=s.label))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> TorchWork:
        s = read_settings("recv_anysource")
        return self.submit(s, build.recv(self._only("recv_anysource", tensors), tag=tag, label=s.label))

    def barrier(self, *args: Any, **named: Any) -> TorchWork:
        s = read_settings("barrier", args, named)
        return self.submit(s, build.barrier(label=s.label))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for every rank. CollectiveTimeout names all missing ones, with or without `wait_all_ranks`."""
        s = read_settings("monitored_barrier", (timeout,))
        self.group.monitored_barrier(self.group.timeout if s.timeout is None else s.timeout)


def as_process_group(
    group: Group, *, devices: Sequence[str] | None = None, backend_name: str = "gradwire", store: Store | None = None
) -> GradwireProcessGroup:
    """A torch.distributed.ProcessGroup that communicates through `group`. Keep it as long as torch uses it.

    `devices` are the device types the group serves, by default the CPU and, if available, CUDA. `store` is what
    `get_group_store()` returns.

    >>> from gradwire.groups import ThreadGroup
    >>> (group,) = ThreadGroup.world(1)
    >>> pg = as_process_group(group)
    >>> pg.allreduce([torch.ones(2)]).wait(), pg.size(), pg.name()
    (True, 1, 'gradwire')
    >>> pg.shutdown()
    """
    if not isinstance(group, Group):
        raise UsageTypeError(
            f"as_process_group({group!r}): not a gradwire Group. Derive from gradwire.Group and implement submit(op)."
        )
    if not backend_name or backend_name.lower() in {"gloo", "nccl", "mpi", "ucc", "xccl", "fake", "undefined"}:
        raise UsageError(
            f"as_process_group of {group}: the name {backend_name!r} belongs to one of torch's backends, whose C++ part torch "
            "would look for. Choose another."
        )
    if devices is None:
        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return GradwireProcessGroup(group, devices=devices, backend_name=backend_name, store=store)


def from_process_group(
    pg: dist.ProcessGroup | Backend | None = None,
    *,
    name: str | None = None,
    timeout: float | None = None,
    store: Store | None = None,
) -> Group:
    """The gradwire group of a process group: the one inside, if `as_process_group` made it, else a new one over `pg`.

    A plain backend such as ProcessGroupGloo is accepted too. None means `dist.group.WORLD`. `name`, `timeout` and `store` are
    for a new group, which does not own `pg`.
    """
    if pg is None:
        pg = dist.group.WORLD
    if not isinstance(pg, (dist.ProcessGroup, Backend)):
        raise UsageTypeError(
            f"from_process_group({pg!r}): not a process group. Call dist.init_process_group first, and only on ranks that "
            "are members of the group."
        )
    if isinstance(pg, GradwireProcessGroup):
        if name is not None or timeout is not None or store is not None:
            raise UsageError(
                f"from_process_group({pg!r}) with name, timeout or store: the group inside has its own. Omit them."
            )
        return pg.group
    return C10dGroup(pg, name=name, timeout=timeout, store=store)
