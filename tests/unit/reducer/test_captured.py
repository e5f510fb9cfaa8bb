"""Captured reductions with recorded torch operations in place of CUDA graphs; those are in tests/gpu."""

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire import hooks
from gradwire.collectives import ReduceOp, all_reduce
from gradwire.collectives.reference import perform
from gradwire.errors import HookError, UsageError
from gradwire.hooks import BucketSpec, CommHook, Reduced, Reduction, Turn, capture
from gradwire.reducer.hook import cuda_graphs
from gradwire.reducer.hook.cuda_graphs import CapturedReductions
from gradwire.reducer.hook.driver import Finished
from gradwire.reducer.hook.hook_states import HookStates
from gradwire.runtime import jit
from gradwire.testing import check_hook
from gradwire.testing.laws import alike


class RecordedGraph(TorchDispatchMode):
    """A CUDA graph on the CPU: a capture computes nothing that stays, a replay computes everything, on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema, kwargs, out = func._schema, kwargs or {}, None
        if func.is_view:
            return func(*args, **kwargs)
        if schema.name == "aten::_local_scalar_dense":
            raise RuntimeError("operation not permitted when stream is capturing")
        if not schema.is_mutable:
            out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        written = [
            kwargs.get(a.name, args[i] if i < len(args) else None) for i, a in enumerate(schema.arguments) if a.is_write
        ]
        return out if out is not None else written[0] if schema.returns else None

    def capture_begin(self, **settings: Any) -> None:
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)

    def pool(self) -> tuple[int, int]:
        return 1, 0

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            found = func(*args, **kwargs)
            if out is not None:
                for to, result in zip(*((x if isinstance(x, tuple) else (x,)) for x in (out, found)), strict=True):
                    to.copy_(result)


@pytest.fixture(autouse=True)
def _no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CapturedReductions, "enabled", True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(cuda_graphs, "_alias", lambda t: t)
    monkeypatch.setattr(jit.loop, "compiled", lambda self: None)  # loops over numpy arrays are not torch operations


def _spec(*names: str) -> BucketSpec:
    shapes = tuple({"a": (40, 30), "b": (50,)}[name] for name in names)
    strides = tuple((30, 1) if len(shape) == 2 else (1,) for shape in shapes)
    return BucketSpec(0, names, shapes, strides, torch.float32, torch.device("cpu"))


class Line:
    """A hook on one bucket of a world of one, captured if it can be."""

    def __init__(self, hook: CommHook) -> None:
        self.hook, self.spec, self.reductions = hook, _spec("a", "b"), CapturedReductions()
        self.states, self.buffer = HookStates(hook), torch.empty(1250)

    @property
    def state(self) -> Any:
        return self.states.of(self.spec)

    def step(self, number: int, *, divisor: int | None = None, fails: bool = False) -> Tensor:
        self.buffer.copy_(torch.randn(1250, generator=torch.Generator().manual_seed(number)))
        turn = Turn(self.spec, 0, 1, number, donated=True, divisor=divisor)
        state = self.state
        self.states.begin(self.spec, self.buffer)

        def submit(op: Any) -> Finished:
            if fails:
                raise ConnectionError("cable")
            perform([op])
            return Finished(self.buffer)

        start = functools.partial(self.hook.reduce, self.buffer, state)
        return self.reductions.run(start, self.hook, self.buffer, state, turn, submit).clone()

    def reload(self, spec: BucketSpec) -> None:
        self.states = HookStates(self.hook, saved=self.states.by_name())
        self.spec = spec

    @property
    def graphs(self) -> int:
        return len(self.captured)

    @property
    def captured(self) -> list[Any]:
        return [bucket.segments for bucket in self.reductions._buckets.values() if bucket.segments]


_FED = hooks.error_feedback()
HOOKS = {
    "8 bits": hooks.chain(_FED, hooks.quantize()),
    "mixed bits": hooks.chain(_FED, hooks.quantize({"a": 1, "*.weight": 1, "*": 4})),
    "sign": hooks.chain(_FED, hooks.sign()),
    "majority": hooks.sign("majority"),
    "reduce_scatter_mean": hooks.reduce_scatter_mean(),
    "power_sgd": hooks.chain(_FED, hooks.power_sgd(rank=2)),
    "demo": hooks.decoupled_momentum(chunk=8, k=3),
    "chunks": hooks.chain(hooks.error_feedback(decay=0.9), hooks.chunked_top_k(3, chunk=32, bits=2)),
    "after": hooks.after(2, hooks.chain(_FED, hooks.quantize())),
    "every": hooks.every(3, hooks.chain(_FED, hooks.quantize())),
    "by name": hooks.partition({"b": hooks.mean(), "*": hooks.chain(_FED, hooks.power_sgd(rank=2))}),
    "stochastic": hooks.chain(_FED, hooks.quantize(4, rounding="stochastic")),
    "mixed stochastic": hooks.after(2, hooks.quantize({"a": 2, "*": 4}, rounding="stochastic")),
    "cold": hooks.chain(_FED, hooks.power_sgd(rank=2, warm_start=False)),
    "random_k": hooks.chain(_FED, hooks.random_k(0.1), hooks.quantize(rounding="stochastic")),
}


@pytest.mark.parametrize("name", HOOKS)
def test_the_same_bits_as_eagerly(name: str) -> None:
    """Also with another divisor, a failed collective, a step that is dropped, another state and other buckets."""
    ours, eager = Line(HOOKS[name]), Line(capture(HOOKS[name], enabled=False))
    for number in range(20):
        graphs = ours.captured
        for line in (ours, eager):
            if number == 9:
                with pytest.raises(ConnectionError):
                    line.step(101, fails=True)
            if number == 11:
                fork = line.states.fork()
                line.step(number)
                fork.drop()
            if number in (12, 16):
                assert bool(line.graphs) == (line is ours)
                line.reload(line.spec if number == 12 else _spec("b", "a"))
        same = functools.partial(Line.step, number=number, divisor=2 if number in (5, 7) else None)
        assert torch.equal(same(ours), same(eager)), number
        assert number != 11 or ours.captured == graphs
    assert ours.graphs


class Slots:
    __slots__ = ("last", "steps")

    def __init__(self, last: Tensor) -> None:
        self.last, self.steps = last, 0


class Own(CommHook):
    """A user's hook. `does`: what a captured one must not do, or may do."""

    def __init__(self, does: str = "", inner: CommHook | None = None) -> None:
        self.does, self.inner = does, inner

    def init(self, spec: BucketSpec) -> Slots:
        return Slots(torch.zeros(spec.numel, device=spec.device))

    def reduce(self, grad: Tensor, state: Slots, turn: Turn) -> Reduction:
        value = grad + state.last
        if self.does == "alternate" and turn.step % 2:
            value = -value
        if self.does == "read" and float(value.sum()) == 1:
            value = -value
        state.steps = 1 if self.does == "complete" else state.steps + (self.does == "count")
        if self.does == "rebind":
            state.last = value / 2
        else:
            torch.div(value, 2, out=state.last)
        if self.does == "turn over":
            value = grad.copy_(value).view(2, -1).t()
        if self.inner is not None:
            value, _ = yield from self.inner.reduce(value, self.inner.init(turn.spec), turn)
        else:
            yield all_reduce(value.clone(), op=ReduceOp.AVG)
        return Reduced(value, grad)


