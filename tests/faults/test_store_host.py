"""The process that hosts the store stops answering: the others' deadlines hold, and they close and end."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from gradwire.groups.store.rendezvous import host_store
from helpers.warm_python import WarmPython

SCRIPT = """
    import os, sys, time, torch
    import gradwire as gw
    from gradwire.collectives import build
    from gradwire.errors import CollectiveTimeout
    group = gw.init(kind=sys.argv[1], timeout=4)
    host = torch.tensor([os.getpid()])
    group.broadcast(host, src=0)
    if group.rank == 0:
        os.kill(os.getpid(), 19)
        os._exit(0)
    began = time.perf_counter()
    while open(f"/proc/{int(host)}/stat").read().rpartition(")")[2].split()[0] != "T":
        assert time.perf_counter() - began < 60, "rank 0 is not stopped"
        time.sleep(0.01)
    began = time.perf_counter()
    forgotten = group.all_reduce(torch.ones(3), async_op=True)
    while not forgotten.is_completed():  # nobody waits for it
        assert time.perf_counter() - began < 30
        time.sleep(0.05)
    assert isinstance(forgotten.exception(), CollectiveTimeout), forgotten.exception()
    began = time.perf_counter()
    group.close()
    gw.launch.leave()
    assert time.perf_counter() - began < 30
    print("closed")
"""


@pytest.mark.parametrize("kind", ["gloo", "hierarchical"])
def test_a_stopped_store_host_holds_nobody(kind: str, warm_python: WarmPython) -> None:
    free = host_store()  # only to find a port
    port = free.port
    del free
    base = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        warm_python.start(
            textwrap.dedent(SCRIPT),
            kind,
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
            capture=True,
        )
        for rank in range(2)
    ]
    try:
        out, err = ranks[1].communicate(timeout=300)
        state = Path(f"/proc/{ranks[0].pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state == "T", "the fault did not fire"
        assert (ranks[1].returncode, out) == (0, "closed\n"), err
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
