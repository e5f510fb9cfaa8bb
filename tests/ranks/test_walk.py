"""A default step on the CPU over shared memory, followed by a profiler from the hook on a parameter to `Group.submit`."""

import sys
import threading
import tomllib
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import gradwire
from gradwire.groups import Group
from gradwire.parallel import DistributedDataParallel as DDP
from gradwire.testing import run_ranks

PACKAGE = Path(gradwire.__file__).parent
MOST_FILES = 20
CALLBACKS = {
    ("autograd/grad_hooks.py", "reducer/reducer.py"),  # GradHooks: on_arrival
    ("autograd/backward_end.py", "reducer/reducer.py"),  # at_backward_end
    ("runtime/threads.py", "reducer/reducer.py"),  # on_backward and around_backward, through `weakly`
}
"""Calls from a lower layer into a higher one: registered callbacks, which docs/design.md lists."""


def layers() -> dict[str, int]:
    """By the first part of a path: its layer, the lowest is 0."""
    settings = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["tool"]["importlinter"]
    rows = settings["contracts"][0]["layers"]
    return {
        name.strip(" ()").removeprefix("gradwire."): len(rows) - number
        for number, row in enumerate(rows)
        for name in row.split("|")
    }


def layer_of(path: str) -> int:
    return layers()[path.split("/")[0].removesuffix(".py")]


class Follower:
    """Records the calls of functions of gradwire's between the hook on a parameter and the collective that follows from it."""

    def __init__(self) -> None:
        self.walks: list[set[str]] = []
        """Of each collective that was submitted: the files in which functions were called on the way."""
        self.calls: set[tuple[str, str]] = set()
        """(caller's file, callee's file), where both are gradwire's."""
        self._walk: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        path = self._path(frame)
        if event != "call" or path is None:
            return
        if path == "autograd/grad_hooks.py" and frame.f_code.co_name == "hook":
            self._walk = set()
        self._walk.add(path)
        caller = None if frame.f_back is None else self._path(frame.f_back)
        if caller is not None:
            self.calls.add((caller, path))
        if frame.f_code.co_name == "submit":
            self.walks.append(self._walk)
            self._walk = set()

    def _path(self, frame: FrameType) -> str | None:
        path = Path(frame.f_code.co_filename)
        return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else None


def follow_a_step(group: Group) -> Follower:
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), process_group=group, bucket_cap_mb=1e-4)
    for _ in range(15):  # buckets are rebuilt after the first; times are sampled in the first ten
        ddp.zero_grad()
        ddp(torch.ones(2, 8)).sum().backward()
    ddp.zero_grad()
    loss = ddp(torch.ones(2, 8)).sum()
    follower = Follower()
    threading.setprofile(follower)
    sys.setprofile(follower)
    try:
        loss.backward()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return follower


def test_the_walk_is_short_and_calls_up_only_by_callbacks() -> None:
    follower = run_ranks(follow_a_step, 2, kind="shared_memory")[0]
    assert len(follower.walks) >= 3  # a collective for each bucket
    for walk in follower.walks:
        assert len(walk) <= MOST_FILES, sorted(walk)
    assert max(map(len, follower.walks)) >= 10
    upward = {(a, b) for a, b in follower.calls if layer_of(a) < layer_of(b)}
    assert upward <= CALLBACKS
