"""`gradwire doctor`: what it prints, its exit code, and what it measures."""

import io
import json
import re
import socket
from functools import partial

import pytest
from rich.console import Console

from gradwire.cli import main
from gradwire.cli.doctor.examination import Examination, RankReport, _meet, compare, show
from gradwire.cli.doctor.host_checks import HostFinding, Level
from gradwire.cli.doctor.link_speed import LinkSpeed, judge, measure
from gradwire.testing import run_ranks


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GLOO_SOCKET_IFNAME",
    ]:
        monkeypatch.delenv(name, raising=False)


def test_quick(capsys):
    main(["doctor", "--quick"])
    lines = capsys.readouterr().out.splitlines()
    for area in ("software", "engines", "devices", "memory and disks", "limits", "network"):
        assert area in lines
    assert any(line.startswith("  ok") and " torch " in line for line in lines)
    assert not any("two ranks" in line for line in lines)


def test_a_problem_is_shown_with_its_fix_and_is_the_exit_code(capsys, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    assert main(["doctor", "--quick"]) == 1
    out = capsys.readouterr().out
    [number] = [i for i, line in enumerate(out.splitlines()) if "nowhere0" in line]
    assert out.splitlines()[number].lstrip().startswith("problem")
    assert "-> there is no such interface on this host" in out.splitlines()[number + 1]
    assert out.splitlines()[-1].endswith("1 problem") or "problems" in out.splitlines()[-1]


def test_what_cannot_be_asked(capsys):
    assert main(["doctor", "--hosts", "--quick"]) == 2
    assert "Omit one of the two" in capsys.readouterr().err
    assert main(["doctor", "--hosts"]) == 2
    assert "torchrun --nnodes 2" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--nonsense"])
    assert stop.value.code == 2


def test_hosts_that_do_not_meet_show_what_is_wrong_here(capsys, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "nowhere0",
    }.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--hosts", "--json", "--timeout", "1"]) == 1
    found = json.loads(capsys.readouterr().out)
    [(host, findings)] = found["hosts"].items()
    problems = {one["name"]: one["value"] for one in findings if one["level"] == "problem"}
    assert problems["GLOO_SOCKET_IFNAME"] == "nowhere0"
    assert "ranks [1] did not arrive within 1 s" in problems[host]
    assert not [one for one in findings if one["level"] == "ok"]


def test_lines_fit_a_terminal_and_are_whole_in_a_file():
    words = [f"word{i}" for i in range(40)]
    long = HostFinding("network", "GLOO_SOCKET_IFNAME", " ".join(words), Level.PROBLEM, " ".join(words))
    shown = {}
    for terminal in (True, False):
        console = Console(force_terminal=terminal, no_color=True, width=80, file=io.StringIO(), highlight=False)
        show(console, Examination({"host": [long]}))
        shown[terminal] = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue()).splitlines()
    assert max(map(len, shown[True])) <= 80
    assert " ".join(shown[True]).split().count("word39") == 2
    assert all(line.startswith(" " * 30) for line in shown[True][2:-2])
    assert [line.split("  ")[-1] for line in shown[False][1:3]] == [" ".join(words), f"-> {' '.join(words)}"]


def test_every_pair_is_measured_and_every_rank_knows():
    results = run_ranks(partial(measure, ranks=(0, 2, 3)), 4, kind="threads")
    assert results[0] == results[1] == results[2] == results[3]
    assert [(link.a, link.b) for link in results[0]] == [(0, 2), (0, 3), (2, 3)]
    assert all(link.latency > 0 and link.bandwidth > 0 for link in results[0])


def test_links_are_judged():
    fast, slow, narrow = (LinkSpeed(0, 1, 1e-4, rate) for rate in (1e9, 1e8, 1e7))
    names = ["a", "b"]
    assert [one.level for one in judge([fast, fast, slow], names)] == [Level.OK, Level.OK, Level.PROBLEM]
    [found] = judge([narrow], names)
    assert found == HostFinding("links", "a - b", "100 µs, 80 Mbit/s", Level.NOTE, found.fix)
    assert "hook" in found.fix
    assert list(judge([], [])) == []


def test_hosts_must_agree():
    same = {"gradwire": "0.1.0", "torch": "2.13.0"}
    assert {one.level for one in compare({"a": same, "b": same})} == {Level.OK}
    [wrong] = [one for one in compare({"a": same, "b": same | {"torch": "2.12.0"}, "c": same}) if one.fix]
    assert (wrong.name, wrong.value, wrong.level) == ("torch", "2.13.0 on a, c; 2.12.0 on b", Level.PROBLEM)
    assert "same torch" in wrong.fix


def meet(group):
    host = f"host{group.rank // 2}"
    finding = HostFinding("limits", "open files", str(group.rank))
    return _meet(group, RankReport(host, host, {"torch": "2.13.0"}, [finding]))


def test_rank_0_gets_the_findings_of_all_hosts_and_their_links():
    found, *others = run_ranks(meet, 4, kind="threads")
    assert others == [None] * 3
    assert {host: findings[0].value for host, findings in found.hosts.items()} == {"host0": "0", "host1": "2"}
    assert [(one.area, one.name) for one in found.together] == [("hosts", "torch"), ("links", "host0 - host1")]
