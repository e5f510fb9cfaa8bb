"""Gradients that a compiled backward reports before it has ended, with a node that behaves like a compiled graph."""

import copy
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradwire.autograd import attach
from gradwire.autograd.compiled import install
from gradwire.autograd.compiled.op import bucket_limits, on_compiled_gradients
from gradwire.errors import ReadyTwice
from gradwire.events import BucketLaunched
from gradwire.groups import Group
from gradwire.hooks import chain, error_feedback, quantize
from gradwire.parallel import DistributedDataParallel as DDP
from helpers.futures import done
from helpers.rank_tests import on_ranks

WIDTH, LAYERS = 8, 6


class _Graph(torch.autograd.Function):
    """`x @ w` for each weight in turn, as one node: its backward computes the gradients one by one and reports some `together`."""

    log: ClassVar[list[Any]] = []
    together: ClassVar[int] = 1

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: int, *weights: Tensor) -> Tensor:
        kept = [x]
        for weight in weights:
            kept.append(kept[-1] @ weight)
        ctx.save_for_backward(*weights, *kept[:-1])
        return kept[-1] * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.saved_tensors) // 2
        weights, inputs = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        results: list[Tensor | None] = [None] * (count + 2)
        positions: list[int] = []
        for i in reversed(range(count)):
            results[i + 2] = inputs[i].T @ grad
            _Graph.log.append(i)
            positions.append(i + 2)
            if len(positions) == _Graph.together or i == 0:
                torch.ops.gradwire.ready([results[p] for p in positions], None, positions, count + 2)
                positions = []
            grad = grad @ weights[i].T
        results[0] = grad if ctx.needs_input_grad[0] else None
        return tuple(results)


class Compiled(nn.Module):
    """Its layers run as one graph; `eager`, another layer, does not."""

    def __init__(self, *, eager: bool = False) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(WIDTH, WIDTH, generator=make) / 3) for _ in range(LAYERS)
        )
        self.eager = nn.Linear(WIDTH, WIDTH) if eager else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Graph.apply(x, 3, *self.weights)
        return y if self.eager is None else self.eager(y)


