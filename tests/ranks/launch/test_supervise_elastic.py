"""The launcher of an elastic run on real processes, which train nothing: see `helpers.elastic_member`."""

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradwire.launch import supervise_elastic
from gradwire.launch.display import Display
from gradwire.launch.hub_host import HubHost
from gradwire.launch.supervise_elastic import ElasticPlan
from helpers.waiting import wait_until

TRAIN = "from pathlib import Path\nfrom helpers.elastic_member import train\ntrain(Path(folder))"


def wait_for_view(folder: Path, *ranks: int) -> dict[int, int]:
    """Wait until the last view has these ranks; return their processes."""

    found: dict[int, int] = {}

    def arrived() -> bool:
        views = [(int(file.name.split("-")[1]), file) for file in folder.glob("view-*")]
        files = [file for epoch, file in views if epoch == max(views)[0]]
        found.clear()
        found.update({int(file.name.split("-")[2]): int(file.read_text() or "0") for file in files})
        return tuple(sorted(found)) == ranks and all(found.values())

    wait_until(arrived, f"a view of {ranks}")
    return found


@contextlib.contextmanager
def beside(faults: Callable[[], None], folder: Path) -> Iterator[None]:
    """In a thread; if they fail, the run ends."""

    def inject() -> None:
        try:
            faults()
        except BaseException:
            (folder / "done").touch()
            raise

    thread = threading.Thread(target=inject)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("launch", ["forked"], indirect=True)
@pytest.mark.parametrize("ends_by", ["itself", "SIGTERM"])
def test_a_run_goes_on_when_ranks_and_the_hub_die_stop_and_leave(launch, tmp_path, ends_by) -> None:
    hub = HubHost(tmp_path / "hub.records", b"a key")

    def faults() -> None:
        first = wait_for_view(tmp_path, 0, 1, 2)
        os.kill(first[0], signal.SIGUSR1)  # is ignored
        os.kill(first[1], signal.SIGKILL)
        wait_for_view(tmp_path, 0, 2, 3)  # the spare
        hub.process.kill()
        os.kill(first[2], signal.SIGSTOP)
        wait_for_view(tmp_path, 0, 3)
        os.kill(first[2], signal.SIGCONT)
        wait_for_view(tmp_path, 0, 1, 3)
        os.kill(first[0], signal.SIGTERM)
        wait_for_view(tmp_path, 1, 3)
        wait_until(lambda: not Path(f"/proc/{first[0]}").exists(), "it is reaped, after the hub has answered")
        (tmp_path / "done").touch() if ends_by == "itself" else os.kill(os.getpid(), signal.SIGTERM)

    plan = ElasticPlan(2, "2:4", hub.address, b"a key", hub, spares=1)
    with beside(faults, tmp_path):
        code, out, err = launch(TRAIN, 4, "import helpers.elastic_member", plan=plan)
    hub.close()
    assert code == 0, err
    assert out.startswith(
        b"[2] stopped: the others go on without it, since it was taken for dead\n[0] stopped: it has left\n"
    )
    lines = re.sub(r"[\w-]+-[0-9a-f]{4}-(\d+)", r"m\1", err.decode().replace("gradwire run: ", ""))
    assert re.sub(r"after [\d.]+ s|process \d+|127[\d.:]+", "_", lines).splitlines() == [
        "the hub of this run is _ (_)",
        "rank 1 (m1) died: killed by SIGKILL, _; replaced by the spare m3 (rank 3)",
        "the hub has ended (killed by SIGKILL, _): started again with its records (_)",
        "rank 2 (m2) is stopped: it does not count until it continues",
        "rank 2 (m2) died: the others have gone on without it; replaced by the spare m4 (rank 1)",
        "rank 0 (m0) has left",
        "2 ranks died, 2 replaced, 1 left",
    ]


@pytest.mark.parametrize("launch", ["forked"], indirect=True)
def test_a_rank_that_dies_while_the_hub_does_not_answer_is_shown(launch, tmp_path, monkeypatch) -> None:
    hub, shown, say = HubHost(tmp_path / "hub.records", b"a key"), threading.Event(), Display.say

    def watched(display: Display, lines: list[str]) -> None:
        say(display, lines)
        if "1 rank ended, and the hub at" in lines[0]:
            shown.set()

    def faults() -> None:
        first = wait_for_view(tmp_path, 0, 1)
        os.kill(hub.process.pid, signal.SIGSTOP)
        os.kill(first[1], signal.SIGKILL)
        wait_until(shown.is_set, "it is shown")
        os.kill(hub.process.pid, signal.SIGCONT)
        wait_until(lambda: wait_for_view(tmp_path, 0, 1)[1] != first[1], "another one is rank 1")
        (tmp_path / "done").touch()

    monkeypatch.setattr(Display, "say", watched)
    with beside(faults, tmp_path):
        plan = ElasticPlan(1, "1:2", hub.address, b"a key", hub)
        code, _, err = launch(TRAIN, 2, "import helpers.elastic_member", plan=plan)
    hub.close()
    assert (code, err.count(b"does not answer")) == (0, 1), err


