"""Mixed precision, over torch's flags: full-precision parameters and gradients around a forward in low precision."""

import contextlib
import copy
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradwire.errors import GroupAborted, UsageError
from gradwire.groups import Group
from gradwire.hooks.dense import mean
from gradwire.parallel import DistributedDataParallel as DDP
from gradwire.testing import run_ranks
from helpers.rank_tests import on_ranks

WORLD, SMALL = 3, 0.0001
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "unused, views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static, views": {"static_graph": True, "gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": SMALL},
    "skip unused": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
}
DTYPES: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "bf16": (BF16, None),
    "bf16, reduced in bf16": (BF16, BF16),
    "bf16, reduced in fp32": (BF16, FP32),
    "bf16, reduced in fp64": (BF16, FP64),
    "fp16, reduced in bf16": (FP16, BF16),
    "reduced in fp16": (None, FP16),
    "nothing": (None, None),
}


def every_second(rows: Iterable[str], columns: Iterable[str]) -> list[tuple[str, str]]:
    """Every second field of a table: each row and each column with half of the others, and two neighbors of each four."""
    return [(a, b) for i, a in enumerate(rows) for j, b in enumerate(columns) if (i + (j + 1) // 2) % 2 == 0]


def config(param: Any = None, reduce: Any = None, buffer: Any = None, **more: Any) -> Any:
    return SimpleNamespace(param_dtype=param, reduce_dtype=reduce, buffer_dtype=buffer, **more)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.seen: set[Any] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {t.dtype for t in [x, *self.parameters()]}
        return self.last(torch.relu(self.first(x)) * self.frozen)


def inputs(rank: int, step: int = 0) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def made(model: Any = None) -> Any:
    """The same parameters whichever thread draws them."""
    generator, model = torch.Generator().manual_seed(0), Model() if model is None else model
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 3)
    return model


def means(model: nn.Module, param: Any, reduce: Any, batches: list[list[Tensor]]) -> list[Tensor]:
    """The arithmetic: every rank's batches in low precision, summed over steps in full precision, averaged in `reduce`."""
    gradients = []
    for mine in batches:
        total: list[Tensor] | None = None
        for batch in mine:
            low = copy.deepcopy(model).to(param or FP32)
            low(batch.to(param or FP32)).float().pow(2).sum().backward()
            grads = [p.grad.float() for p in low.parameters() if p.grad is not None]
            total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
        assert total is not None
        gradients.append(total)
    dtype = reduce or param or FP32
    return [(sum(g.to(dtype) for g in each) / len(batches)).float() for each in zip(*gradients, strict=True)]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-5, "atol": 1e-6} if dtype.itemsize >= 4 else {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-2}


def check(ddp: DDP, expected: list[Tensor], reduce: torch.dtype) -> None:
    assert {p.dtype for p in ddp.parameters()} == {FP32}
    assert {t.dtype for t in ddp.state_dict().values()} == {FP32}
    grads = [p.grad for p in ddp.parameters() if p.grad is not None]
    for grad, want in zip(grads, expected, strict=True):
        assert grad.dtype == FP32
        torch.testing.assert_close(grad, want, **tolerance(reduce))
    values = torch.cat([g.reshape(-1) for g in grads])
    exact = values.to(reduce).float() == values
    assert exact.all(), f"not the precision of {reduce}"


@pytest.mark.parametrize(("dtypes", "named"), every_second(DTYPES, FLAGS))
def test_every_flag_with_every_dtype_gives_the_mean(dtypes: str, named: str) -> None:
    (param, reduce), flags = DTYPES[dtypes], FLAGS[named]
    reduced_in = reduce or param or FP32

    def rank_main(group: Group) -> list[Tensor]:
        ddp = DDP(made(), process_group=group, mixed_precision=config(param, reduce), **flags)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for step in range(3):
            optimizer.zero_grad(set_to_none=step != 2)
            expected = means(ddp.module, param, reduce, [[inputs(r, step)] for r in range(group.size)])
            output = ddp(inputs(group.rank, step))
            assert ddp.module.seen == {param or FP32} == {output.dtype}
            output.float().pow(2).sum().backward()
            check(ddp, expected, reduced_in)
            optimizer.step()
        return [p.detach() for p in ddp.parameters()]

    first, *others = run_ranks(rank_main, WORLD)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@on_ranks(WORLD)
