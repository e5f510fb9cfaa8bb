"""Backwards in which gradients arrive in unusual ways, in every mode: the gradients of torch's own DDP, bit by bit.

Undefined gradients (fused weight gradients, functions that return None), recomputed forwards and converted parameters.
A world runs a program with its flags, each first on torch's class, then on ours.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from gradwire.groups import Group
from gradwire.parallel import DistributedDataParallel as DDP
from gradwire.testing import run_ranks

STEPS = 7
WIDTH = 6


class FusedProduct(torch.autograd.Function):
    """`x @ w.T`, whose backward accumulates into `w.grad` itself, as the fused weight gradients of apex and Megatron do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = w
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,), w = ctx.saved_tensors, ctx.weight
        if w.grad is None:
            w.grad = grad.T @ x
        else:
            w.grad += grad.T @ x
        return grad @ w, None


class Dropped(torch.autograd.Function):
    """`x * w` without a gradient for w where `absent`, as of an expert that got no tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, absent: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.absent = absent
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return grad * w, None if ctx.absent else (grad * x).sum(0), None


class Fused(nn.Module):
    """Fused products alone, or with ordinary layers around them."""

    def __init__(self, *, alone: bool) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 3 for _ in range(3))
        self.last = nn.Identity() if alone else nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        for weight in self.weights:
            x = FusedProduct.apply(x, weight)
        return self.last(x)  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Weights whose gradients are undefined where `absent(number, step, rank)`."""

    def __init__(self, absent: Callable[[int, int, int], bool], *, alone: bool) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH) for _ in range(3))
        self.last = nn.Identity() if alone else nn.Linear(WIDTH, 2)
        self.absent = absent

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        for number, weight in enumerate(self.weights):
            x = Dropped.apply(x, weight, self.absent(number, step, rank))
        return self.last(x)  # type: ignore[no-any-return]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)
        )

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def plain(model: nn.Module, x: Tensor, step: int, rank: int) -> Tensor:
    return model(x, step, rank)  # type: ignore[no-any-return]


def recomputed(
    model: nn.Module, x: Tensor, step: int, rank: int, *, early_stop: bool = True, reentrant: bool = False
) -> Tensor:
    with contextlib.nullcontext() if reentrant else set_checkpoint_early_stop(early_stop):
        out: Tensor = checkpoint(model, x, step, rank, use_reentrant=reentrant)
    return out


Run = Callable[[nn.Module, Tensor, int, int], Tensor]
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Run]] = {
    "fused weight gradients": (lambda: Fused(alone=False), plain),
    "fused weight gradients alone": (lambda: Fused(alone=True), plain),
    "an expert without tokens now and then": (
        lambda: Experts(lambda n, step, rank: (n + step) % 3 == rank, alone=False),
        plain,
    ),
    "an expert without tokens on all ranks": (lambda: Experts(lambda n, step, rank: n == step % 3, alone=False), plain),
    "all undefined on one rank in one step": (
        lambda: Experts(lambda n, step, rank: step == 3 and rank == 1, alone=True),
        plain,
    ),
    "all undefined on all ranks in one step": (lambda: Experts(lambda n, step, rank: step == 3, alone=True), plain),
    "recomputed": (Layers, recomputed),
    "recomputed to the end": (Layers, functools.partial(recomputed, early_stop=False)),
    "recomputed, reentrant": (Layers, functools.partial(recomputed, reentrant=True)),
    "recomputed, fused": (lambda: Fused(alone=False), recomputed),
}
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 1e-4},
    "small buckets and views": {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "static and views": {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4},
}


HALVES = (
    ("plain", "views", "small buckets", "unused", "static and views"),
    ("plain", "small buckets and views", "unused", "static"),
)