@pytest.mark.parametrize("does", ["", "complete", "turn over", "read", "count", "rebind"])
def test_a_hook_of_ones_own_is_refused_by_name(does: str) -> None:
    ours, eager = Line(capture(Own(does))), Line(Own(does if does == "turn over" else ""))
    allowed = does in ("", "complete", "turn over")
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        if does == "count":
            fork = ours.states.fork()
            with pytest.raises(ConnectionError):
                ours.step(0, fails=True)
            fork.drop()
        for number in range(5):
            assert torch.equal(ours.step(number).reshape(-1), eager.step(number).reshape(-1)), number
    assert bool(ours.graphs) == allowed
    assert not eager.graphs
    assert len(raised) == (not allowed)
    for message in (str(one.message) for one in raised):
        assert message.startswith(f"capturing capture(Own(does='{does}'), enabled=True) on bucket 0")
        assert ("not permitted when stream is capturing" if does == "read" else "into its state") in message


class Alternating(Own):
    def capture_key(self, turn: Turn) -> int:
        return turn.step % 2

    def reduce(self, grad: Tensor, state: Slots, turn: Turn) -> Reduction:
        value = -grad if turn.step % 2 else grad.clone()
        yield all_reduce(value, op=ReduceOp.AVG)
        return Reduced(value, grad)