def test_a_reduction_in_float32_is_not_rounded_to_the_parameters_dtype(group: Group) -> None:
    ddp = DDP(made(), process_group=group, mixed_precision=config(BF16, FP32))
    ddp(inputs(group.rank)).float().pow(2).sum().backward()
    values = torch.cat([p.grad.reshape(-1) for p in ddp.parameters() if p.grad is not None])
    assert (values.to(BF16).float() != values).float().mean() > 0.5


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@on_ranks(WORLD)
def test_no_sync_accumulates_in_full_precision(group: Group, flags: dict[str, Any]) -> None:
    ddp = DDP(made(), process_group=group, mixed_precision=config(BF16, FP32), **flags)
    for step in range(0, 9, 3):
        ddp.zero_grad()
        expected = means(ddp.module, BF16, FP32, [[inputs(r, step + k) for k in range(3)] for r in range(group.size)])
        for k in range(3):
            with ddp.no_sync() if k < 2 else contextlib.nullcontext():
                ddp(inputs(group.rank, step + k)).float().pow(2).sum().backward()
            assert {t.dtype for t in ddp.state_dict().values()} == {FP32}
        check(ddp, expected, FP32)


@pytest.mark.parametrize(
    ("way", "named"),
    every_second(["no_grad", "eval", "inference", "raises", "no backward", "failing backward"], FLAGS),
)
@on_ranks(2)
def test_a_forward_without_a_synchronized_backward_leaves_full_precision(group: Group, way: str, named: str) -> None:
    ddp = DDP(made(), process_group=group, mixed_precision=config(BF16), **FLAGS[named])

    def odd_forward() -> None:
        if way == "raises":
            with pytest.raises(RuntimeError, match="shapes"):
                ddp(torch.ones(5, 3))
        elif way == "no backward":
            ddp(inputs(group.rank))
        elif way == "failing backward":
            # The rank that fails first aborts the other, before or after it has failed by itself.
            with pytest.raises((ZeroDivisionError, GroupAborted), match="division by zero"), ddp.no_sync():
                output = ddp(inputs(group.rank))
                output.register_hook(lambda _: 1 / 0)
                output.sum().backward()
        else:
            mode = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(way, contextlib.nullcontext)
            ddp.train(way != "eval")
            with mode():
                assert ddp(inputs(group.rank)).dtype == BF16
            ddp.train()

    for step in range(3):
        odd_forward()
        assert {t.dtype for t in ddp.state_dict().values()} == {p.dtype for p in ddp.parameters()} == {FP32}
        ddp.zero_grad()
        expected = means(ddp.module, BF16, None, [[inputs(r, step)] for r in range(group.size)])
        ddp(inputs(group.rank, step)).float().pow(2).sum().backward()
        check(ddp, expected, BF16)


class Checkpointed(Model):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {t.dtype for t in [x, *self.parameters()]}
        hidden = checkpoint(self.first, x.requires_grad_(), use_reentrant=self.reentrant)
        return checkpoint(self._rest, hidden, use_reentrant=self.reentrant)

    def _rest(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(torch.relu(hidden) * self.frozen, self.last.weight, self.last.bias)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "re-entrant"])
@on_ranks(2)
def test_checkpoints_compute_again_in_low_precision(group: Group, reentrant: bool) -> None:
    model = made(Checkpointed())
    model.reentrant = reentrant
    ddp = DDP(model, process_group=group, mixed_precision=config(BF16, FP32))
    for step in range(4):
        ddp.zero_grad()
        expected = means(made(), BF16, FP32, [[inputs(r, step)] for r in range(group.size)])
        ddp(inputs(group.rank, step)).float().pow(2).sum().backward()
        check(ddp, expected, FP32)


@on_ranks(2)
def test_two_forwards_and_one_backward(group: Group) -> None:
    ddp = DDP(made(), process_group=group, mixed_precision=config(BF16, FP32), static_graph=True)
    both = ddp(inputs(group.rank, 1)).float().pow(2).sum() + ddp(inputs(group.rank, 2)).float().pow(2).sum()
    both.backward()
    assert {t.dtype for t in ddp.state_dict().values()} == {FP32}
    expected = means(ddp.module, BF16, FP32, [[inputs(r, 1), inputs(r, 2)] for r in range(group.size)])
    for p, want in zip([p for p in ddp.parameters() if p.grad is not None], expected, strict=True):
        torch.testing.assert_close(p.grad, want, rtol=2e-2, atol=2e-2)