@pytest.fixture(params=[1, 4], autouse=True)
def together(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """How many gradients an op reports."""
    monkeypatch.setattr(_Graph, "together", request.param)
    return int(request.param)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The layers whose gradients have been computed, and, as text, the buckets that have been launched, in order."""
    entries: list[Any] = []
    monkeypatch.setattr(_Graph, "log", entries)
    return entries


def built(group: Group, module: nn.Module | None = None, **flags: Any) -> DDP:
    """A model with a bucket for each weight."""
    return DDP(module or Compiled(), process_group=group, bucket_cap_mb=WIDTH * WIDTH * 4 / 2**20, **flags)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    loss: Tensor = model(batch(rank, step)).pow(2).mean()
    return loss


def expected(module: nn.Module, size: int, step: int, loss: Callable[..., Tensor] = loss_of) -> list[Tensor]:
    """The mean gradients of all ranks."""
    sums: list[Tensor] = []
    for rank in range(size):
        alone = copy.deepcopy(module)
        alone.zero_grad()
        loss(alone, rank, step).backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in alone.parameters()]
        sums = [a + b for a, b in zip(sums, grads, strict=True)] if sums else grads
    return [s / size for s in sums]


def check(ddp: DDP, wanted: list[Tensor]) -> None:
    for p, grad in zip(ddp.module.parameters(), wanted, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, grad)


def launches(ddp: DDP, log: list[Any]) -> None:
    ddp.replica.reducer.events.listen(lambda event: log.append(f"bucket {event.bucket}"), only=BucketLaunched)


FLAGS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"lazy_bucket_allocation": True},
]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: " ".join(flags) or "plain")
@on_ranks(1)
def test_buckets_are_launched_while_the_graph_still_computes(
    group: Group, log: list[Any], together: int, flags: dict[str, Any]
) -> None:
    ddp = built(group, **flags)
    launches(ddp, log)
    for step in range(4):
        ddp.zero_grad()
        log.clear()
        loss_of(ddp, group.rank, step).backward()
        check(ddp, expected(ddp.module, group.size, step)) if step < 3 else None
    order = [f"bucket {i}" for i in range(LAYERS)]
    assert [entry for entry in log if isinstance(entry, str)] == order
    assert log.index("bucket 0") == together
    assert log.index(f"bucket {LAYERS - 1 - together}") < log.index(0)


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: " ".join(flags) or "plain")
@on_ranks(2)
def test_ranks_average_what_is_reported_and_what_is_not(group: Group, flags: dict[str, Any]) -> None:
    ddp = built(group, Compiled(eager=True), **flags)
    for step in range(5):
        ddp.zero_grad(set_to_none=step != 3)
        loss_of(ddp, group.rank, step).backward()
        check(ddp, expected(ddp.module, group.size, step))
    assert ddp.replica.reducer.intake._before_backward is not None


def reported_in_step(ddp: DDP) -> list[int]:
    """How many gradients are reported early in each step from now on."""
    counts: list[int] = []
    finish = ddp.replica.reducer.reductions.wait

    def wait() -> Any:
        counts.append(len(ddp.replica.reducer.intake.compiled.reported))
        return finish()

    ddp.replica.reducer.reductions.wait = wait  # type: ignore[method-assign]
    return counts


@on_ranks(2)
def test_accumulation(group: Group) -> None:
    ddp = built(group)
    counts = reported_in_step(ddp)
    for step in range(3):
        ddp.zero_grad()
        with ddp.no_sync():
            loss_of(ddp, group.rank, step).backward()
        loss_of(ddp, group.rank, step + 10).backward()
        wanted = [expected(ddp.module, group.size, n) for n in (step, step + 10)]
        check(ddp, [a + b for a, b in zip(*wanted, strict=True)])
    assert counts == [LAYERS, LAYERS, LAYERS]  # the first backward, under no_sync, has shown that it is compiled


@on_ranks(2)
def test_accumulation_in_buckets_takes_the_usual_way(group: Group) -> None:
    ddp = built(group, gradient_as_bucket_view=True)
    counts = reported_in_step(ddp)
    for step in range(4):
        ddp.zero_grad(set_to_none=False)
        loss_of(ddp, group.rank, step).backward()
        check(ddp, expected(ddp.module, group.size, step))
    assert counts == [0] * 4


def used_outside(model: Any, rank: int, step: int) -> Tensor:
    """A weight is part of the loss outside the graph as well, so the graph has only one part of its gradient."""
    weight = (model.module if isinstance(model, DDP) else model).weights[2]
    return loss_of(model, rank, step) + weight.pow(2).sum()


def called_twice(model: Any, rank: int, step: int) -> Tensor:
    return loss_of(model, rank, step) + loss_of(model, rank, step + 50)


@pytest.mark.parametrize(("loss", "early"), [(used_outside, LAYERS - 1), (called_twice, 0)])
@on_ranks(2)
def test_a_gradient_with_several_parts_is_not_taken_early(group: Group, loss: Any, early: int) -> None:
    ddp = built(group)
    counts = reported_in_step(ddp)
    for step in range(4):
        ddp.zero_grad()
        loss(ddp, group.rank, step).backward()
        check(ddp, expected(ddp.module, group.size, step, loss))
    assert counts == [0, early, early, early]


@on_ranks(2)
def test_hooks_of_others_run_before_the_reduction(group: Group) -> None:
    ddp = built(group)
    plain = copy.deepcopy(ddp.module)
    weights = ddp.module.weights
    weights[1].register_hook(lambda grad: grad * 2)
    weights[3].register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 3))
    counts = reported_in_step(ddp)
    for step in range(4):
        ddp.zero_grad()
        loss_of(ddp, group.rank, step).backward()
        wanted = expected(plain, group.size, step)
        wanted[1] *= 2
        wanted[3] *= 3
        check(ddp, wanted)
    assert counts == [0, LAYERS - 2, LAYERS - 2, LAYERS - 2]


@pytest.mark.parametrize("to_none", [True, False], ids=["None before", "added to zeros"])
@on_ranks(2)
def test_a_hook_on_an_accumulator_runs_before_the_reduction(group: Group, to_none: bool) -> None:
    ddp = built(group)
    counts = reported_in_step(ddp)
    attach(ddp.module, "weights.4", "before_node", lambda grads: tuple(grad * 2 for grad in grads))
    for step in range(3):
        ddp.zero_grad(set_to_none=to_none)
        loss_of(ddp, group.rank, step).backward()
        wanted = expected(ddp.module, group.size, step)
        wanted[4] *= 2
        check(ddp, wanted)
    assert counts == [0, LAYERS - 1, LAYERS - 1]


@on_ranks(2)
def test_after_a_conversion_and_back(group: Group) -> None:
    """The dtypes are the old ones, and the accumulators are new."""
    ddp = built(group)
    counts = reported_in_step(ddp)
    for step in range(5):
        if step == 2:
            ddp.module.bfloat16().float()
        ddp.zero_grad()
        loss_of(ddp, group.rank, step).backward()
        check(ddp, expected(ddp.module, group.size, step))
    assert counts == [0, *[LAYERS] * 4]


class Heads(Compiled):
    """A trunk that is one graph, and two heads that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return [head(x).pow(2).mean() for head in self.heads]


@pytest.mark.parametrize("to_none", [True, False], ids=["None before", "added to zeros"])
@on_ranks(1)
def test_a_gradient_to_which_a_second_backward_adds_fails_the_step(group: Group, to_none: bool) -> None:
    ddp = built(group, Heads())
    for step in range(2):
        ddp.zero_grad(set_to_none=to_none)
        sum(ddp(batch(group.rank, step))).backward()
    ddp.zero_grad(set_to_none=to_none)
    first, second = ddp(batch(group.rank, 2))
    first.backward(retain_graph=True)
    with pytest.raises(ReadyTwice, match=r"weights\.5.*launched: by two backwards"):
        second.backward()


class Reentrant(Compiled):
    """With `shared`, the last weight is used before the graph as well, in a checkpoint that shows no edge to it."""

    shared = True

    def forward(self, x: Tensor) -> Tensor:
        if self.shared:
            x = checkpoint(lambda x: x @ self.weights[-1], x.requires_grad_(), use_reentrant=True)
        return super().forward(x)


@on_ranks(1)
def test_a_gradient_to_which_a_reentrant_checkpoint_adds_fails_the_step(group: Group) -> None:
    ddp = built(group, Reentrant())
    ddp.module.shared = False
    for step in range(2):
        ddp.zero_grad()
        loss_of(ddp, group.rank, step).backward()
    ddp.module.shared = True
    ddp.zero_grad()
    with pytest.raises(ReadyTwice, match=r"weights\.5"):
        loss_of(ddp, group.rank, 2).backward()


@on_ranks(1)
def test_a_static_graph_counts_the_uses_in_reentrant_checkpoints(group: Group) -> None:
    ddp = built(group, Reentrant(), static_graph=True)
    counts = reported_in_step(ddp)
    for step in range(4):
        ddp.zero_grad()
        loss_of(ddp, group.rank, step).backward()
        check(ddp, expected(ddp.module, group.size, step))
    assert counts == [0, *[LAYERS - 1] * 3]


@on_ranks(2)
def test_a_backward_from_a_parameter_too(group: Group) -> None:
    ddp = built(group)
    weight = ddp.module.weights[5]
    for step in range(3):
        ddp.zero_grad()
        torch.autograd.backward([loss_of(ddp, group.rank, step), weight], [torch.ones(()), torch.ones_like(weight)])
        wanted = expected(ddp.module, group.size, step)
        wanted[5] += 1
        check(ddp, wanted)


@on_ranks(2)
def test_autograd_grad_reduces_nothing(group: Group) -> None:
    ddp = built(group)
    counts = reported_in_step(ddp)
    for step in range(3):
        ddp.zero_grad()
        loss = loss_of(ddp, group.rank, step)
        if group.rank == 0:
            torch.autograd.grad(loss, list(ddp.module.parameters()), retain_graph=True)
        loss.backward()
        check(ddp, expected(ddp.module, group.size, step))
    assert counts[1:] == [LAYERS, LAYERS]


@on_ranks(2)
def test_one_rank_may_be_compiled_and_another_not(group: Group) -> None:
    module = Compiled()
    if group.rank:
        plain = nn.Sequential()  # the same weights, as separate operations
        plain.weights = module.weights
        plain.forward = lambda x: plain_forward(x, module.weights)  # type: ignore[method-assign]
        module = plain  # type: ignore[assignment]
    ddp = built(group, module)
    for step in range(4):
        ddp.zero_grad()
        loss_of(ddp, group.rank, step).backward()
        check(ddp, expected(Compiled(), group.size, step))


def plain_forward(x: Tensor, weights: Any) -> Tensor:
    for weight in weights:
        x = x @ weight
    return x


@on_ranks(2)
def test_hooks_keep_their_states(group: Group) -> None:
    """The same bits with and without early reports, also where a hook remembers what it has not sent."""
    results = []
    for early in (True, False):
        ddp = built(group)
        ddp.set_hook(chain(error_feedback(), quantize(bits=8)))
        counts = reported_in_step(ddp)
        if not early:
            ddp.replica.reducer.intake._compiled_handle.remove()  # type: ignore[union-attr]
        for step in range(5):
            ddp.zero_grad()
            loss_of(ddp, group.rank, step).backward()
        results.append([p.grad for p in ddp.module.parameters()])
        assert counts[-1] == (LAYERS if early else 0)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


class Mine(Exception):
    pass


@on_ranks(1)
def test_an_exception_of_a_hook_comes_out_of_backward(group: Group) -> None:
    ddp = built(group)
    broken = False

    def hook(state: object, bucket: Any) -> Any:
        if broken and bucket.index() == 1:
            raise Mine("mine")
        return done(bucket.buffer())

    ddp.register_comm_hook(None, hook)
    for step in range(2):
        ddp.zero_grad()
        loss_of(ddp, group.rank, step).backward()
    broken = True
    with pytest.raises(Mine, match="mine") as caught:
        loss_of(ddp, group.rank, 2).backward()
    assert "bucket 1" in str(caught.value.__notes__)
    broken = False
    ddp.zero_grad()
    loss_of(ddp, group.rank, 3).backward()  # recovers
    check(ddp, expected(ddp.module, 1, 3))


@on_ranks(1)
def test_nothing_keeps_a_dropped_model_alive(group: Group) -> None:
    ddp = built(group)
    for step in range(3):
        loss_of(ddp, group.rank, step).backward()
        ddp.zero_grad()
    reducer, parameter = weakref.ref(ddp.replica.reducer), weakref.ref(ddp.module.weights[0])
    ddp.replica.detach()
    del ddp
    assert reducer() is None
    assert parameter() is None


class Listener:
    def __init__(self, indices: list[Any] | None = None, name: str = "") -> None:
        self.indices: list[Any] = [] if indices is None else indices
        self.name = name

    def ready(self, indices: list[int], gradients: list[Tensor]) -> None:
        self.indices += [f"{self.name}{i}" for i in indices] if self.name else indices


def test_the_op_outside_a_backward_does_nothing() -> None:
    owner, w = Listener(), torch.ones(2, requires_grad=True)
    handle = on_compiled_gradients([w], owner.ready, (1,))
    assert torch.ops.gradwire.ready([torch.ones(2)], None, [0], 1).numel() == 0
    assert owner.indices == []
    handle.remove()


class _Double(torch.autograd.Function):
    """Reports the first `length` elements of its gradient, as that of a graph with `inputs` inputs."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, length: int, inputs: int) -> Tensor:
        ctx.reported = length, inputs
        return w * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        length, inputs = ctx.reported
        torch.ops.gradwire.ready([grad[:length]], None, [0], inputs)
        return grad * 2, None, None


@pytest.mark.parametrize(("length", "inputs", "calls"), [(2, 3, [0]), (1, 3, []), (2, 2, [])])
def test_a_report_must_fit_the_parameter_and_the_graph(length: int, inputs: int, calls: list[int]) -> None:
    owner, w = Listener(), torch.ones(2, requires_grad=True)
    handle = on_compiled_gradients([w], owner.ready, (1,))
    _Double.apply(w, length, inputs).sum().backward()
    assert owner.indices == calls
    handle.remove()


class _Several(torch.autograd.Function):
    """Reports the gradients of its inputs in these groups."""

    @staticmethod
    def forward(ctx: Any, groups: list[list[int]], *weights: Tensor) -> Tensor:
        ctx.groups = groups
        return torch.stack(weights).sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = [grad + i for i in range(len(ctx.needs_input_grad) - 1)]
        for group in ctx.groups:
            torch.ops.gradwire.ready([grads[i] for i in group], None, [i + 1 for i in group], len(grads) + 1)
        return None, *grads


@pytest.mark.parametrize(
    "groups", [[[0], [1], [2], [3], [4]], [[0, 1, 2, 3, 4]], [[0, 1], [2, 3, 4]], [[0, 1, 2], [3, 4]]]
)
def test_gradients_of_two_models_are_reported_in_the_order_of_the_graph(groups: list[list[int]]) -> None:
    """However they are grouped, which may differ between ranks: it is the order of launches over one group."""
    order: list[Any] = []
    weights = [torch.ones(2, requires_grad=True) for _ in range(5)]
    a, b = Listener(order, "a"), Listener(order, "b")
    handles = [on_compiled_gradients(ws, one.ready, (1,)) for ws, one in ((weights[::2], a), (weights[1::2], b))]
    for _ in range(2):
        order.clear()
        _Several.apply(groups, *weights).sum().backward()
        assert order == ["a0", "b0", "a1", "b1", "a2"]
    handles[0].remove()
    c = Listener(order, "c")  # has the parameters of both from now on
    handles.append(on_compiled_gradients(weights, c.ready, (1,)))
    order.clear()
    _Several.apply(groups, *weights).sum().backward()
    assert order == ["c0", "c1", "c2", "c3", "c4"]
    for handle in handles:
        handle.remove()
    _Several.apply(groups, *weights).sum().backward()
    assert len(order) == 5


def test_other_threads_may_make_models_while_a_graph_is_compiled() -> None:
    owner, w, stop = Listener(), torch.ones(2, requires_grad=True), threading.Event()

    def make() -> None:
        while not stop.is_set():
            handles = [on_compiled_gradients([w], owner.ready, (n,)) for n in range(1, 30)]
            for handle in handles:
                handle.remove()

    thread, interval = threading.Thread(target=make), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(2000):
            bucket_limits()
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_a_torch_whose_inductor_lacks_what_the_pass_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._inductor.config", types.ModuleType("config"))
    monkeypatch.setitem(sys.modules, "gradwire.autograd.compiled.inductor_pass", None)  # so that importing it fails
    install._installer.cache_clear()
    model = torch.nn.Linear(1, 1)
    try:
        install.forward_begins(model, (1,))
        assert install._installer() is None
        assert model not in install._models
    finally:
        install._installer.cache_clear()
