"""`gradwire doctor --hosts` on two hosts with a slow link."""

import json
import os

import pytest

from gradwire.lab import hosts, why_not
from helpers.warm_python import WarmPython, on_host

MBIT = 50  # so slow that it is the link which limits, also on a busy machine
DOCTOR = "import sys; from gradwire.cli import main; sys.exit(main())"
WHY_NOT = why_not(mbit=MBIT)
pytestmark = [pytest.mark.namespaces, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]


def test_two_hosts_and_their_link(warm_python: WarmPython, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("GLOO_", "GRADWIRE_"))]:
        monkeypatch.delenv(name)
    with hosts(2, mbit=MBIT) as machines:
        world = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": machines[0].address}
        # The second rank has a setting that cannot be right.
        envs = [
            {**world, "RANK": str(rank), "MASTER_PORT": "29782", "OMP_NUM_THREADS": str(1 + 999 * rank)}
            for rank in (0, 1)
        ]
        commands = [(on_host(host, DOCTOR), "doctor", "--hosts", "--json") for host in machines]
        ranks = warm_python.run_all(commands, envs=envs, timeout=300)
        outputs = [(rank.stdout, rank.stderr) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [1, 0], outputs
    assert outputs[1][0] == ""
    found = json.loads(outputs[0][0])
    assert len(found["hosts"]) == 2
    wrong = {
        (host, one["name"])
        for host, findings in found["hosts"].items()
        for one in findings
        if one["level"] == "problem" and one["area"] == "settings"
    }
    assert wrong == {(machines[1].name, "OMP_NUM_THREADS")}
    [link] = [one for one in found["together"] if one["area"] == "links"]
    assert link["name"] == f"{machines[0].name} - {machines[1].name}"
    rate, unit = link["value"].split(", ")[1].split()
    assert unit == "Mbit/s"
    assert 0.3 * MBIT < float(rate) < 1.3 * MBIT
    assert link["level"] == "note"