class Odd(nn.Module):
    """A recurrent layer, tied weights, integers, statistics, complex numbers, a parameter that DDP ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out, self.tied = nn.LSTM(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.tied.weight = self.out.weight
        self.norm = nn.BatchNorm1d(4)
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.left = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("third", torch.tensor(1 / 3))
        self.dtypes: dict[str, Any] = {}

    def forward(self, x: Tensor, lengths: dict[str, Tensor]) -> Tensor:
        self.dtypes = {n: t.dtype for n, t in [*self.named_parameters(), *self.named_buffers()]}
        self.calls = self.calls + lengths["n"].float()
        y, _ = self.rnn(x)
        y = self.norm(self.tied(self.out(y)))
        return (y.float() * self.phase.abs()).sum() + (y.float() * self.left).sum()


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@on_ranks(2)
def test_every_kind_of_parameter_and_buffer(group: Group, flags: dict[str, Any]) -> None:
    model = made(Odd())
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["left"])
    ddp = DDP(model, process_group=group, mixed_precision=config(BF16, FP32, BF16), **flags)
    before = {n: (t.dtype, t.shape) for n, t in ddp.state_dict().items()}
    for step in range(3):
        ddp.zero_grad()
        ddp(inputs(group.rank, step), {"n": torch.ones(1, dtype=torch.int64)}).backward()
        assert {n: (t.dtype, t.shape) for n, t in ddp.state_dict().items()} == before
    kinds = model.dtypes
    assert kinds["out.weight"] == kinds["rnn.weight_hh_l0"] == kinds["norm.running_mean"] == kinds["calls"] == BF16
    assert kinds["left"] == FP32
    assert kinds["phase"] == torch.complex64
    assert kinds["norm.num_batches_tracked"] == torch.int64
    assert model.calls.item() == 3
    assert model.third.item() == torch.tensor(1 / 3).item()
    assert model.norm.running_mean.abs().sum() > 0
    assert model.tied.weight is model.out.weight
    copy.deepcopy(model)  # the recurrent layer kept no low-precision weight


@on_ranks(1)
def test_a_function_call_with_other_parameters_is_in_low_precision_too(group: Group) -> None:
    ddp = DDP(made(), process_group=group, mixed_precision=config(BF16))
    mine = {f"module.{n}": (2 * p).detach().requires_grad_() for n, p in ddp.module.named_parameters()}
    with ddp.no_sync():
        torch.func.functional_call(ddp, mine, (inputs(0),)).float().sum().backward()
    assert ddp.module.seen == {BF16}
    assert mine["module.first.weight"].grad.dtype == FP32


@pytest.mark.parametrize("settings", [{"keep_low_precision_grads": True}, {"param": torch.int8}])
@on_ranks(1)
def test_what_cannot_be_is_refused(group: Group, settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"mixed_precision=.*(keep_low_precision_grads|param_dtype)"):
        DDP(made(), process_group=group, mixed_precision=config(**settings))


@on_ranks(2)
def test_a_hook_takes_the_place_of_reduce_dtype(group: Group) -> None:
    ddp = DDP(made(), process_group=group, mixed_precision=config(BF16, BF16))
    assert repr(ddp.replica.hook) == "cast(torch.bfloat16) > mean()"
    ddp.set_hook(mean())
    expected = means(ddp.module, BF16, FP32, [[inputs(r)] for r in range(group.size)])
    ddp(inputs(group.rank)).float().pow(2).sum().backward()
    check(ddp, expected, FP32)


@pytest.mark.parametrize("mode", ["model inside", "model outside"])
@on_ranks(1)
def test_compiled(group: Group, mode: str) -> None:
    model: Any = made()
    compiled = lambda m: torch.compile(m, backend="aot_eager")  # noqa: E731
    ddp = DDP(compiled(model) if mode == "model inside" else model, process_group=group, mixed_precision=config(BF16))
    step_of: Callable[[Tensor], Tensor] = compiled(ddp) if mode == "model outside" else ddp
    for step in range(3):
        ddp.zero_grad()
        expected = means(made(), BF16, None, [[inputs(r, step)] for r in range(group.size)])
        step_of(inputs(group.rank, step)).float().pow(2).sum().backward()
        check(ddp, expected, BF16)
