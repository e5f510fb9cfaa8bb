"""The options of elastic runs: what is refused, and which hub and key are used."""

import argparse
import contextlib
from pathlib import Path

import pytest

from gradwire.cli import elastic_options, main, run
from gradwire.cli.elastic_options import elastic_plan, read_key
from gradwire.elasticity.hub import Hub
from gradwire.errors import UsageError
from gradwire.launch.chaos_schedule import ChaosSchedule


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--spares 1", "gradwire run --spares: it needs --elastic or --join"),
        ("--hub a:1", "gradwire run --hub: it needs --elastic or --join"),
        ("--elastic 1:4 --hub a:1", "gradwire run --hub: it needs --key-file"),
        ("--join a:1", "gradwire run --join: it needs --key-file"),
        ("--join a:1 --elastic 1:4 --hub a:1", "gradwire run --hub: not with --join"),
        ("--elastic 1:4 --replace-ddp", "gradwire run --replace-ddp: torch's class is not elastic"),
        ("--chaos kill=1/s", "gradwire run --chaos: it needs --elastic or --join"),
        ("--elastic 1:4 --chaos-seed 3", "gradwire run --chaos-seed: it needs --chaos"),
        ("--elastic 1:4 --hub a:1 --key-file k --chaos hub=1/s", "run --chaos hub: the hub is not this launcher's"),
        (
            "--elastic 1:4 --chaos kil=1/s",
            "argument --chaos: 'kil=1/s': 'kil' is not a kind of fault. Choose from kill",
        ),
        ("--elastic 1:4 --chaos kill=1/s,kill=2/s", "'kill' is there twice. Choose from kill, stop, term, hub"),
        ("--elastic 1:4 --chaos stop=nan/s", "'nan/s' is not a rate. Choose faults per second, as stop=0.05/s"),
        ("--elastic 1:4 --chaos stop=0/s", "'0/s' is not a rate"),
        ("--elastic 3:4", "gradwire run --nproc 2 --elastic 3:4: it begins with 2 ranks"),
    ],
)
def test_options_that_do_not_go_together_are_named(options, message, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(run, "_run_directory", lambda *_: pytest.fail("it goes on"))
    script = tmp_path / "script.py"
    script.touch()
    with contextlib.suppress(SystemExit):  # of argparse
        assert main(["run", "-n", "2", *options.split(), str(script)]) == 2
    assert message in capsys.readouterr().err


def test_a_run_begins_once_at_a_hub_and_others_join_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(elastic_options, "_REACH", 0.3)
    key = read_key(tmp_path / "key", make=True)
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0
    hub = Hub(tmp_path / "hub", key=key)
    known = {"elastic": None, "spares": 1, "hub": None, "join": None, "key_file": tmp_path / "key", "chaos": None}
    begins = argparse.Namespace(**{**known, "elastic": (2, 8), "hub": hub.address})
    joins = argparse.Namespace(**{**known, "join": hub.address})
    with pytest.raises(UsageError, match="no run has begun at this hub"):
        elastic_plan(joins, tmp_path)
    with pytest.raises(UsageError, match="No such file"):
        elastic_plan(argparse.Namespace(**{**vars(joins), "key_file": tmp_path / "none"}), tmp_path)
    plan = elastic_plan(begins, tmp_path)
    assert (plan.limits, plan.min_ranks, plan.hub) == ("2:8", 2, None)
    both = argparse.Namespace(**{**known, "elastic": (3, 4), "join": hub.address})
    plan = elastic_plan(both, tmp_path)
    assert (plan.limits, plan.min_ranks, plan.begins) == ("2:8", 0, True)  # who has recorded it may have died
    with pytest.raises(UsageError, match="has the records of a run already"):
        elastic_plan(begins, tmp_path)
    plan = elastic_plan(joins, tmp_path)
    assert (plan.limits, plan.min_ranks, plan.spares, plan.begins) == ("2:8", 0, 1, False)
    assert plan.variables["GRADWIRE_HUB_KEY"] == key.hex()
    hub.close()
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(UsageError, match="others can read it"):
        elastic_plan(joins, tmp_path)


def test_faults_come_at_their_rates_and_the_same_with_the_same_seed() -> None:
    rates = {"kill": 0.5, "hub": 0.1}
    one, other = ChaosSchedule(rates, 1), ChaosSchedule(rates, 2)
    faults = [fault for second in range(2001) for fault in one.due(float(second))]
    assert 900 < sum(kind == "kill" for kind, _ in faults) < 1100
    assert 150 < sum(kind == "hub" for kind, _ in faults) < 250
    assert all(0 <= which < 1 for _, which in faults)
    assert ChaosSchedule(rates, 1).due(2000.0) == faults
    assert other.due(2000.0) != faults
