"""gw.init() between hosts whose own name resolves to a loopback address, as on Debian, and no variable names the network."""

import os

import pytest

from gradwire.lab import hosts, why_not
from helpers.warm_python import WarmPython, on_host

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


def test_ranks_meet_without_a_name_for_the_network(warm_python: WarmPython, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("GLOO_", "GRADWIRE_")):
            monkeypatch.delenv(name)
    with hosts(2) as machines:
        ranks = []
        for rank, host in enumerate(machines):
            # What the name of the first host resolves to: on itself a loopback address, its real one elsewhere.
            master = "127.0.1.1" if rank == 0 else machines[0].address
            env = {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": master,
                "MASTER_PORT": str(PORT),
            }
            ranks.append(warm_python.start(on_host(host, SCRIPT), env=env, capture=True))
        outputs = [rank.communicate(timeout=300) for rank in ranks]
        assert [out for out, _ in outputs] == ["sum 3.0\n"] * 2, outputs
