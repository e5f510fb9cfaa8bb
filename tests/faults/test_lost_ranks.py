"""A rank that is killed in the middle of an operation: every survivor is told which, in time, and closes cleanly."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from gradwire.collectives import Collective, build
from gradwire.errors import CollectiveTimeout, GroupError, PeerLost
from gradwire.groups import Group
from gradwire.testing import run_ranks

SIZE, VICTIM = 4, 2
DEADLINE = 20.0


def _ops(group: Group) -> dict[str, Collective]:
    t = torch.ones(100_000)
    return {
        "all_reduce": build.all_reduce(t, label="doomed"),
        "composed all_reduce": build.all_reduce(torch.ones(1000, dtype=torch.int16), label="doomed"),
        "broadcast": build.broadcast(t, src=VICTIM, label="doomed"),
        "all_gather": build.all_gather([torch.empty(5) for _ in range(SIZE)], torch.ones(5), label="doomed"),
        "barrier": build.barrier(label="doomed"),
        "recv": build.recv(t, src=VICTIM, label="doomed"),
    }


def _survive(group: Group, kind: str) -> dict[str, Any]:
    group.barrier()
    if group.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.perf_counter()
    facts: dict[str, Any] = {}
    try:
        group.submit(_ops(group)[kind].within(DEADLINE)).wait()
    except (PeerLost, CollectiveTimeout) as error:
        facts |= {"type": type(error).__name__, "rank": getattr(error, "rank", None), "text": str(error)}
    facts["seconds"] = time.perf_counter() - began
    try:
        group.all_reduce(torch.ones(1))
    except GroupError as error:
        facts["afterwards"] = type(error).__name__
    began = time.perf_counter()
    group.close()
    facts["closing"] = time.perf_counter() - began
    return facts


@pytest.mark.parametrize("group", ["gloo", "hierarchical"])
@pytest.mark.parametrize("kind", ["all_reduce", "composed all_reduce", "broadcast", "all_gather", "barrier", "recv"])
def test_sigkill_is_told_to_every_survivor(kind: str, group: str) -> None:
    results = run_ranks(lambda group: _survive(group, kind), SIZE, kind=group, lost=[VICTIM])
    for rank, facts in enumerate(results):
        if rank == VICTIM:
            continue
        assert facts["type"] == "PeerLost", facts
        assert facts["rank"] == VICTIM, facts
        assert "label='doomed'" in facts["text"]
        assert facts["seconds"] < DEADLINE / 2
        assert facts["afterwards"] == "PeerLost"
        assert facts["closing"] < 6


def _stopped(group: Group) -> tuple[str, Any]:
    group.barrier()
    if group.rank == 1:
        # Not dead, only silent: what a rank stopped in a debugger looks like.
        deadline = time.perf_counter() + 3
        while time.perf_counter() < deadline:
            pass
        return "", None
    try:
        group.submit(build.all_reduce(torch.ones(3), label="patience").within(1.0)).wait()
    except CollectiveTimeout as error:
        return str(error), error.missing
    return "finished", None


@pytest.mark.parametrize("group", ["gloo", "hierarchical"])
def test_silence_is_no_death(group: str) -> None:
    text, missing = run_ranks(_stopped, 2, kind=group)[0]
    assert "patience" in text
    assert missing == (1,)
