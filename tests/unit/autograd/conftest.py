"""The same four registrations through torch and through gradwire, so that one scenario can be run through both."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradwire import autograd as ours

TORCH = SimpleNamespace(
    name="torch",
    on_grad=lambda tensor, fn: tensor.register_hook(fn),
    before_node=lambda node, fn: node.register_prehook(fn),
    after_node=lambda node, fn: node.register_hook(fn),
    after_accumulate=lambda tensor, fn: tensor.register_post_accumulate_grad_hook(fn),
)
OURS = SimpleNamespace(
    name="gradwire",
    on_grad=ours.on_grad,
    before_node=ours.before_node,
    after_node=ours.after_node,
    after_accumulate=ours.after_accumulate,
)


@pytest.fixture(params=[TORCH, OURS], ids=lambda api: api.name)
def api(request: pytest.FixtureRequest) -> Any:
    """A test that takes this states what torch does, and that gradwire does the same."""
    return request.param


@pytest.fixture
def outcomes() -> Callable[[Callable[[Any], Any]], tuple[Any, Any]]:
    """Run a scenario through torch, then through gradwire; an exception counts as its result."""

    def run(scenario: Callable[[Any], Any]) -> tuple[Any, Any]:
        results = []
        for api in (TORCH, OURS):
            try:
                results.append(scenario(api))
            except Exception as error:
                results.append(error)
        return results[0], results[1]

    return run


@pytest.fixture
def accumulator() -> Callable[[torch.Tensor], Any]:
    """The node that adds to a leaf's `.grad`. Keep it: the leaf does not."""
    return lambda leaf: torch.autograd.graph.get_gradient_edge(leaf).node
