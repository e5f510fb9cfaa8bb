"""gw.init() between hosts whose own name resolves to a loopback address, as on Debian, and no variable names the network."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gradwire.lab import hosts, why_not

WHY_NOT = why_not()
pytestmark = [pytest.mark.namespaces, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

PORT = 29_781
SCRIPT = """
import torch
import gradwire as gw
group = gw.init(kind="gloo", timeout=60)
t = torch.tensor([group.rank + 1.0])
group.all_reduce(t)
print("sum", t.item())
"""


def test_ranks_meet_without_a_name_for_the_network() -> None:
    with hosts(2) as machines:
        base = {name: value for name, value in os.environ.items() if not name.startswith(("GLOO_", "GRADWIRE_"))}
        ranks = []
        for rank, host in enumerate(machines):
            # What the name of the first host resolves to: on itself a loopback address, its real one elsewhere.
            master = "127.0.1.1" if rank == 0 else machines[0].address
            env = base | {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": master,
                "MASTER_PORT": str(PORT),
            }
            ranks.append(
                host.popen(
                    [sys.executable, "-c", SCRIPT], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        outputs = [rank.communicate(timeout=300) for rank in ranks]
        assert [out for out, _ in outputs] == ["sum 3.0\n"] * 2, outputs
