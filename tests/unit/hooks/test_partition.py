"""partition, masked and by_size: which hook reduces a parameter, what is copied, sent and saved."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from gradwire import hooks
from gradwire.errors import UsageError, UsageTypeError
from gradwire.groups import ThreadGroup
from gradwire.hooks import CommHook, Turn, by_size, cast, chain, error_feedback, every, masked, mean, partition
from gradwire.parallel import replicate
from gradwire.testing import simulate
from helpers.buckets import bucket

HALF = chain(cast(torch.bfloat16), mean())
FED = chain(error_feedback(), cast(torch.bfloat16), mean())


MODEL = bucket((2, 3), (2,), (2, 2), (2,), names=["a.weight", "a.bias", "b.weight", "b.bias"], index=3)


class Marking(CommHook):
    """Adds a number, and records what it was given."""

    def __init__(self, number: float, seen: list[tuple[hooks.BucketSpec, Tensor]]) -> None:
        self.number = number
        self.seen = seen

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> hooks.Reduction:
        self.seen.append((turn.spec, grad))
        value = grad.add_(self.number) if turn.donated else grad + self.number
        return hooks.Reduced(value, value)
        yield


def marked(seen: list[Any], **patterns: float) -> CommHook:
    return partition({p.replace("_", "."): Marking(n, seen) for p, n in patterns.items()})


def test_the_first_pattern_that_matches_wins() -> None:
    seen: list[Any] = []
    hook = partition({"a.*": Marking(10.0, seen), "*.bias": Marking(20.0, seen), "*": Marking(30.0, seen)})
    done = simulate(hook, [torch.zeros(14)], spec=MODEL)
    assert done.reduced[0].value.tolist() == [10.0] * 8 + [30.0] * 4 + [20.0] * 2
    assert [spec.names for spec, _ in seen] == [("a.weight", "a.bias"), ("b.bias",), ("b.weight",)]
    assert [spec.shapes for spec, _ in seen] == [((2, 3), (2,)), ((2,),), ((2, 2),)]
    assert {spec.index for spec, _ in seen} == {3}


@given(
    ways=st.lists(st.integers(0, 2), min_size=1, max_size=8),
    sizes=st.lists(st.integers(0, 4), min_size=8, max_size=8),
    donated=st.booleans(),
)
@settings(max_examples=60)
def test_every_element_is_reduced_by_its_hook_and_returns_to_its_index(
    ways: list[int], sizes: list[int], donated: bool
) -> None:
    spec = bucket(*((n,) for n in sizes[: len(ways)]), names=[f"{way}.{i}" for i, way in enumerate(ways)])
    hook = partition({f"{way}.*": Marking(100.0 * way, []) for way in (2, 0, 1)})
    grad = torch.arange(float(spec.numel))
    (reduced,) = simulate(hook, [grad], spec=spec, donated=donated).reduced
    expected = grad + torch.tensor([100.0 * way for i, way in enumerate(ways) for _ in range(sizes[i])])
    assert torch.equal(reduced.value, expected)
    if not donated:
        assert torch.equal(reduced.sent, expected)


def test_adjacent_parameters_are_not_copied() -> None:
    seen: list[Any] = []
    grad = torch.zeros(14)
    hook = partition({"*.weight": Marking(1.0, seen), "b.bias": Marking(2.0, seen), "*": Marking(3.0, seen)})
    turn = Turn(MODEL, 0, 1, donated=True)
    with pytest.raises(StopIteration) as stop:
        next(hook.reduce(grad, hook.init(MODEL), turn))
    assert stop.value.value.value is grad
    storage = grad.untyped_storage().data_ptr()
    assert [part.untyped_storage().data_ptr() == storage for _, part in seen] == [False, True, True]


def test_one_pattern_for_all_passes_the_bucket_unchanged() -> None:
    seen: list[Any] = []
    grad = torch.zeros(14)
    simulate(marked(seen, b_=1.0, **{"*": 2.0}), [grad], spec=MODEL)
    assert seen[0][0] is MODEL
    assert seen[0][1] is grad


def test_a_sparse_bucket_is_reduced_by_the_hook_of_its_parameter() -> None:
    rows = torch.eye(3)[:, :2].to_sparse(1)
    hook = partition({"parameter": mean(), "*": every(2, mean())})
    assert torch.equal(simulate(hook, [rows, rows]).reduced[0].value.to_dense(), rows.to_dense())


def test_a_parameter_without_a_pattern_is_named() -> None:
    hook = partition({"a.*": mean(), "*.weight": mean()})
    with pytest.raises(UsageError, match=r"no pattern matches the parameter 'b\.bias'.*Add one for it"):
        hook.init(MODEL)
    with pytest.raises(UsageError, match=r"'b\.bias'"):
        hook.wire_bytes(MODEL, 2)


@pytest.mark.parametrize(
    "around",
    [
        lambda hook: hook,
        lambda hook: chain(error_feedback(), hook),
        lambda hook: hooks.after(100, hook),
        lambda hook: every(5, hook),
        lambda hook: every(5, mean(), otherwise=hook),
        lambda hook: hooks.hierarchical(across=hook),
        lambda hook: masked("*", hook),
    ],
)
def test_set_hook_raises_if_a_parameter_has_no_hook(around: Any) -> None:
    (group,) = ThreadGroup.world(1)
    model = torch.nn.Linear(2, 2)
    hook = around(partition({"weight": mean()}))
    with pytest.raises(UsageError, match="no pattern matches the parameter 'bias'"):
        replicate(torch.nn.Linear(2, 2), group=group, hook=hook)
    replica = replicate(model, group=group)
    with pytest.raises(UsageError, match="no pattern matches the parameter 'bias'"):
        replica.set_hook(hook)
    model(torch.ones(1, 2)).sum().backward()  # continues with its previous hook
    replica.detach()
    group.close()


def test_bytes_are_the_sum_over_the_parts() -> None:
    hook = partition({"*.bias": mean(), "*": HALF})
    assert hook.wire_bytes(MODEL, 2) == 4 * 4 + 10 * 2
    unknown = partition({"*.bias": mean(), "*": Marking(0.0, [])})
    assert unknown.wire_bytes(MODEL, 2) is None


def test_masks_are_patterns_or_functions() -> None:
    def matrices(name: str, shape: tuple[int, ...]) -> bool:
        return len(shape) > 1

    expected = [1.0] * 6 + [0.0] * 2 + [1.0] * 4 + [0.0] * 2
    for mask in ("*.weight", ["a.w*", "b.w*"], ("*.weight",), matrices):
        hook = masked(mask, Marking(1.0, []), otherwise=Marking(0.0, []))
        assert simulate(hook, [torch.zeros(14)], spec=MODEL).reduced[0].value.tolist() == expected
    assert "matrices, " in repr(masked(matrices, mean()))
    assert " at 0x" not in repr(masked(matrices, mean()))  # ranks compare hooks by their repr


def test_by_size_counts_elements_or_bytes() -> None:
    for size in ({"numel": 4}, {"nbytes": 16}):
        hook = by_size(**size, large=Marking(1.0, []), small=Marking(0.0, []))
        value = simulate(hook, [torch.zeros(14)], spec=MODEL).reduced[0].value
        assert value.tolist() == [1.0] * 6 + [0.0] * 2 + [1.0] * 4 + [0.0] * 2
    wide = bucket((2,), dtype=torch.float64)
    assert by_size(nbytes=16, large=HALF).wire_bytes(wide, 2) == 4


def test_they_have_the_traits_of_their_hooks() -> None:
    assert partition({"a": FED, "*": mean()}).remembers
    assert not partition({"a": HALF, "*": mean()}).remembers
    assert partition({"a": HALF, "*": mean()}).collectives is None
    assert masked("a", HALF) == masked("a", HALF) != masked("b", HALF)
    assert hash(partition({"*": mean()})) == hash(partition({"*": mean()}))


def matrices(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) > 1


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: partition({}), UsageError, "no patterns"),
        (lambda: partition({"*": mean(), "a": mean()}), UsageError, "never reached. Put it last"),
        (lambda: partition({3: mean()}), UsageTypeError, "3 is not a pattern"),  # type: ignore[dict-item]
        (lambda: partition({"*": cast(torch.bfloat16)}), UsageTypeError, "is a stage"),  # type: ignore[dict-item]
        (lambda: masked([], mean()), UsageTypeError, "not a pattern, a sequence of patterns"),
        (lambda: masked([3], mean()), UsageTypeError, "not a pattern, a sequence of patterns"),  # type: ignore[list-item]
        (lambda: masked(None, mean()), UsageTypeError, "not a pattern, a sequence of patterns"),  # type: ignore[arg-type]
        (lambda: by_size(large=mean()), UsageError, "the size is ambiguous"),
        (lambda: by_size(numel=1, nbytes=1, large=mean()), UsageError, "the size is ambiguous"),
    ],
)
def test_invalid_arguments_are_refused_at_once(build: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        build()
