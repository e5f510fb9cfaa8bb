"""An elastic run on several hosts, with the hub on one of its own: some are cut off, and come back."""

import itertools
import json
import math
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gradwire.elasticity.leases import LEASE
from gradwire.lab import Host, hosts, why_not
from helpers import elastic_hosts
from helpers.elastic_hosts import HUB, LAUNCH
from helpers.waiting import LIMIT, wait_until
from helpers.warm_python import WarmProcess, WarmPython, on_host

WHY_NOT = why_not(mbit=1)  # tc is needed, too
pytestmark = [pytest.mark.namespaces, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

PORT = 29_779


class ElasticHosts:
    """A run with so many ranks on each host, and the hub on the last host. The model has a layer of this width."""

    def __init__(
        self, machines: list[Host], ranks: Sequence[int], folder: Path, python: WarmPython, width: int = 16
    ) -> None:
        *self.machines, self.hub_host = machines
        self.size, self.folder, self.python, self.width = sum(ranks), folder, python, width
        self.most = self.size + len(self.machines) - len(ranks)
        self.address = f"{self.hub_host.address}:{PORT}"
        self.switch = self.hub_host.name.rpartition("-")[0]
        self._ip("link", "add", "elsewhere", "type", "bridge")
        self._ip("link", "set", "elsewhere", "up")
        self.start_hub()
        wait_until((folder / "hub.key").exists, "the hub has made the key")
        self.launchers: list[WarmProcess] = []
        for host, number in zip(self.machines, ranks, strict=False):
            self.launch(host, number)
            wait_until(
                lambda: self.commits() or self.launchers[0].poll() is not None, "training has begun", limit=120.0
            )

    def launch(self, host: Host, ranks: int) -> None:
        """Begin the run with so many ranks on this host, or let them join."""
        begins = ["--join", self.address] if self.launchers else ["--elastic", f"1:{self.most}", "--hub", self.address]
        options = [*begins, "--nproc", str(ranks), "--key-file", str(self.folder / "hub.key")]
        options += ["--run-dir", str(self.folder / host.name)]
        program = elastic_hosts.__file__, str(self.folder), str(self.width)
        self.launchers.append(self._start(host, LAUNCH, *options, *program))

    def start_hub(self) -> None:
        self.hub = self._start(self.hub_host, HUB, "--address", self.address, "--file", str(self.folder / "hub"))

    def _start(self, host: Host, program: str, *options: str) -> WarmProcess:
        return self.python.start(on_host(host, program), *options, capture=True)

    def _ip(self, *words: str, tool: str = "ip") -> None:
        subprocess.run([tool, "-n", self.switch, *words], check=True)

    def set_links(self, numbers: Sequence[int], *how: str) -> None:
        """Change the ports of the bridge that these hosts are at: "down"; or "master", "elsewhere", where they reach each other,
        and all other packets vanish."""
        for number in numbers:
            self._ip("link", "set", f"port{number}", *how)

    def lose_packets(self, number: int, *how: str) -> None:
        """Those to this host vanish, and those from it do not."""
        self._ip("qdisc", how[0], "dev", f"port{number}", "root", *how[1:], tool="tc")

    def cut(self, numbers: Sequence[int], lost: str) -> None:
        """Lose all packets between these hosts and the others, or those in one direction: they are sent to an address of Ethernet
        that nobody has."""
        if lost == "all packets":
            return self.set_links(numbers, "master", "elsewhere")
        machines = [*self.machines, self.hub_host]
        these = [machines[n] for n in numbers]
        for one, other in itertools.product(these, [host for host in machines if host not in these]):
            sender, receiver = (one, other) if lost == "packets from them" else (other, one)
            words = ("neigh", "replace", receiver.address, "lladdr", "02:00:00:00:00:99", "nud", "permanent")
            subprocess.run(["ip", "-n", sender.name, *words, "dev", sender.interface], check=True)
        return None

    def heal(self, numbers: Sequence[int]) -> None:
        self.set_links(numbers, "master", "bridge")
        for host in (*self.machines, self.hub_host):
            subprocess.run(
                ["ip", "-n", host.name, "neigh", "flush", "nud", "permanent", "dev", host.interface], check=True
            )

    def members(self, numbers: Sequence[int]) -> set[str]:
        """Those of these hosts that have committed a step."""
        return {line[1] for line in self.commits() if any(line[1].startswith(self.machines[n].name) for n in numbers)}

    def commits(self) -> list[Any]:
        """The lines of all members, in the order of their times."""
        file = self.folder / "commits"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return sorted(json.loads(line) for line in lines if line.endswith("\n"))

    def wait_for(self, members: int, *, since: float = -math.inf, limit: float = LIMIT) -> float:
        """Wait until so many members have committed a step after this time, in a view of their own; return when they had."""

        def times() -> list[float]:
            later = [line for line in self.commits() if line[0] > since and line[4] == members]
            last = [line[0] for line in later if later and line[2] == later[-1][2]]
            return last if len(last) == members else []

        wait_until(lambda: times(), f"{members} members train", limit=limit)
        return min(line[0] for line in self.commits() if line[0] > since and line[4] == members)

    def end(self, after: int = 50) -> list[str]:
        """End training after so many steps; returns what the launchers wrote."""
        last = self.folder / "last.new"
        last.write_text(str(self.commits()[-1][2] + after))
        last.rename(self.folder / "last")
        outputs = ["\n".join(launcher.communicate(60.0)) for launcher in self.launchers]
        assert [launcher.returncode for launcher in self.launchers] == [0] * len(outputs), outputs
        return outputs

    def check(self) -> None:
        """Each step has one set of bits, and none is missing."""
        digests: dict[int, set[str]] = {}
        for _, _, step, digest, *_ in self.commits():
            digests.setdefault(step, set()).add(digest)
        assert all(len(found) == 1 for found in digests.values())
        assert sorted(digests) == list(range(1, max(digests) + 1))


@contextmanager
def running(
    ranks: Sequence[int],
    folder: Path,
    python: WarmPython,
    *,
    later: int = 0,
    mbit: float | None = None,
    width: int = 16,
) -> Iterator[ElasticHosts]:
    """A run, and so many hosts that may join."""
    with hosts(len(ranks) + later + 1, mbit=mbit) as machines:
        run = ElasticHosts(machines, ranks, folder, python, width)
        try:
            run.wait_for(run.size, limit=LIMIT if mbit is None else 300.0)
            yield run
        finally:
            for process in (*run.launchers, run.hub):
                process.kill()
                print(*process.communicate())


@pytest.mark.parametrize(("cut", "number"), [("link down", 1), ("half-open", 0)])
def test_the_others_go_on_without_a_host_that_is_cut_off_and_its_ranks_come_back(
    cut: str, number: int, tmp_path: Path, warm_python: WarmPython
) -> None:
    with running((2, 1, 1), tmp_path, warm_python) as run:
        before = run.members([number])
        if cut == "link down":
            run.set_links([number], "down")
        else:
            run.lose_packets(number, "add", "tbf", "rate", "8bit", "burst", "10", "latency", "1ms")
        began = time.monotonic()
        went_on = run.wait_for(4 - len(before), since=began)
        if cut == "link down":
            run.set_links([number], "up")
        else:
            run.lose_packets(number, "del")
        healed = time.monotonic()
        came_back = run.wait_for(4, since=healed)
        outputs = run.end()
    print(f"the others went on after {went_on - began:.2f} s, its ranks were back after {came_back - healed:.2f} s")
    run.check()
    assert went_on - began > LEASE - 1.0  # not earlier, as after a crash
    assert len(run.members([number])) == 2 * len(before)
    assert outputs[number].count("died: Evicted: ") == len(before)
    assert "SIG" not in "".join(outputs)
    assert {line[5] for line in run.commits()} == {"SharedMemoryGroup", "HierarchicalGroup"}


CUTS = [numbers for size in range(1, 5) for numbers in itertools.combinations(range(4), size)]
"""The hosts of one side; the others are with the hub, which is alone in the last one."""


@pytest.mark.acceptance
@pytest.mark.parametrize("lost", ["all packets", "packets from them", "packets to them"])
def test_all_cuts_of_four_hosts_and_a_hub(lost: str, tmp_path: Path, warm_python: WarmPython) -> None:
    """The side of the hub goes on within a lease and a second; the hub alone stops nobody, nor does it forget when it is killed."""
    waits: dict[tuple[int, ...], float] = {}
    with running((1, 1, 1, 1), tmp_path, warm_python) as run:
        for numbers, turn in itertools.product(CUTS, range(3)):
            before = run.members(range(4))
            run.cut(numbers, lost)
            began = time.monotonic()
            alone = len(numbers) == 4
            went_on = run.wait_for(4 - len(numbers) or 4, since=began + 0.5 * alone)
            waits[*numbers, -turn] = went_on - began
            if alone:
                time.sleep(2 * LEASE)  # what must not happen has no end
                assert run.members(range(4)) == before
            run.heal(numbers)
            healed = time.monotonic()
            came_back = run.wait_for(4, since=healed) - healed
            cut_off = {line[1] for line in run.commits() if went_on < line[0] < healed} & run.members(numbers)
            assert alone or not cut_off, "one side at most commits"
            print(f"{numbers}: {went_on - began:.2f} s, and {came_back:.2f} s to come back", flush=True)
        before = run.members(range(4))
        run.hub.kill()
        run.hub.communicate()
        run.set_links([0], "down")
        run.start_hub()
        began = time.monotonic()
        waits[()] = run.wait_for(3, since=began) - began
        run.set_links([0], "up")
        run.wait_for(4, since=time.monotonic())
        assert len(run.members(range(4)) - before) == 1
        outputs = run.end()
    run.check()
    assert "SIG" not in "".join(outputs)
    late = {cut: wait for cut, wait in waits.items() if wait > LEASE + 1.0}
    assert not late  # but on a busy machine


@pytest.mark.acceptance
def test_the_others_train_while_a_host_receives_130_mb(tmp_path: Path, warm_python: WarmPython) -> None:
    """All hosts send 100 Mbit/s. Parameters and what AdamW has of them are three times 43 MB."""
    with running((1, 1), tmp_path, warm_python, later=1, mbit=100, width=3280) as run:
        first = run.commits()[-1][2]
        wait_until(lambda: run.commits()[-1][2] >= first + 6, "some steps without a joiner", limit=300.0)
        began = time.monotonic()
        run.launch(run.machines[2], 1)
        computes = run.wait_for(3, since=began, limit=300.0)
        outputs = run.end(after=2)
    run.check()
    lines = [line for line in run.commits() if line[1].startswith(run.machines[0].name) and line[2] > first]
    steps = [(after[0], after[0] - before[0]) for before, after in itertools.pairwise(lines)]
    before = statistics.median(seconds for end, seconds in steps if end < began)
    joining = [seconds for end, seconds in steps if began < end <= computes + before]
    shown = ", ".join(f"{seconds:.2f}" for seconds in joining)
    print(f"{before:.2f} s, and with a joiner {shown}; it computes after {computes - began:.1f} s", *outputs)
    assert len(run.members([2])) == 1
    assert max(joining) <= 2 * statistics.median(seconds for _, seconds in steps)