class Refreshing(CommHook):
    """A user's hook with a factor that it computes anew on the host every eighth step, as others do a projection."""

    def __init__(self, key: str | None, *, tensor: bool) -> None:
        self.key, self.tensor = key, tensor

    def init(self, spec: BucketSpec) -> dict[str, Any]:
        return {"factor": torch.ones(()) if self.tensor else 1.0}

    def capture_key(self, turn: Turn) -> str | None:
        return "other steps" if turn.step % 8 else self.key

    def reduce(self, grad: Tensor, state: dict[str, Any], turn: Turn) -> Reduction:
        if turn.step % 8 == 0:
            state["factor"] = state["factor"] + 1
        yield all_reduce(grad, op=ReduceOp.AVG)
        return Reduced(grad.mul_(state["factor"]), grad)


@pytest.mark.parametrize("tensor", [False, True], ids=["a number", "a tensor"])
@pytest.mark.parametrize("key", ["refresh", None])
def test_graphs_are_forgotten_when_a_step_of_another_key_changes_the_state(key: str | None, tensor: bool) -> None:
    hook = Refreshing(key, tensor=tensor)
    ours, eager = Line(hook), Line(capture(hook, enabled=False))
    graphs = []
    with warnings.catch_warnings(record=True) as refused:
        warnings.simplefilter("always")
        for number in range(16):
            assert torch.equal(ours.step(number), eager.step(number)), number
            graphs.append(ours.graphs)
    assert graphs == [0, 0, 1, 1, 1, 1, 1, 1, 0, 0, *([1] * 6 if key is None else [0] * 6)]
    assert bool(refused) == (key is not None)  # whose steps could be captured, if they did not change it


_RANDOM, _NOISY = (hooks.chain(stage, hooks.mean()) for stage in (hooks.random_k(0.1), hooks.add_noise(std=1.0)))


def test_a_hook_of_ones_own_inside_is_named() -> None:
    with pytest.raises(UsageError, match=r"Own\(does=''\) inside is not gradwire's. Apply it to that"):
        capture(hooks.after(3, hooks.chain(_FED, Own())))
    assert Line(capture(hooks.after(3, capture(Own())))).step(0) is not None


def test_keys_are_tested() -> None:
    check_hook(Alternating(), laws=[alike])
    with pytest.raises(HookError, match=r"'alike' does not hold: capture_key is \(\) in steps 0 and 1, but rank 0 has"):
        check_hook(capture(Own("alternate")), laws=[alike])


@pytest.mark.parametrize(
    ("hook", "graphs"),
    [(Alternating(), 2), (Own(inner=_NOISY), 0), (Own(inner=hooks.after(3, _NOISY)), 1), (Own(inner=_RANDOM), 1)],
    ids=repr,
)
def test_what_hooks_inside_know_of_their_reductions_counts(hook: CommHook, graphs: int) -> None:
    """A random choice is not repeated, and each kind of step has graphs of its own."""
    ours, eager = Line(capture(hook)), Line(hook)
    for number in range(8):
        assert torch.equal(ours.step(number), eager.step(number)), number
    assert ours.graphs == graphs


def test_graphs_of_many_weights_are_forgotten() -> None:
    line = Line(HOOKS["8 bits"])
    for number in range(100):
        turn = Turn(line.spec, 0, 1, number, donated=True, weight=1 + number)
        line.reductions._bucket(line.hook, 0, line.buffer, line.state, turn)
    assert 0 < len(line.reductions._buckets) <= cuda_graphs._MOST


def test_sparse_gradients_are_not_captured() -> None:
    line, sparse = Line(HOOKS["8 bits"]), torch.eye(3).to_sparse()

    def start(turn: Turn) -> Reduction:
        return Reduced(sparse, sparse)
        yield

    turn = Turn(line.spec, 0, 1, 0)
    assert line.reductions.run(start, line.hook, sparse, None, turn, lambda op: Finished(sparse)) is sparse
