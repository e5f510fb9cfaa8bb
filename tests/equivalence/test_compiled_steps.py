"""`torch.compile` of a whole step, with the backward inside: Dynamo traces the user's code, and nothing of gradwire."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import convert_frame
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire
from gradwire.groups import Group
from gradwire.parallel import DistributedDataParallel as DDP
from gradwire.testing import run_ranks

PACKAGE = str(Path(gradwire.__file__).parent)


@contextlib.contextmanager
def traced_frames() -> Iterator[list[CodeType]]:
    """The code objects that Dynamo traces meanwhile, once for each time."""
    seen: list[CodeType] = []
    inner = convert_frame._compile

    def compile_frame(code: CodeType, *args: Any, **kwargs: Any) -> Any:
        seen.append(code)
        return inner(code, *args, **kwargs)

    convert_frame._compile = compile_frame  # type: ignore[assignment]
    try:
        yield seen
    finally:
        convert_frame._compile = inner


def frames_of_steps(model: nn.Module) -> tuple[list[CodeType], list[Tensor]]:
    """What is traced in four steps that are compiled whole, and the parameters after them."""
    torch._dynamo.reset()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    compiled = torch.compile(step, backend="eager")
    with traced_frames() as seen:
        for number in range(4):
            compiled(torch.full((2, 4), number + 1.0))
    torch._dynamo.reset()
    return seen, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    "flags",
    [{}, {"gradient_as_bucket_view": True, "find_unused_parameters": True}, {"static_graph": True}],
    ids=lambda flags: " ".join(flags) or "plain",
)
@pytest.mark.filterwarnings("ignore")
def test_no_frame_of_gradwires_is_traced(torch_world: Callable[..., Any], flags: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    def rank_main(group: Group) -> None:
        with torch_world(group, "gloo"):
            theirs, expected = frames_of_steps(TorchDDP(copy.deepcopy(model), **flags))
            ours, found = frames_of_steps(DDP(copy.deepcopy(model), **flags))
        assert [code for code in ours if code.co_filename.startswith(PACKAGE)] == []
        assert len(ours) <= len(theirs) + 5
        assert all(map(torch.equal, found, expected))

    run_ranks(rank_main, 1, kind="gloo")
