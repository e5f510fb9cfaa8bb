"""torch.distributed's function names as methods, each one line over `submit`. Mixed into every Group.

All return the Work; unless `async_op` is set, it is finished when they return. Ranks are those of the group.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradwire.collectives import Collective, ReduceOp, build
from gradwire.collectives.build import SUM, Factor, Tensors
from gradwire.groups.work import Work

Parts = Sequence[Tensor]
Sizes = Sequence[int] | None


class Verbs:
    """Convenience over `submit`, which also takes what has no parameter here, such as the `factor` of a reduce-scatter."""

    def submit(self, op: Collective) -> Work:
        raise NotImplementedError

    def run(self, op: Collective) -> Work:
        """Start `op` and wait for it."""
        work = self.submit_and_wait(op)
        if work.ledger.hook_errors:
            work.ledger.raise_hook_error()
        return work

    def submit_and_wait(self, op: Collective) -> Work:
        """Like `run`, without the errors of completion hooks. A group that is faster if the caller waits overrides this."""
        work = self.submit(op)
        work.wait_done()
        return work

    def _do(self, op: Collective, async_op: bool) -> Work:
        return self.submit(op) if async_op else self.run(op)

    def all_reduce(
        self, tensors: Tensors, op: ReduceOp = SUM, *, factor: Factor = None, async_op: bool = False, label: str = ""
    ) -> Work:
        """Reduce over all ranks, in place; a list of tensors is one operation."""
        return self._do(build.all_reduce(tensors, op=op, factor=factor, label=label), async_op)

    def broadcast(self, tensors: Tensors, src: int, *, async_op: bool = False, label: str = "") -> Work:
        """Make every rank's tensors equal to those of `src`, in place."""
        return self._do(build.broadcast(tensors, src=src, label=label), async_op)

    def reduce(self, tensor: Tensor, dst: int, op: ReduceOp = SUM, *, async_op: bool = False, label: str = "") -> Work:
        """Reduce over all ranks into the tensor of `dst`."""
        return self._do(build.reduce(tensor, dst=dst, op=op, label=label), async_op)

    def all_gather(self, outputs: Parts, tensor: Tensor, *, async_op: bool = False, label: str = "") -> Work:
        """Fill `outputs[i]` with rank i's `tensor`."""
        return self._do(build.all_gather(outputs, tensor, label=label), async_op)

    def all_gather_into_tensor(
        self, outputs: Tensors, inputs: Tensors, *, async_op: bool = False, label: str = ""
    ) -> Work:
        """Concatenate all ranks' inputs into each output."""
        return self._do(build.all_gather_into_tensor(outputs, inputs, label=label), async_op)

    def reduce_scatter(
        self, output: Tensor, inputs: Parts, op: ReduceOp = SUM, *, async_op: bool = False, label: str = ""
    ) -> Work:
        """Reduce `inputs[i]` over all ranks into rank i's `output`."""
        return self._do(build.reduce_scatter(output, inputs, op=op, label=label), async_op)

    def reduce_scatter_tensor(
        self, outputs: Tensors, inputs: Tensors, op: ReduceOp = SUM, *, async_op: bool = False, label: str = ""
    ) -> Work:
        """Split each input into one part per rank and reduce part i into rank i's output."""
        return self._do(build.reduce_scatter_tensor(outputs, inputs, op=op, label=label), async_op)

    def all_to_all(self, outputs: Parts, inputs: Parts, *, async_op: bool = False, label: str = "") -> Work:
        """Send `inputs[j]` to rank j and receive `outputs[i]` from rank i."""
        return self._do(build.all_to_all(outputs, inputs, label=label), async_op)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_split_sizes: Sizes = None,
        input_split_sizes: Sizes = None,
        *,
        async_op: bool = False,
        label: str = "",
    ) -> Work:
        """All-to-all of one tensor, split along dimension 0."""
        op = build.all_to_all_single(
            output, tensor, output_split_sizes=output_split_sizes, input_split_sizes=input_split_sizes, label=label
        )
        return self._do(op, async_op)

    def gather(
        self, tensor: Tensor, outputs: Parts | None = None, dst: int = 0, *, async_op: bool = False, label: str = ""
    ) -> Work:
        """Gather every rank's tensor on `dst`."""
        return self._do(build.gather(tensor, outputs, dst=dst, label=label), async_op)

    def scatter(
        self, output: Tensor, inputs: Parts | None = None, src: int = 0, *, async_op: bool = False, label: str = ""
    ) -> Work:
        """Send `inputs[i]` of `src` to rank i."""
        return self._do(build.scatter(output, inputs, src=src, label=label), async_op)

    def send(self, tensor: Tensor, dst: int, tag: int = 0, *, async_op: bool = False, label: str = "") -> Work:
        """Send to `dst`; done when received."""
        return self._do(build.send(tensor, dst=dst, tag=tag, label=label), async_op)

    def recv(
        self, tensor: Tensor, src: int | None = None, tag: int = 0, *, async_op: bool = False, label: str = ""
    ) -> Work:
        """Receive from `src`, or from any rank; the Work's `source_rank()` is the sender."""
        return self._do(build.recv(tensor, src=src, tag=tag, label=label), async_op)

    def barrier(self, *, async_op: bool = False, label: str = "") -> Work:
        """Wait for every rank."""
        return self._do(build.barrier(label=label), async_op)

    def monitored_barrier(self, timeout: float, *, label: str = "monitored_barrier") -> None:
        """Wait at most `timeout` seconds for every rank; CollectiveTimeout names the missing ones in `.missing`."""
        self.submit(build.barrier(label=label).within(timeout)).wait()
