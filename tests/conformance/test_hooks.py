"""The list of hooks: each one obeys the laws, alone and in random chains, and computes the same simulated, under our DDP and under
torch's.

A new hook adds one line here and no test.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire import hooks
from gradwire.errors import UsageError
from gradwire.groups import Group
from gradwire.hooks import BucketSpec, CommHook, Stage, Trait
from gradwire.interop import as_torch_hook
from gradwire.parallel import DistributedDataParallel
from gradwire.reducer.hook.driver import Driver
from gradwire.testing import check_hook, run_ranks, simulate
from gradwire.testing.laws import pays_back
from gradwire.testing.rank_laws import conserves, forks
from gradwire.testing.simulate import one_parameter
from helpers.laws import SHORT_LAWS
from helpers.models import mlp, train

BFLOAT16 = torch.bfloat16

# Hooks that communicate by themselves, at the end of a chain.
ENDS: dict[str, Callable[[], CommHook]] = {
    "mean": hooks.mean,
    "weighted_mean": hooks.weighted_mean,
    "reduce_scatter_mean": hooks.reduce_scatter_mean,
    "scaled float16": lambda: hooks.chain(hooks.scaled_cast(torch.float16), hooks.mean()),
    "scaled float8": lambda: hooks.chain(hooks.scaled_cast(torch.float8_e4m3fn), hooks.mean()),
    "quantize 8": lambda: hooks.quantize(bits=8),
    "quantize 4": lambda: hooks.quantize(bits=4, block=32),
    "quantize 2, stochastic": lambda: hooks.quantize(bits=2, block=32, rounding="stochastic"),
    "quantize 1": lambda: hooks.quantize(bits=1, block=32),
    "quantize by layer": lambda: hooks.quantize(bits={"layer0.*": 8, "*": 4}),
    "sign": hooks.sign,
    "sign, majority": lambda: hooks.sign("majority"),
    "power_sgd": lambda: hooks.power_sgd(rank=2),
    "top_k": lambda: hooks.top_k(ratio=0.1),
    "top_k in bfloat16": lambda: hooks.top_k(ratio=0.1, values=BFLOAT16),
    "chunked_top_k": lambda: hooks.chunked_top_k(3, chunk=16),
    "chunked_top_k, 2 bits": lambda: hooks.chunked_top_k(4, chunk=32, bits=2),
    "threshold": lambda: hooks.threshold(relative=0.3),
    "dgc": lambda: hooks.dgc(0.1, momentum=0.5),
    "decoupled_momentum": lambda: hooks.decoupled_momentum(chunk=8, k=4),
    "dion": lambda: hooks.dion(rank=2),
    "partition": lambda: hooks.partition({"layer1.*": hooks.mean(), "*": hooks.quantize(bits=4)}),
    "by_size": lambda: hooks.by_size(numel=50, large=hooks.top_k(ratio=0.2)),
    "after": lambda: hooks.after(2, hooks.quantize(bits=8)),
    "every": lambda: hooks.every(3, hooks.quantize(bits=8), otherwise=hooks.top_k(ratio=0.3)),
    "every, kept": lambda: hooks.every(2, hooks.mean()),
    "hierarchical": lambda: hooks.hierarchical(across=hooks.quantize(bits=8)),
}
# Stages, anywhere to the left of such a hook.
STAGES: dict[str, Callable[[], Stage]] = {
    "cast to bfloat16": lambda: hooks.cast(BFLOAT16),
    "cast to float16": lambda: hooks.cast(torch.float16),
    "clip": lambda: hooks.clip(norm=1.0),
    "noise": lambda: hooks.add_noise(std=0.1),
    "random_k": lambda: hooks.random_k(ratio=0.5),
}


def takes_feedback(hook: CommHook) -> bool:
    return not hook.traits & (Trait.REMEMBERS | Trait.LOCAL | Trait.WEIGHS | Trait.VOTES)


def with_feedback(hook: CommHook) -> CommHook:
    return hooks.chain(hooks.error_feedback(), hook) if takes_feedback(hook) else hook


ALL: dict[str, CommHook] = {name: make() for name, make in ENDS.items()} | {
    f"feedback, {name}": with_feedback(make()) for name, make in ENDS.items() if takes_feedback(make())
}


@pytest.mark.parametrize("name", ENDS)
def test_every_hook_obeys_the_laws(name: str) -> None:
    """On one rank except `pays_back`, which takes longest: it is checked on two, and on other numbers in random chains."""
    check_hook(ALL[name], world_sizes=(3,), laws=(*SHORT_LAWS, forks, conserves))
    check_hook(ALL[name], world_sizes=(2,), laws=(pays_back,))
    check_hook(ALL[name], world_sizes=(1,), laws=SHORT_LAWS)


@pytest.mark.parametrize("name", [name for name in ALL if name not in ENDS])
def test_every_hook_obeys_the_laws_under_error_feedback(name: str) -> None:
    """Except `pays_back`, which is checked under error feedback anyway."""
    check_hook(ALL[name], world_sizes=(2,), dtype=BFLOAT16, laws=(*SHORT_LAWS, forks, conserves))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("name", ENDS)
def test_every_hook_obeys_the_laws_in_other_dtypes(name: str, dtype: torch.dtype) -> None:
    check_hook(ALL[name], world_sizes=(2,), dtype=dtype, laws=SHORT_LAWS)


def matrices(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) > 1


HALF = hooks.chain(hooks.cast(BFLOAT16), hooks.mean())
FED = hooks.chain(hooks.error_feedback(), HALF)
BATCHED = hooks.power_sgd(2, batched=True, min_compression=1)
OTHER_SETTINGS = [
    hooks.chain(hooks.cast(BFLOAT16), hooks.reduce_scatter_mean()),
    hooks.chain(hooks.scaled_cast(torch.float16), hooks.reduce_scatter_mean()),
    hooks.chain(hooks.error_feedback(), hooks.scaled_cast(torch.float8_e5m2), hooks.mean()),
    hooks.sign("majority", per="bucket"),
    hooks.power_sgd(1, batched=True),
    hooks.power_sgd(2, warm_start=False, min_compression=1),
    hooks.power_sgd(2, batched=True, warm_start=False, min_compression=1),
    hooks.chain(hooks.error_feedback(), BATCHED, hooks.mean()),
    hooks.top_k(k=3),
    hooks.chunked_top_k(64, bits=2),
    hooks.chunked_top_k(1, chunk=1),
    hooks.chunked_top_k(5, chunk=100),
    hooks.threshold(value=1.0),
    hooks.threshold(relative=0.3, values=BFLOAT16),
    hooks.dgc(0.01, momentum=0.5, warmup_steps=3, clip=1.0, values=BFLOAT16),
    hooks.dgc(0.5, warmup_steps=2),
    hooks.decoupled_momentum(),
    hooks.decoupled_momentum(decay=0.5, chunk=5, k=3, values=BFLOAT16),
    hooks.decoupled_momentum(chunk=200, k=7),
    hooks.chain(hooks.error_feedback(), hooks.visible(BFLOAT16), hooks.threshold(value=0.0)),
    hooks.chain(hooks.visible(torch.float8_e4m3fn), hooks.mean()),
    hooks.partition({"layer[13].*": hooks.mean(), "*": hooks.chain(hooks.visible(BFLOAT16), hooks.mean())}),
    hooks.dion(rank=9, mu=0.5),
    hooks.chain(hooks.random_k(0.25), hooks.mean()),
    hooks.chain(hooks.random_k(0.3, seed=7), hooks.cast(BFLOAT16), hooks.reduce_scatter_mean()),
    hooks.chain(hooks.error_feedback(), hooks.random_k(0.5), hooks.quantize(bits=8)),
    hooks.chain(hooks.clip(norm=1.0), HALF),
    hooks.chain(hooks.clip(value=0.5), hooks.error_feedback(), hooks.top_k(ratio=0.1)),
    hooks.chain(hooks.clip(value=0.5), hooks.add_noise(std=0.1, seed=3), hooks.mean()),
    hooks.partition({"layer0.*": FED, "layer[13].*": hooks.mean(), "*": HALF}),
    hooks.masked(matrices, hooks.every(2, FED)),
    hooks.chain(hooks.error_feedback(), hooks.by_size(numel=17, large=HALF)),
    hooks.after(1, FED),
    hooks.after(0, hooks.every(2, hooks.mean())),
    hooks.chain(hooks.error_feedback(), hooks.after(2, HALF)),
    hooks.every(3, FED),
    hooks.every(2, hooks.mean(), otherwise=FED),
    hooks.chain(hooks.error_feedback(), hooks.every(3, hooks.mean(), otherwise=HALF)),
]


@pytest.mark.parametrize("hook", OTHER_SETTINGS, ids=repr)
def test_other_settings_obey_the_laws(hook: CommHook) -> None:
    """Not on one rank, on which each kind of hook is checked above."""
    check_hook(hook, world_sizes=(3,), laws=(*SHORT_LAWS, forks, conserves))
    check_hook(hook, world_sizes=(2,), laws=(pays_back,))
    check_hook(hook, world_sizes=(2,), dtype=BFLOAT16, laws=SHORT_LAWS)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*ENDS, *STAGES])
def test_every_hook_obeys_the_laws_on_cuda(name: str) -> None:
    hook = ALL[name] if name in ALL else hooks.chain(STAGES[name](), hooks.mean())
    check_hook(hook, device="cuda", world_sizes=(2,))


THAT_ELEMENT = {
    *(
        "mean",
        "weighted_mean",
        "reduce_scatter_mean",
        "scaled float16",
        "top_k",
        "top_k in bfloat16",
        "chunked_top_k",
        "threshold",
        "dgc",
    ),
    *("by_size", "after", "every", "hierarchical", "cast to bfloat16", "cast to float16", "noise"),
}
HIDDEN = {"every, kept"}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [*ENDS, *(name for name in STAGES if name != "random_k")])
def test_what_hooks_make_of_a_nan(name: str, bad: float) -> None:
    """As the table in docs/silent-errors.md says, on all ranks, also under error feedback; random_k may send it or not."""
    hook = ENDS[name]() if name in ENDS else hooks.chain(STAGES[name](), hooks.mean())
    shapes, strides = ((16, 8), (40,)), ((8, 1), (1,))
    spec = BucketSpec(0, ("layer0.weight", "layer1.weight"), shapes, strides, torch.float32, torch.device("cpu"))
    for one in (hook, with_feedback(hook)) if name in ENDS else (hook,):
        brought = [torch.randn(spec.numel, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
        brought[1][77] = bad
        values = [reduced.value for reduced in simulate(one, brought, spec=spec).reduced]
        assert all(torch.equal(value.isfinite(), values[0].isfinite()) for value in values)
        found = set((~values[0].isfinite()).nonzero().flatten().tolist())
        assert (found == {77}) == (name in THAT_ELEMENT)
        assert (77 in found) == (name not in HIDDEN)


KINDS: dict[str, tuple[torch.dtype, bool]] = {
    "sparse": (torch.float32, True),
    "complex": (torch.complex64, False),
    "float64": (torch.float64, False),
    "float16": (torch.float16, False),
    "bfloat16": (torch.bfloat16, False),
}
AROUND = {
    "nothing": lambda hook: hook,
    "feedback": with_feedback,
    "partition": lambda hook: hooks.partition({"*": hook}),
    "after": lambda hook: hooks.after(0, hook),
    "every": lambda hook: hooks.every(1, hook),
    **{name: (lambda stage: lambda hook: hooks.chain(stage(), hook))(stage) for name, stage in STAGES.items()},
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_refuses_unsupported_parameters_when_it_is_set(kind: str, around: str) -> None:
    """set_hook calls `check`. What passes it must not fail in the first backward, which would abort the group."""
    dtype, sparse = KINDS[kind]
    brought = [torch.eye(4, dtype=dtype).to_sparse(1) if sparse else torch.randn(16, dtype=dtype) for _ in range(2)]
    spec = replace(one_parameter(torch.empty(16, dtype=dtype)), names=("layer0.weight",), sparse=sparse)
    for name, make in ENDS.items():
        try:
            hook = AROUND[around](make())
        except UsageError:
            continue  # refused when built
        refusal = _refusal(hook, spec)
        if refusal is None:
            simulate(hook, brought, spec=spec)
        else:
            assert "layer0.weight" in refusal, name


def _refusal(hook: CommHook, spec: BucketSpec) -> str | None:
    try:
        hook.check(spec)
    except UsageError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Chain:
    """What to build, so that a failure shows it."""

    stages: tuple[str, ...]
    end: str
    feedback: bool

    def build(self) -> CommHook:
        inner = hooks.chain(*(STAGES[name]() for name in self.stages), ENDS[self.end]())
        return with_feedback(inner) if self.feedback else inner


chains = st.builds(
    Chain,
    stages=st.lists(st.sampled_from(sorted(STAGES)), max_size=2, unique=True).map(tuple),
    end=st.sampled_from(sorted(ENDS)),
    feedback=st.booleans(),
)
shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=4)


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(chain=chains, shapes=shapes, ranks=st.integers(1, 5), seed=st.integers(0, 999))
@example(
    Chain(("cast to bfloat16", "random_k"), "quantize 2, stochastic", feedback=False), [(0,), (), (9, 6), ()], 5, 613
)  # slow
@example(Chain((), "after", feedback=True), [(), (), ()], 5, 998)  # ranks owe almost the opposite
def test_random_chains_on_random_buckets_obey_the_laws(
    chain: Chain, shapes: list[tuple[int, ...]], ranks: int, seed: int
) -> None:
    try:
        hook = chain.build()
    except UsageError:
        return  # refused when built: see test_refusals
    check_hook(hook, world_sizes=(ranks,), shapes=shapes, seed=seed)


def test_every_hook_is_the_same_under_our_ddp_and_under_torchs(torch_world: Callable[..., Any]) -> None:
    """Both have one bucket of all parameters, in the same order, so that hooks that work across parameters agree too. Under error
    feedback one of each way to communicate: what it passes on does not depend on the hook."""
    fed = {f"feedback, {name}" for name in ("mean", "quantize by layer", "power_sgd", "top_k", "every", "hierarchical")}
    assert fed < set(ALL)
    some = {name: hook for name, hook in ALL.items() if name in ENDS or name in fed}

    def rank_main(group: Group) -> dict[str, tuple[Tensor, Tensor]]:
        torch.set_num_threads(1)
        done = {}
        with torch_world(group, "gloo"):
            for name, hook in some.items():
                ours = DistributedDataParallel(mlp(hidden=2, seed=0), process_group=group, bucket_cap_mb=100)
                ours.set_hook(hook)
                theirs = TorchDDP(mlp(hidden=2, seed=0), bucket_cap_mb=100)
                theirs.register_comm_hook(
                    None, as_torch_hook(hook, group, named_parameters=theirs.module.named_parameters())
                )
                done[name] = tuple(train(model, group.rank, range(4), lr=0.01) for model in (ours, theirs))
                ours.replica.detach()
        return done

    first, second = run_ranks(rank_main, 2, kind="gloo")
    for name, hook in some.items():
        if not hook.local:
            assert torch.equal(first[name][0], second[name][0]), f"{name}: ranks differ under our DDP"
            assert torch.equal(first[name][1], second[name][1]), f"{name}: ranks differ under torch's DDP"
        torch.testing.assert_close(first[name][0], first[name][1], msg=f"{name}: our DDP and torch's differ")


def test_every_hook_computes_in_a_group_what_it_computes_simulated() -> None:
    gradients = [torch.randn(300, generator=torch.Generator().manual_seed(r)) for r in range(2)]

    def rank_main(group: Group) -> dict[str, list[Tensor]]:
        torch.set_num_threads(1)
        return {name: _reduce(hook, gradients[group.rank], group) for name, hook in ALL.items()}

    for kind in ("threads", "gloo", "shared_memory"):
        got = run_ranks(rank_main, 2, kind=kind)
        for name, hook in ALL.items():
            states: Any = None
            for step in range(2):
                done = simulate(hook, gradients, states=states, step=step)
                states = done.states
                for rank in range(2):
                    assert torch.equal(got[rank][name][step], done.reduced[rank].value), f"{name} over {kind}"


def _reduce(hook: CommHook, gradient: Tensor, group: Group) -> list[Tensor]:
    spec = one_parameter(gradient)
    driver = Driver(group)
    state = hook.init(spec)
    try:
        return [
            driver.launch(hook, gradient, state, hooks.Turn(spec, group.rank, group.size, step)).wait().clone()
            for step in range(2)
        ]
    finally:
        driver.close()
