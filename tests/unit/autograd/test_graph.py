"""reachable_parameters: agrees with what a backward really fills, for any graph whose edges can be seen."""

import collections
import dataclasses
import gc
import time
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradwire.autograd import reachable_parameters, tensors_in


def leaves(count: int) -> list[torch.Tensor]:
    return [torch.ones(2, requires_grad=True) for _ in range(count)]


def filled(outputs: list[torch.Tensor], params: list[torch.Tensor]) -> set[int]:
    """What a backward from the outputs really reaches."""
    torch.autograd.backward([output.sum() for output in outputs if output.requires_grad])
    return {index for index, param in enumerate(params) if param.grad is not None}


@given(
    steps=st.lists(st.tuples(st.sampled_from("+*v"), st.integers(0, 99), st.integers(0, 99)), max_size=25),
    picks=st.lists(st.integers(0, 99), max_size=3),
)
def test_random_graphs(steps: list[tuple[str, int, int]], picks: list[int]) -> None:
    params = leaves(5)
    values = list(params)
    for op, left, right in steps:
        x, y = values[left % len(values)], values[right % len(values)]
        values.append({"+": lambda x=x, y=y: x + y, "*": lambda x=x, y=y: x * y, "v": lambda x=x: x.view(2)}[op]())
    outputs = [values[pick % len(values)] for pick in picks]
    reached = reachable_parameters(outputs, params)
    assert reached == (filled(outputs, params) if outputs else set())


def test_a_model_with_unused_parameters() -> None:
    used, unused = nn.MultiheadAttention(4, 2), nn.Linear(2, 2)
    params = [*unused.parameters(), *used.parameters()]
    x = torch.ones(3, 1, 4)
    outputs = used(x, x, x)
    assert reachable_parameters(outputs, params) == set(range(2, len(params)))


def test_views_and_in_place_changes() -> None:
    a, b, c = leaves(3)
    base = a * 1
    view = base[:1]
    view.mul_(b[:1])
    assert reachable_parameters(base, [a, b, c]) == {0, 1}
    assert reachable_parameters(view, [a, b, c]) == {0, 1}
    assert reachable_parameters(a.view(2), [a, b, c]) == {0}


def test_outputs_without_grad() -> None:
    a, b = leaves(2)
    with torch.no_grad():
        hidden = a * b
    assert reachable_parameters(hidden, [a, b]) == set()
    assert reachable_parameters(b.detach(), [a, b]) == set()
    assert reachable_parameters(torch.ones(2), [a, b]) == set()
    assert reachable_parameters(torch.where(a > 0, b, b.detach()), [a, b]) == {1}
    assert reachable_parameters([], [a, b]) == set()
    assert reachable_parameters(a * b, []) == set()


def test_a_parameter_that_is_itself_an_output() -> None:
    a, b = leaves(2)
    assert reachable_parameters([a], [a, b]) == {0}


def test_a_frozen_parameter_is_never_reachable() -> None:
    a, b = leaves(2)
    b.requires_grad_(False)
    assert reachable_parameters([a * b, b], [a, b]) == {0}


def test_checkpoints() -> None:
    """All is seen through a non-reentrant checkpoint, and only the arguments of a re-entrant one."""
    before, inside = nn.Linear(2, 2), nn.Linear(2, 2)
    params = [*before.parameters(), *inside.parameters()]
    x = before(torch.ones(1, 2))
    assert reachable_parameters(checkpoint(inside, x, use_reentrant=False), params) == {0, 1, 2, 3}
    assert reachable_parameters(checkpoint(inside, x, use_reentrant=True), params) == {0, 1}


def test_a_compiled_module() -> None:
    torch._dynamo.reset()
    used, unused = nn.Linear(2, 2), nn.Linear(2, 2)
    output = torch.compile(used, backend="aot_eager")(torch.ones(1, 2))
    assert reachable_parameters(output, [*used.parameters(), *unused.parameters()]) == {0, 1}


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    extra: Any = None


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "nest",
    [
        lambda t: t,
        lambda t: [t],
        lambda t: (None, t),
        lambda t: {"a": {"b": [3, t]}},
        lambda t: Point(1, t),
        lambda t: Output(t),
        lambda t: Output(torch.ones(1), extra={"deep": Output(t)}),
        lambda t: {t},
        lambda t: collections.OrderedDict(out=t),
        lambda t: nn.utils.rnn.PackedSequence(t, torch.tensor([1, 1])),
    ],
)
def test_nests(nest: Any) -> None:
    a, b = leaves(2)
    assert reachable_parameters(nest(a * 2), [a, b]) == {0}


def test_a_container_that_holds_itself() -> None:
    a, b = leaves(2)
    ring: list[Any] = [a * 2]
    ring.append(ring)
    assert reachable_parameters(ring, [a, b]) == {0}
    assert len(list(tensors_in([ring, ring]))) == 1


def test_deep_and_wide_graphs_are_walked_without_recursion() -> None:
    (a,) = leaves(1)
    y = a
    for _ in range(20_000):
        y = y + 1
    wide = torch.stack([y * n for n in range(2_000)]).sum()
    assert reachable_parameters(wide, [a]) == {0}


def test_shared_subgraphs_are_walked_once() -> None:
    """2^60 paths lead from the output to the leaf."""
    a, b = leaves(2)
    y = a
    for _ in range(60):
        y = y + y * 1
    started = time.perf_counter()
    assert reachable_parameters(y, [a, b]) == {0}
    assert time.perf_counter() - started < 60


@pytest.mark.usefixtures("no_gc")
def test_the_walk_keeps_nothing() -> None:
    a, b = leaves(2)
    y = a * 2
    alive = weakref.ref(a)
    reachable_parameters(y, [a, b])
    del a, y
    assert alive() is None
    assert not gc.isenabled()
