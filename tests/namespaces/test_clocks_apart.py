"""Two hosts whose clocks are three seconds apart: network namespaces, of which one has a time namespace of its own."""

import shutil
import subprocess
import time

import pytest

from gradwire.lab import hosts, why_not
from gradwire.observe.rings.clocks import align
from gradwire.observe.rings.intervals import operations
from gradwire.observe.rings.ring import read_rings
from gradwire.observe.trace import trace_events
from helpers.warm_python import on_host

WHY_NOT = why_not()
APART = 3
PATIENCE = 150.0


def why_no_clocks() -> str | None:
    """Why a process cannot have a clock of its own here."""
    if shutil.which("unshare") is None:
        return "there is no unshare"
    tried = subprocess.run(["unshare", "--time", "--monotonic", "1", "true"], capture_output=True)
    return None if tried.returncode == 0 else "time namespaces are not permitted"


WHY_NO_CLOCKS = WHY_NOT or why_no_clocks()
pytestmark = [pytest.mark.namespaces, pytest.mark.skipif(WHY_NO_CLOCKS is not None, reason=str(WHY_NO_CLOCKS))]

RANK = """
import sys
from datetime import timedelta
import torch
from torch.distributed import TCPStore
from gradwire import observe
from gradwire.groups import HierarchicalGroup

address, rank, run = sys.argv[1], int(sys.argv[2]), sys.argv[3]
store = TCPStore(address, 29_778, 2, is_master=rank == 0, wait_for_workers=False, timeout=timedelta(seconds=120))
with HierarchicalGroup.discover(store, rank, 2, timeout=60.0) as group:
    observe.start(run, rank=rank, size=2)
    for _ in range(10):
        group.all_reduce(torch.ones(100))
        for sender in range(2):
            if rank == sender:
                group.send(torch.ones(10), 1 - rank, tag=1)
            else:
                group.recv(torch.ones(10), 1 - rank, tag=1)
    group.barrier()
    observe.stop()
"""


SHIFT = f"""
import ctypes, os
new_time, libc = 0x80, ctypes.CDLL(None, use_errno=True)
libc.unshare(new_time)
with open("/proc/self/timens_offsets", "w") as file:
    file.write("monotonic {APART} 0")
if libc.setns(os.open("/proc/self/ns/time_for_children", os.O_RDONLY | os.O_CLOEXEC), new_time):
    raise OSError(ctypes.get_errno(), "cannot enter the time namespace")
"""


def test_nothing_is_received_before_it_was_sent(tmp_path, warm_python):
    run = tmp_path / "run"
    children = []
    with hosts(2) as machines:
        try:
            for rank, host in enumerate(machines):
                code = on_host(host, (SHIFT if rank == 1 else "") + RANK)
                arguments = [machines[0].address, str(rank), str(run)]
                children.append(warm_python.start(code, *arguments, env={"GLOO_SOCKET_IFNAME": host.interface}))
            deadline = time.monotonic() + PATIENCE
            for child in children:
                assert child.wait(max(0.1, deadline - time.monotonic())) == 0
        finally:
            for child in children:
                child.kill()
    rings = read_rings(run)
    assert len({ring.clock for ring in rings}) == 2
    raw = [ring.records[-1].time for ring in rings]
    assert abs(raw[1] - raw[0] - APART * 10**9) < 10**9  # the clocks are apart

    aligned = align(rings)[rings[1].clock]
    assert 0 <= aligned.error < 10**9
    offsets = [0, aligned.offset]
    ends: dict[object, list[tuple[int, int]]] = {}
    for ring, offset in zip(rings, offsets, strict=True):
        for one in operations(ring.records):
            assert one.ended is not None
            its = one.record
            pair = (its.rank, its.peer) if its.op == "send" else (its.peer, its.rank) if its.op == "recv" else ()
            key = its.group, pair, its.message if pair else (its.op, its.ordinal)
            ends.setdefault(key, []).append((one.submitted + offset, one.ended + offset))
    assert len([key for key in ends if key[1]]) >= 20  # type: ignore[index]
    for key, both in ends.items():
        (begin_a, end_a), (begin_b, end_b) = both
        if not key[1] or key[1][0] == 0:  # type: ignore[index]
            assert end_b >= begin_a - 1, key  # of a message from rank 0, which is first in the list
        if not key[1] or key[1][0] == 1:  # type: ignore[index]
            assert end_a >= begin_b - 1, key
    drawn = {e["pid"]: e["ts"] for e in trace_events(rings) if e["ph"] == "X" and e["name"] == "barrier"}
    assert abs(drawn[0] - drawn[1]) < 10**6  # and the trace is drawn with them: less than a second apart
