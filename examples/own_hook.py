"""A communication hook in twenty lines: half of the elements travel in each step. See docs/hooks.md.

python examples/own_hook.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import ReduceOp, all_reduce
from gradwire.hooks import BucketSpec, CommHook, Reduced, Reduction, Turn, chain, error_feedback
from gradwire.testing import check_hook, simulate


class Alternate(CommHook):
    """Elements at even places in even steps, the others in odd ones. On the wire: half of what mean() sends."""

    collectives = 1

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        half = slice(turn.step % 2, None, 2)
        part = grad[half].clone()
        yield all_reduce(part, op=ReduceOp.AVG, label=f"bucket {turn.spec.index}")
        value, sent = torch.zeros_like(grad), torch.zeros_like(grad)
        value[half] = part * turn.share
        sent[half] = grad[half]
        return Reduced(value, sent)

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float:
        elements = len(range(step % 2, spec.numel, 2))
        return 2 * (world_size - 1) / world_size * elements * spec.dtype.itemsize

    def __repr__(self) -> str:
        return "Alternate()"


def main() -> None:
    """Try it on simulated ranks, then check it as every hook in gradwire is checked."""
    hook = chain(error_feedback(), Alternate())
    gradients = [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([3.0, 2.0, 1.0, 0.0])]
    first = simulate(hook, gradients)
    print("step 0:", first.reduced[0].value.tolist(), f"for {first.wire_bytes:.0f} bytes a rank")
    second = simulate(hook, gradients, states=first.states, step=1)
    print("step 1:", second.reduced[0].value.tolist(), "with what step 0 did not send")
    check_hook(hook)
    print(hook, "passes all checks")


if __name__ == "__main__":
    main()