def with_flags(programs: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Every program with every flag, and every second one with each set of them."""
    return {program: HALVES[number % 2] for number, program in enumerate(programs)}


FLAGS_OF = with_flags(PROGRAMS)


def train(ddp: nn.Module, run: Run, rank: int, device: str = "cpu") -> list[list[Tensor | None]]:
    """The gradients of each step; parameters do not change, so that one wrong step does not spoil the next."""
    found = []
    for step in range(STEPS):
        if step != 5:  # where gradients are kept, the next ones are added
            ddp.zero_grad(set_to_none=step != 4)
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).to(device).requires_grad_()
        run(ddp, x, step, rank).square().sum().backward()
        found.append([None if p.grad is None else p.grad.detach().clone().cpu() for p in ddp.parameters()])
    return found


def outcome(make: Callable[[], nn.Module], rank: int, whose: Any, program: str, device: str = "cpu") -> Any:
    """The gradients, or the text of an error that both ranks have."""
    torch.manual_seed(0)
    try:
        return train(whose(make().to(device)), PROGRAMS[program][1], rank, device)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"


def outcomes(program: str, rank: int, device: str = "cpu") -> dict[str, Any]:
    """(torch's, ours) by flags, in a world of torch's."""
    done: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in FLAGS_OF[program]:
            ddps = [functools.partial(whose, **FLAGS[name]) for whose in (TorchDDP, DDP)]
            done[name] = [outcome(PROGRAMS[program][0], rank, whose, program, device) for whose in ddps]
    return done


CONVERSIONS = {
    "double": torch.float64,
    "bfloat16": torch.bfloat16,
    "and back": torch.float32,
    "one layer": torch.float32,
}
"""Of the whole model, or of a layer inside it; with the dtype of inputs."""


def convert(ddp: nn.Module, layers: Layers, conversion: str) -> None:
    if conversion != "one layer":
        (ddp.bfloat16() if conversion == "and back" else ddp).to(CONVERSIONS[conversion])
        return
    layers.layers[2].double()
    layers.layers[2].register_forward_pre_hook(lambda module, inputs: (inputs[0].double(),))
    layers.layers[2].register_forward_hook(lambda module, inputs, output: output.float())


def converted(rank: int, conversion: str, flags: dict[str, Any], *, before: bool) -> Any:
    """Steps of a model that is converted before it is wrapped, by torch's DDP, or after, by ours, at the third step."""
    torch.manual_seed(0)
    layers = Layers()
    if before:
        convert(layers, layers, conversion)
        ddp: nn.Module = TorchDDP(layers, **flags)
    else:
        ddp = DDP(layers, **flags)
    found = []
    for step in range(STEPS):
        if step == 3 and not before:
            convert(ddp, layers, conversion)
        ddp.zero_grad()
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp(x.to(CONVERSIONS[conversion]) if before or step >= 3 else x, step, rank).square().sum().backward()
        found.append([None if p.grad is None else p.grad.detach().clone() for p in ddp.parameters()])
    return found[3:]


def differences(torchs: list[list[Tensor | None]], ours: list[list[Tensor | None]]) -> list[tuple[int, int]]:
    """(step, parameter) of the gradients that are not the same bits."""
    return [
        (step, i)
        for step, (theirs, mine) in enumerate(zip(torchs, ours, strict=True))
        for i, (a, b) in enumerate(zip(theirs, mine, strict=True))
        if (a is None) != (b is None) or (a is not None and b is not None and not torch.equal(a, b))
    ]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_gradients_of_torchs_ddp(torch_world: Callable[..., Any], program: str) -> None:
    def rank_main(group: Group) -> dict[str, Any]:
        with torch_world(group, "gloo"):
            return outcomes(program, group.rank)

    for done in run_ranks(rank_main, 2, kind="gloo"):
        for flags, (torchs, ours) in done.items():
            assert not isinstance(torchs, str), (flags, torchs)
            assert not isinstance(ours, str), (flags, ours)
            assert differences(torchs, ours) == [], flags


@pytest.mark.parametrize(("conversion", "names"), with_flags(CONVERSIONS).items())
def test_a_model_converted_after_wrapping_is_like_one_converted_before(
    torch_world: Callable[..., Any], conversion: str, names: tuple[str, ...]
) -> None:
    def rank_main(group: Group) -> dict[str, list[Any]]:
        with torch_world(group, "gloo"):
            return {n: [converted(group.rank, conversion, FLAGS[n], before=b) for b in (True, False)] for n in names}

    for done in run_ranks(rank_main, 2, kind="gloo"):
        for flags, (before, after) in done.items():
            assert differences(before, after) == [], flags
