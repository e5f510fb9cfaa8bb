"""Models compiled by inductor: the gradients of the uncompiled model, one graph, and reductions that begin during backward.

The models are products of matrices only: inductor then has nothing to pass to a C++ compiler, which takes most of its time.
"""

import copy
import functools
import gc
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradwire.autograd.compiled import install
from gradwire.autograd.compiled.op import _Listener
from gradwire.events import BucketLaunched
from gradwire.groups import Group
from gradwire.hooks import CommHook, chain, error_feedback, mean, quantize
from gradwire.parallel import DistributedDataParallel as DDP, replicate
from gradwire.policies import Buckets
from gradwire.reducer.buckets.layout import ParameterSpec, by_size
from gradwire.testing import run_ranks
from helpers.rank_tests import on_ranks

WIDTH, LAYERS = 16, 2
TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


@pytest.fixture(autouse=True)
def _inductor(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is compiled is kept for the other tests of this session."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.up @ self.down


class Model(nn.Module):
    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x


def compiled(module: nn.Module, **options: Any) -> Any:
    return torch.compile(module, fullgraph=True, **options)


def inside(module: nn.Module, build: Callable[[nn.Module], DDP]) -> tuple[DDP, Any]:
    ddp = build(compiled(module))
    return ddp, ddp


def outside(module: nn.Module, build: Callable[[nn.Module], DDP]) -> tuple[DDP, Any]:
    ddp = build(module)
    return ddp, compiled(ddp)


def in_place(module: nn.Module, build: Callable[[nn.Module], DDP]) -> tuple[DDP, Any]:
    ddp = build(module)
    ddp.compile(fullgraph=True)
    return ddp, ddp


def blocks(module: Any, build: Callable[[nn.Module], DDP], **options: Any) -> tuple[DDP, Any]:
    for block in module.blocks:
        block.compile(fullgraph=True, **options)
    ddp = build(module)
    return ddp, ddp


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def step_of(model: Any, rank: int, step: int) -> None:
    model.zero_grad()
    model(batch(rank, step)).pow(2).mean().backward()


Q8 = chain(error_feedback(), quantize(bits=8))


@pytest.mark.parametrize(
    ("form", "checkpoints", "hook"),
    [
        (inside, False, mean()),
        (inside, True, Q8),
        (outside, True, mean()),
        (in_place, True, mean()),
        (blocks, False, Q8),
    ],
)
def test_gradients_of_the_uncompiled_model_and_overlap(
    monkeypatch: pytest.MonkeyPatch, form: Any, checkpoints: bool, hook: CommHook
) -> None:
    computed: list[Any] = []
    report = _Listener.report

    def noted(self: _Listener, indices: list[int], gradients: list[Tensor]) -> None:
        computed.extend(indices)
        report(self, indices, gradients)

    monkeypatch.setattr(_Listener, "report", noted)

    def rank_main(group: Group) -> None:
        module = Model(checkpoints=checkpoints)

        def build(module: nn.Module) -> DDP:
            ddp = DDP(module, process_group=group, bucket_cap_mb=WIDTH * WIDTH * 4 / 2**20)
            ddp.set_hook(hook)
            return ddp

        plain = build(copy.deepcopy(module))
        ddp, model = form(module, build)
        for step in range(4):
            step_of(plain, group.rank, step)
            step_of(model, group.rank, step)
            for p, q in zip(ddp.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, atol=1e-6, rtol=0)
        if group.rank == 0:
            ddp.replica.reducer.events.listen(lambda e: computed.append(f"bucket {e.bucket}"), only=BucketLaunched)
        group.barrier()
        computed.clear()
        group.barrier()
        step_of(model, group.rank, 4)
        group.barrier()
        if group.rank == 0:
            # Half of the buckets at least are launched before the last gradient of this backward is computed.
            last = len(computed) - 1 - next(i for i, entry in enumerate(reversed(computed)) if isinstance(entry, int))
            during = [entry for entry in computed[:last] if isinstance(entry, str)]
            assert len(during) >= len(ddp.replica.reducer.layout.buckets) // 2

    torch._dynamo.utils.counters.clear()
    run_ranks(rank_main, 2)
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("form", ["dynamic shapes", "blocks whose inputs have dynamic shapes", "a compiled function"])
def test_reports_with_other_inputs_and_after_graph_breaks(reported: list[int], form: str) -> None:
    def rank_main(group: Group) -> None:
        module = Model()
        plain = DDP(copy.deepcopy(module), process_group=group)
        if form == "dynamic shapes":
            ddp = DDP(compiled(module, dynamic=True), process_group=group)
            call: Any = ddp
        elif form != "a compiled function":
            ddp, call = blocks(module, lambda module: DDP(module, process_group=group), dynamic=True)
        else:
            ddp = DDP(module, process_group=group)
            call = torch.compile(lambda x: ddp(x))
        for rows in (3, 3, 5, 7):
            x = torch.randn(rows, WIDTH)
            reported.clear()
            for model, run in ((plain, plain), (ddp, call)):
                model.zero_grad()
                run(x).pow(2).mean().backward()
            if reported or form != "a compiled function" or TORCH >= (2, 12):  # 2.11 may run the model eagerly there
                assert sorted(reported) == list(range(2 * LAYERS))
            for p, q in zip(ddp.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, atol=1e-6, rtol=0)

    run_ranks(rank_main, 1)


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The parameters whose gradients compiled code has reported."""
    found: list[int] = []
    report = _Listener.report
    monkeypatch.setattr(_Listener, "report", lambda self, i, grads: (found.extend(i), report(self, i, grads)))
    return found


@pytest.mark.parametrize(
    ("form", "ran"),
    [(inside, "another"), (outside, "the model"), (in_place, "the model"), (blocks, "the model"), (blocks, "another")],
)
def test_graphs_of_before_are_compiled_again(reported: list[int], ran: str, form: Any) -> None:
    def train(model: Any) -> None:
        reported.clear()
        for step in range(3):
            step_of(model, 0, step)
        assert sorted(reported) == sorted(3 * [*range(2 * LAYERS)])

    def rank_main(group: Group) -> None:
        for _ in range(2):  # with a model that is not replicated in between
            module = Model()
            bare, plain = module if ran == "the model" else copy.deepcopy(module), copy.deepcopy(module)
            step_of(form(bare, lambda module: module)[1], 0, 0)
            ddp, model = form(module, lambda module: DDP(module, process_group=group))
            train(model)
            step_of(plain, 0, 2)
            for p, q in zip(ddp.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, atol=1e-6, rtol=0)
            ddp.replica.detach()
            del ddp, model

    run_ranks(rank_main, 1)


class _Plain(nn.Sequential):
    """Has no forward of its own."""


@pytest.mark.parametrize("first", ["it", "another", "another, after replicate"])
@pytest.mark.parametrize("kind", [nn.Sequential, _Plain])
@pytest.mark.parametrize("form", ["itself", "in a function", "in a module"])
@on_ranks(1)
def test_what_was_compiled_without_hooks_is_not_used(group: Group, form: str, kind: Any, first: str) -> None:
    """Dynamo does not check whether a module without hooks has some now."""
    torch._dynamo.reset()
    models = [kind(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)]
    function = torch.compile(lambda model, x: model(x), backend="eager")
    wholes = [nn.Sequential(model, nn.Tanh()) if form == "in a module" else model for model in models]
    calls = [
        functools.partial(function, one) if form == "in a function" else torch.compile(one, backend="eager")
        for one in wholes
    ]
    replica = replicate(models[0], group=group) if "after" in first else None
    calls[first != "it"](torch.ones(2, 4)).sum().backward()
    replica = replica or replicate(models[0], group=group)
    calls[0](torch.ones(2, 4)).sum().backward()
    assert replica.reducer.steps == 1


def test_graphs_that_report_are_used_again(reported: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def rank_main(group: Group) -> None:
        for _ in range(3):
            ddp = DDP(compiled(Model()), process_group=group)
            step_of(compiled(Model()), 0, 0)  # has no listeners
            step_of(ddp, 0, 0)
            ddp.replica.detach()
            del ddp

    torch._dynamo.utils.counters.clear()
    run_ranks(rank_main, 1)
    assert reported
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2  # at most the first graph was forgotten


def test_graphs_report_if_there_is_a_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradwire.autograd.compiled import inductor_pass

    inserted: list[int] = []
    mark = inductor_pass.mark_gradients
    monkeypatch.setattr(inductor_pass, "mark_gradients", lambda graph, limits: inserted.append(mark(graph, limits)))
    monkeypatch.setattr(inductor_pass, "_VERSION", "not from a cache")

    def rank_main(group: Group) -> None:
        inductor_pass.install()
        gc.collect()  # models of other tests have listeners
        step_of(compiled(Model()), 0, 0)
        assert inserted == []
        matrix = 4 * WIDTH * WIDTH
        for limits, ops in (((2**20,), 1), ((matrix, 2 * matrix), 2 * LAYERS), ((8 * matrix, 4 * matrix), LAYERS)):
            replica = replicate(Model(), group=group, buckets=Buckets(limits=limits))
            torch._dynamo.reset()
            inserted.clear()
            step_of(compiled(Model()), 0, 0)
            assert max(inserted) == ops
            replica.detach()

    run_ranks(rank_main, 1)


@pytest.mark.parametrize("limits", [(64,), (8, 64), (64, 8), (8, 16, 48)])
@pytest.mark.parametrize("others", [[], [(4, 1000)], [(1000, 1001)]], ids=["alone", "a smaller first", "larger"])
def test_an_op_stands_behind_the_last_gradient_of_each_bucket(limits: tuple[int, ...], others: Any) -> None:
    """Also beside models with other buckets. The next op is at most half a bucket, or a 16th of a large graph, away."""
    from gradwire.autograd.compiled import inductor_pass

    choose, kinds = random.Random(str(limits)), [torch.float32, torch.bfloat16]
    for _ in range(20):
        values = [torch.empty(choose.randint(1, 9), dtype=choose.choice(kinds), device="meta") for _ in range(30)]
        nodes: Any = [types.SimpleNamespace(meta={"val": value}) for value in values]
        ends = inductor_pass._ends(nodes, sorted([limits, *others]))
        specs = [ParameterSpec.of(str(i), value) for i, value in enumerate(values)]
        buckets = by_size(specs, limits, order=range(len(specs)))
        for kind in kinds:
            of_kind = [max(bucket) + 1 for bucket in buckets if values[bucket[0]].dtype == kind]
            assert {*of_kind[:-1]} <= {*ends}  # the last one may not be full
        far = max(limits[-1] / 2, sum(value.nbytes for value in values) / 16)
        for begin, end in pairwise([0, *ends]):
            assert sum(value.nbytes for value in values[begin : end - 1]) < far
        assert ends == sorted({*ends})
        assert ends[-1] == len(values)
    same = [*nodes, nodes[-1]]
    assert len(values) in inductor_pass._ends(same, [(2**20,)])  # an op is given a tensor once


def test_a_later_model_with_smaller_buckets_has_ops_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although Dynamo has a graph of its class."""
    report, sizes = _Listener.report, list[int]()
    monkeypatch.setattr(_Listener, "report", lambda self, i, grads: (sizes.append(len(i)), report(self, i, grads)))

    def rank_main(group: Group) -> None:
        for matrices in (2 * LAYERS, 2, 2 * LAYERS, 2):
            cap = matrices * 4 * WIDTH * WIDTH / 2**20
            ddp = DDP(compiled(Model()), process_group=group, bucket_cap_mb=cap)
            for step in range(2):
                sizes.clear()
                step_of(ddp, 0, step)
            assert max(sizes) == matrices // 2
            ddp.replica.detach()

    run_ranks(rank_main, 1)


@pytest.mark.parametrize(("communicates", "ops"), [(False, 2), (True, 4)])
def test_where_a_graph_may_communicate_an_op_stands_behind_each_gradient(communicates: bool, ops: int) -> None:
    """Where others stand depends on facts of a rank, and no bucket may be launched on the other side of the collective there."""
    from gradwire.autograd.compiled import inductor_pass

    graph = torch.fx.Graph()
    value = graph.placeholder("tangents_1")
    value.meta["val"] = torch.empty(4, 4)
    results = []
    for number in range(4):
        if number == 2 and communicates:
            value = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (value, "sum", "group"))
            value.meta["val"] = torch.empty(4, 4)
        value = graph.call_function(torch.ops.aten.add.Tensor, (value, value))
        value.meta["val"] = torch.empty(4, 4)
        results.append(value)
    graph.output(tuple(results))
    assert inductor_pass.mark_gradients(graph, [(256,)]) == ops


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_graphs_that_are_replayed_stay_as_they_are(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    from torch._inductor import config

    from gradwire.autograd.compiled import inductor_pass

    monkeypatch.setattr(inductor_pass, "bucket_limits", lambda: [(1,)])
    marked: list[Any] = []
    monkeypatch.setattr(inductor_pass, "mark_gradients", lambda graph, limits: marked.append(graph))
    with config.patch({"triton.cudagraphs": mode == "reduce-overhead"}):
        inductor_pass.ReadyPass()(torch.fx.Graph())
    assert len(marked) == (mode == "default")


def test_what_was_compiled_with_the_pass_is_kept_whenever_inductor_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was seen before inductor's first graph is not compiled again after it; until then nothing more is done."""
    compiler, calls, forgotten = "torch._inductor.compile_fx", [], []
    monkeypatch.setattr(install, "_models", weakref.WeakKeyDictionary())
    monkeypatch.setattr(install, "_code", {})
    monkeypatch.setattr(install, "_installer", lambda: lambda: calls.append("install"))
    monkeypatch.setattr("torch._dynamo.eval_frame.reset_code", forgotten.append)
    monkeypatch.setitem(sys.modules, "torch._inductor.config", object())
    monkeypatch.delitem(sys.modules, compiler, raising=False)
    model = Model()
    for _ in range(3):
        install.forward_begins(model, (1,))
    assert len(calls) == 1
    before = len(forgotten)
    assert before > 0
    monkeypatch.setitem(sys.modules, compiler, object())
    for _ in range(3):
        install.forward_begins(model, (1,))
    assert len(calls) == 4  # a thread may have set a pass of its own in the meantime
    assert len(forgotten) == before


def test_a_pass_of_the_user_is_kept(tmp_path: Path) -> None:
    from torch._inductor import config, custom_graph_pass

    from gradwire.autograd.compiled.inductor_pass import ReadyPass, install

    class Mine(custom_graph_pass.CustomGraphPass):
        def __call__(self, graph: Any) -> None:
            pass

        def uuid(self) -> str:
            return "mine"

    install()  # changes the default, to which the setting returns below
    mine = Mine()
    with config.patch({"post_grad_custom_post_pass": mine}):
        install()
        install()
        kept = config.post_grad_custom_post_pass
        if hasattr(custom_graph_pass, "get_custom_graph_passes"):
            assert kept[0] is mine
            assert [type(one) for one in kept] == [Mine, ReadyPass]
        else:
            assert kept is mine
    assert isinstance(config.post_grad_custom_post_pass, ReadyPass)


@pytest.mark.parametrize("compiled_at_first", [False, True])
@on_ranks(1)
def test_the_state_of_a_hook_fits_the_compiled_and_the_uncompiled_model(group: Group, compiled_at_first: bool) -> None:
    def build(compile_it: bool) -> DDP:
        module = Model()
        ddp = DDP(torch.compile(module, backend="eager") if compile_it else module, process_group=group)
        ddp.set_hook(chain(error_feedback(), quantize(bits=2)))
        return ddp

    saved_of, expected, other = build(compiled_at_first), build(compiled_at_first), build(not compiled_at_first)
    step_of(saved_of, 0, 0)
    state = saved_of.hook_state_dict()
    assert "blocks.0.up" in state["state"]
    for ddp in (expected, other):
        ddp.load_hook_state_dict(state)
        step_of(ddp, 0, 1)
    for p, q in zip(expected.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
