"""SparseLoCo against DiLoCo: 8 simulated learners on the character model of `parity`, over one grid of outer learning rates.

    python -m benchmarks.learners                                  # all rates of both, seed 0
    python -m benchmarks.learners --hooks sparse_loco --rates 0.7 --seed 1

All learners are in one process: their parameters are the rows of one tensor, a step is a vmap over the rows, and every 30 steps
`simulate_outer` runs the hook. Weights, data, AdamW and its schedule are those of `parity --task text`. A run takes about two
minutes of an idle core.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from benchmarks.parity_rank import WARM_UP, Text
from gradwire.hooks import OuterHook, diloco, sparse_loco
from gradwire.testing import simulate_outer
from gradwire.testing.simulate import one_parameter

LEARNERS = 8
EVERY = 30
OUTER_RATES = (0.025, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
"""The grid."""


def hook_of(name: str, rate: float) -> OuterHook:
    """Both as in their papers, but for the outer rate: DiLoCo with Nesterov momentum 0.9, SparseLoCo with a decay of 0.95."""
    if name == "diloco":
        return diloco(every=EVERY, outer_lr=rate)
    return sparse_loco(every=EVERY, outer_lr=rate)


def train(hook: OuterHook, seed: int, steps: int) -> tuple[float, float]:
    """The loss on held-out text after so many steps, and the bytes that a learner sends in an outer step."""
    task = Text()
    model = task.model(torch.Generator().manual_seed(seed))
    names, shapes = zip(*((name, p.shape) for name, p in model.named_parameters()), strict=True)
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    rows = start.repeat(LEARNERS, 1).requires_grad_()
    optimizer = torch.optim.AdamW([rows], lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM_UP) * 0.5 * (1.0 + math.cos(math.pi * step / steps))
    )

    def loss(row: Tensor, inputs: Tensor, answers: Tensor) -> Tensor:
        parts = row.split([shape.numel() for shape in shapes])
        parameters = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return F.cross_entropy(functional_call(model, parameters, (inputs,)).flatten(0, -2), answers.flatten())

    gradients, states = vmap(grad(loss)), None
    data = [torch.Generator().manual_seed(10_000 * (seed + 1) + rank) for rank in range(LEARNERS)]
    for step in range(1, steps + 1):
        inputs, answers = (torch.stack(each) for each in zip(*map(task.batch, data), strict=True))
        rows.grad = gradients(rows.detach(), inputs, answers)
        optimizer.step()
        schedule.step()
        if step % EVERY == 0:
            done = simulate_outer(hook, rows.detach().unbind(), start=start, states=states, step=step // EVERY - 1)
            states = done.states
            rows.detach().copy_(torch.stack(done.parameters))
    sent = hook.outer_wire_bytes(one_parameter(start), LEARNERS)
    return float(loss(rows.detach()[0], *task.exam())), sent or 0.0


def main() -> None:
    """Train, and print a line for each run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hooks", nargs="+", choices=("diloco", "sparse_loco"), default=["diloco", "sparse_loco"])
    parser.add_argument("--rates", nargs="+", type=float, default=list(OUTER_RATES), help="outer learning rates")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=Text.steps, help="a multiple of 30 (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for rate in args.rates:
        for name in args.hooks:
            found, sent = train(hook_of(name, rate), args.seed, args.steps)
            print(f"{name}, outer rate {rate:g}, seed {args.seed}: loss {found:.4f}, {sent:.0f} bytes", flush=True)


if __name__ == "__main__":
    main()
