"""Invalid combinations and numbers are refused when a hook is built: all of them in tables. And what built hooks look like."""

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire import hooks
from gradwire.errors import HookTypeError, UsageError, UsageTypeError
from gradwire.groups import ThreadGroup
from gradwire.hooks import CommHook, after, chain, error_feedback, every, hierarchical, mean, partition, weighted_mean
from gradwire.hooks.compressors.demo import DecoupledMomentum
from gradwire.hooks.compressors.dion import LowRankMomentum
from gradwire.parallel import DistributedDataParallel
from gradwire.testing import simulate

HALF = chain(hooks.cast(torch.bfloat16), mean())
FED = chain(error_feedback(), HALF)


class Local(CommHook):
    """Leaves gradients on their rank."""

    traits = hooks.Trait.LOCAL

    def reduce(self, grad: Tensor, state: Any, turn: hooks.Turn) -> hooks.Reduction:
        return hooks.Reduced(grad, grad)
        yield

    def __repr__(self) -> str:
        return "local()"


LOCAL = Local()

REFUSED: dict[str, tuple[Callable[[], CommHook], str]] = {
    "what is kept would be kept in a narrow dtype": (
        lambda: chain(hooks.cast(torch.bfloat16), FED),
        "Put error_feedback",
    ),
    "what is owed would be sent twice": (lambda: chain(error_feedback(), FED), "sent twice"),
    "owed twice, through a partition": (
        lambda: chain(error_feedback(), partition({"a": FED, "*": mean()})),
        "sent twice",
    ),
    "owed twice, through every": (lambda: chain(error_feedback(), every(2, mean())), "sent twice"),
    "owed twice, through hierarchical": (lambda: chain(error_feedback(), hierarchical(across=FED)), "sent twice"),
    "owed twice, later": (lambda: chain(error_feedback(), after(5, FED)), "sent twice"),
    "kept in a narrow dtype, through every": (
        lambda: chain(hooks.cast(torch.bfloat16), every(2, mean())),
        "would be kept in",
    ),
    "there is no error to feed back": (lambda: chain(error_feedback(), LOCAL), "no error to feed back"),
    "part of the model local": (lambda: partition({"a": LOCAL, "*": mean()}), "for all parameters or for none"),
    "masked parameters local": (lambda: hooks.masked("a", LOCAL), "for all parameters or for none"),
    "large parameters local": (lambda: hooks.by_size(numel=5, large=LOCAL), "for all parameters or for none"),
    "from local to shared": (lambda: after(5, mean(), before=LOCAL), "never be equal again"),
    "local in some steps": (lambda: every(5, mean(), otherwise=LOCAL), "does not make the parameters equal again"),
    "shared in some steps": (lambda: every(5, LOCAL, otherwise=mean()), "does not make the parameters equal again"),
    "local in the host": (lambda: hierarchical(inside=LOCAL, across=mean()), "leaves gradients on their rank"),
    "local between hosts": (lambda: hierarchical(across=LOCAL), "leaves gradients on their rank"),
    "what the earlier hook owes is lost": (lambda: after(5, mean(), before=FED), "would never be sent"),
    "what every has kept is lost": (lambda: after(5, mean(), before=every(2, mean())), "would never be sent"),
    "one weight for several steps": (lambda: every(2, weighted_mean()), "each step has its own weight"),
    "one weight for several steps, in a chain": (
        lambda: every(2, partition({"a": chain(hooks.cast(torch.bfloat16), weighted_mean()), "*": mean()})),
        "each step has its own weight",
    ),
    "weights fed back as errors": (
        lambda: chain(error_feedback(), hooks.cast(torch.bfloat16), weighted_mean()),
        "by its share of all samples",
    ),
    "weights fed back, through a partition": (
        lambda: chain(error_feedback(), partition({"a": weighted_mean(), "*": mean()})),
        "multiply each rank's loss by its share",
    ),
    "weights within hosts": (lambda: hierarchical(inside=weighted_mean(), across=mean()), "not the weighted mean"),
    "weights between hosts": (lambda: hierarchical(across=after(3, weighted_mean())), "not the weighted mean"),
    "a stage for a hook, after": (lambda: after(1, hooks.cast(torch.bfloat16)), "is a stage"),  # type: ignore[arg-type]
    "a stage for a hook, every": (lambda: every(2, mean(), otherwise=3), "`otherwise` must be a CommHook, got 3"),  # type: ignore[arg-type]
    "a stage for a hook, hierarchical": (lambda: hierarchical(across=None), "`across` must be a CommHook, got None"),  # type: ignore[arg-type]
    "a stage for a hook, masked": (lambda: hooks.masked("a", error_feedback()), "is a stage"),  # type: ignore[arg-type]
    "a stage for a hook, by_size": (lambda: hooks.by_size(numel=1, large=3), "`large` must be a CommHook, got 3"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("build", "words"), REFUSED.values(), ids=REFUSED)
def test_refused_when_built(build: Callable[[], CommHook], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build()


NEEDED: dict[str, dict[str, Any]] = {
    "add_noise": {"std": 1.0},
    "after": {"step": 1, "hook": mean()},
    "diloco": {"every": 1},
    "by_size": {"large": mean()},
    "dgc": {"ratio": 0.1},
    "every": {"n": 1, "hook": mean()},
    "local_sgd": {"every": 1},
    "post_local_sgd": {"start": 1, "every": 1},
    "power_sgd": {"rank": 1},
    "dion": {"rank": 1},
    "random_k": {"ratio": 0.1},
    "streaming_diloco": {"every": 1, "fragments": 1},
}
"""Arguments without a default."""
NUMBERS = [
    (name, argument.name)
    for name in hooks.__all__
    if inspect.isfunction(getattr(hooks, name))
    for argument in inspect.signature(getattr(hooks, name)).parameters.values()
    if re.fullmatch(r"(int|float)( \| None)?", str(argument.annotation))
]


@pytest.mark.parametrize("wrong", ["4", [1], True], ids=repr)
@pytest.mark.parametrize(("name", "argument"), NUMBERS)
def test_what_is_not_a_number_is_refused_as_it_was_written(name: str, argument: str, wrong: Any) -> None:
    arguments = {**NEEDED.get(name, {}), argument: wrong}
    words = rf"{name}\({argument}={re.escape(repr(wrong))}\): `{argument}` must be a (whole )?number, got {type(wrong).__name__}"
    with pytest.raises(UsageTypeError, match=words):
        getattr(hooks, name)(**arguments)


OUT_OF_RANGE: list[tuple[str, str, Any]] = [
    *(("add_noise", "std", wrong) for wrong in (0.0, float("inf"), float("nan"))),
    *(("after", "step", -1), ("by_size", "numel", -1), ("clip", "norm", 0.0), ("clip", "value", float("nan"))),
    *(("decoupled_momentum", "decay", 1.0), ("decoupled_momentum", "chunk", 0), ("decoupled_momentum", "k", 0)),
    *(("chunked_top_k", "k", 0), ("chunked_top_k", "chunk", 0), ("dion", "rank", 0), ("dion", "mu", 1.0)),
    *(("dgc", "ratio", 0.0), ("dgc", "momentum", 1.0), ("dgc", "warmup_steps", -1), ("dgc", "clip", 0.0)),
    *(("diloco", "every", 0), ("diloco", "outer_lr", 0), ("diloco", "outer_momentum", 1.0), ("every", "n", 0)),
    *(("gossip", "every", 0), ("local_sgd", "every", 0), ("post_local_sgd", "start", -1), ("power_sgd", "rank", 0)),
    *(("power_sgd", "min_compression", wrong) for wrong in (0.5, float("nan"))),
    *(("random_k", "ratio", 0.0), ("streaming_diloco", "fragments", 0), ("streaming_diloco", "alpha", 1.0)),
    *(("threshold", "value", float("inf")), ("threshold", "relative", 2.0), ("top_k", "ratio", 1.5), ("top_k", "k", 0)),
]


@pytest.mark.parametrize(("name", "argument", "wrong"), OUT_OF_RANGE)
def test_a_number_out_of_range_is_refused_with_its_range(name: str, argument: str, wrong: Any) -> None:
    words = rf"{name}\({argument}={re.escape(repr(wrong))}\): `{argument}` must be a (whole )?number in [\[(].*[\])]\.$"
    with pytest.raises(UsageError, match=words):
        getattr(hooks, name)(**{**NEEDED.get(name, {}), argument: wrong})


REPRS = {
    "weighted_mean()": weighted_mean(),
    "top_k(ratio=0.1)": hooks.top_k(ratio=0.1),
    "top_k(k=2, values=torch.bfloat16)": hooks.top_k(k=2, values=torch.bfloat16),
    "chunked_top_k(k=3, chunk=64, bits=2)": hooks.chunked_top_k(3, chunk=64, bits=2),
    "threshold(relative=0.5)": hooks.threshold(relative=0.5),
    "dgc(ratio=0.1, momentum=0.9, warmup_steps=0)": hooks.dgc(0.1),
    "sign(scale='mean', per='parameter')": hooks.sign(),
    "quantize(bits={'*.bias': 8, '*': 4}, block=64, rounding='stochastic', seed=3)": hooks.quantize(
        {"*.bias": 8, "*": 4}, block=64, rounding="stochastic", seed=3
    ),
    "power_sgd(rank=4, batched=False, warm_start=True, min_compression=2.0, seed=0)": hooks.power_sgd(4),
    "random_k(ratio=0.1, seed=2) > mean()": chain(hooks.random_k(0.1, seed=2), mean()),
    "clip(norm=1.0) > add_noise(std=0.5, seed=4) > mean()": chain(
        hooks.clip(norm=1.0), hooks.add_noise(std=0.5, seed=4), mean()
    ),
    "error_feedback() > scaled_cast(torch.float16) > mean()": chain(
        error_feedback(), hooks.scaled_cast(torch.float16), mean()
    ),
    "scaled_cast(torch.float8_e5m2) > mean()": chain(hooks.scaled_cast(torch.float8_e5m2), mean()),
    "masked('*.weight', cast(torch.bfloat16) > mean(), otherwise=mean())": hooks.masked("*.weight", HALF),
    "by_size(nbytes=9, small=mean(), large=mean())": hooks.by_size(nbytes=9, large=mean()),
    "after(3, cast(torch.bfloat16) > mean(), before=mean())": after(3, HALF),
    "every(2, mean(), otherwise=cast(torch.bfloat16) > mean())": every(2, mean(), otherwise=HALF),
    "gossip(topology='random', every=2, seed=5)": hooks.gossip(topology="random", every=2, seed=5),
    "diloco(every=4, outer_lr=0.7, outer_momentum=0.9, nesterov=True, hook=mean())": hooks.diloco(every=4),
    "streaming_diloco(every=4, outer_lr=0.7, outer_momentum=0.9, nesterov=True, hook=mean(), fragments=2, delay=1, alpha=0.5)": (
        hooks.streaming_diloco(every=4, fragments=2, delay=1, alpha=0.5)
    ),
}


@pytest.mark.parametrize(("text", "hook"), REPRS.items(), ids=REPRS)
def test_the_repr_is_the_call_that_makes_it(text: str, hook: CommHook) -> None:
    assert repr(hook) == text


def torch_style(state: Any, bucket: Any) -> Any:
    raise AssertionError("not called")


UNFINISHED: dict[str, tuple[Any, str]] = {
    "a class": (Local, r"\(Local\): Local is a class. Pass an instance: Local\(...\)"),
    "a function of ours": (mean, r"\(mean\): mean is a function. Call it: mean\(...\)"),
    "one that makes a stage": (error_feedback, r"error_feedback is a function. Call it"),
    "a stage": (
        error_feedback(),
        r"is a stage, which communicates nothing by itself. .*chain\(error_feedback\(\), mean\(\)\)",
    ),
}


@pytest.mark.parametrize(("hook", "words"), UNFINISHED.values(), ids=UNFINISHED)
def test_what_is_not_yet_a_hook_is_refused_with_the_missing_call(hook: Any, words: str) -> None:
    (group,) = ThreadGroup.world(1)
    with group:
        model = DistributedDataParallel(torch.nn.Linear(1, 1), process_group=group)
        for use in (model.set_hook, lambda hook: model.register_comm_hook(None, hook), lambda hook: after(1, hook)):
            with pytest.raises(HookTypeError, match=words):
                use(hook)
        with pytest.raises(HookTypeError, match=r"torch_style.*A torch-style hook goes to register_comm_hook"):
            model.set_hook(torch_style)  # type: ignore[arg-type]


DENSE_ONLY = [
    *(
        hooks.reduce_scatter_mean(),
        weighted_mean(),
        hooks.quantize(8),
        hooks.sign(),
        hooks.sign("majority"),
        hooks.power_sgd(1),
    ),
    *(
        hooks.top_k(k=1),
        hooks.chunked_top_k(1),
        hooks.threshold(value=1.0),
        hooks.dgc(0.1),
        hooks.decoupled_momentum(),
        hooks.dion(1),
    ),
    *(every(2, mean()), hierarchical(across=mean()), FED, chain(hooks.random_k(0.5), mean())),
    *(chain(stage, mean()) for stage in (hooks.clip(norm=1.0), hooks.clip(value=1.0), hooks.add_noise(std=1.0))),
    *(chain(hooks.scaled_cast(dtype), mean()) for dtype in (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)),
]


@pytest.mark.parametrize("hook", DENSE_ONLY, ids=repr)
def test_sparse_gradients_are_refused_before_any_step_and_in_one(hook: CommHook) -> None:
    spec = hooks.BucketSpec(0, ("a",), ((3, 3),), ((3, 1),), torch.float32, torch.device("cpu"))
    with pytest.raises(UsageError, match=r"its gradients are sparse.*partition"):
        hook.check(replace(spec, sparse=True))
    with pytest.raises(UsageError, match=r"its gradients are sparse.*partition"):
        simulate(hook, [torch.eye(3).to_sparse(1)] * 2, hosts=[[0], [1]])
    hook.check(spec)
    if not isinstance(hook, (DecoupledMomentum, LowRankMomentum)):  # their gradients must be real
        hook.check(replace(spec, dtype=torch.complex64))


ALLOWED: dict[str, Callable[[], CommHook]] = {
    "error feedback around all kinds": lambda: chain(
        error_feedback(), after(5, partition({"a": HALF, "*": mean()}), before=HALF)
    ),
    "error feedback in a partition": lambda: partition({"a": FED, "*": mean()}),
    "local from some step on": lambda: after(100, LOCAL),
    "local everywhere": lambda: partition({"a": LOCAL, "*": LOCAL}),
    "error feedback between hosts": lambda: hierarchical(inside=HALF, across=FED),
    "weights in some steps": lambda: every(2, weighted_mean(), otherwise=mean()),
}


@pytest.mark.parametrize("build", ALLOWED.values(), ids=ALLOWED)
def test_valid_combinations_are_built(build: Callable[[], CommHook]) -> None:
    assert isinstance(build(), CommHook)