class Faults:
    """A schedule of faults that are due when the test says so, on the last rank."""

    def __init__(self) -> None:
        self.next = []

    def due(self, now: float) -> list:
        return [(self.next.pop(), 0.99)] if self.next and now >= 0 else []


@pytest.mark.parametrize("launch", ["forked"], indirect=True)
def test_chaos_sends_signals_to_ranks_and_to_the_hub(launch, tmp_path) -> None:
    hub, chaos = HubHost(tmp_path / "hub.records", b"a key"), Faults()

    def faults() -> None:
        first = wait_for_view(tmp_path, 0, 1)
        chaos.next = ["kill"]
        wait_until(lambda: wait_for_view(tmp_path, 0, 1)[1] != first[1], "another one is rank 1")
        second = wait_for_view(tmp_path, 0, 1)
        chaos.next = ["term"]
        wait_for_view(tmp_path, 0)
        wait_until(lambda: not Path(f"/proc/{second[1]}").exists(), "it has left")
        chaos.next = ["stop"]
        state = Path(f"/proc/{first[0]}/stat")
        wait_until(lambda: ") T " in state.read_text(), "it is stopped")
        wait_until(lambda: ") T " not in state.read_text(), "it is continued")
        before = hub.process.pid
        chaos.next = ["hub"]
        wait_until(lambda: hub.process.pid != before, "the hub is started again")
        (tmp_path / "done").touch()

    plan = ElasticPlan(1, "1:2", hub.address, b"a key", hub, chaos=chaos)
    with beside(faults, tmp_path):
        code, _, err = launch(TRAIN, 2, "import helpers.elastic_member", plan=plan, directory=tmp_path)
    hub.close()
    assert code == 0, err
    lines = re.sub(r"[\w-]+-[0-9a-f]{4}-(\d+)", r"m\1", err.decode())
    assert re.findall("chaos: (.*)", lines) == [
        "SIGKILL to rank 1 (m1)",
        "SIGTERM to rank 1 (m2)",
        "SIGSTOP to rank 0 (m0)",
        "SIGKILL to the hub",
    ]
    recorded = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert [fault["kind"] for fault in recorded if "place" in fault] == ["kill", "term", "stop", "hub"]
    happened = ["kill", "died", "term", "left", "stop", "stopped", "hub", "ended"]
    assert [fault["kind"] for fault in recorded] == happened
    assert all(fault["text"] in err.decode() for fault in recorded)
    assert "1 rank died, 1 replaced, 1 left" in lines


def test_a_script_that_cannot_start_is_given_up(launch, tmp_path) -> None:
    hub = HubHost(tmp_path / "hub.records", b"a key")
    plan = ElasticPlan(2, "2:4", hub.address, b"a key", hub)
    code, _, err = launch("raise ValueError(f'not on {rank}')", 2, plan=plan)
    hub.close()
    assert code == 1
    assert len(re.findall(rb"died: ValueError: not on \d \(exit code 1, after .*\); replaced by ", err)) == 4
    assert re.search(rb"rank \d failed (first )?\(exit code 1, (.|\n)*[56] ranks died, 4 replaced, 0 left", err)


def test_the_records_of_the_last_processes_that_have_ended_are_kept(launch, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(supervise_elastic, "MOST_RECORDED", 2)
    hub = HubHost(tmp_path / "hub.records", b"a key")
    plan = ElasticPlan(2, "2:4", hub.address, b"a key", hub)
    record = "import pathlib; pathlib.Path(folder, f'rank-{os.environ[\"GRADWIRE_MEMBER\"]}.ring').touch()"
    launch(f"{record}; raise ValueError", 2, plan=plan, directory=tmp_path)
    hub.close()
    ended = [json.loads(line)["member"] for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    kept = {path.stem.removeprefix("rank-") for path in tmp_path.glob("rank-*.ring")}
    assert len(ended) == 4
    assert kept.isdisjoint(ended[:2])
    assert kept.issuperset(ended[2:])
