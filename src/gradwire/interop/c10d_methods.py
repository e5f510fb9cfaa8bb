"""c10d's names of collectives, in this file and nowhere else: each method makes its arguments one `Collective` and submits it."""

# torch's stubs give most of these methods overloads whose parameter names change from version to version.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradwire.collectives import build
from gradwire.errors import UsageError
from gradwire.interop.process_group_base import OverGroup, read_settings
from gradwire.interop.work import TorchWork
from gradwire.runtime.dynamo import untraced

Tensors: TypeAlias = Tensor | Sequence[Tensor]
# One tensor, or c10d's list of one; one list of tensors, or c10d's list of one such list. `Collective` checks what is inside.
OneTensor: TypeAlias = Any
OneList: TypeAlias = Any


@untraced
class C10dMethods(OverGroup):
    """The collectives of a process group, or of a backend."""

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

    def allreduce(self, tensors: Tensors, *args: Any, **named: Any) -> TorchWork:
        s = read_settings("allreduce", args, named)
        return self.submit(s, build.all_reduce(tensors, op=s.reduce_op, factor=s.factor, label=s.label))

    allreduce_coalesced = allreduce_sparse = allreduce

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
