"""Another user of the same host tries every way into a running job. Needs root, to become that other user."""

import functools
import json
import os
import pickle
import signal
import socket
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from benchmarks.world import RankContext, run_world
from gradwire import observe
from gradwire.errors import GroupError
from gradwire.groups import Group, MPIGroup
from gradwire.groups.store.rendezvous import host_store
from gradwire.observe.hangs.analysis import Cause, Suspect
from gradwire.observe.hangs.gradient_questions import answer_questions, ask, read_answers
from gradwire.observe.hangs.hang_report import saved_hangs
from gradwire.observe.hangs.hang_watch import HangWatch
from gradwire.observe.rings.run_follower import RunFollower
from gradwire.observe.rings.run_outcome import RunOutcome, load, save
from gradwire.runtime.host import ProcessState
from gradwire.testing import run_ranks
from gradwire.testing.mpi import MPILaunch, MPIPool, accept, connect, listen, missing
from gradwire.testing.pool.process import Spawn
from gradwire.testing.pool.protocol import GroupJob
from helpers.warm_python import GRADWIRE_RUN, WarmPython

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_nobody(attempt: Callable[[], Any]) -> Any:
    """What `attempt` returns in a child process of another user. It must not import anything: that user may not read our files."""
    return all_as_nobody([attempt])[0]


def all_as_nobody(attempts: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each of them returns, all at once."""
    return [answer() for answer in [_begin_as_nobody(attempt) for attempt in attempts]]


def _begin_as_nobody(attempt: Callable[[], Any]) -> Callable[[], Any]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                answer = attempt()
            except BaseException as error:
                answer = f"the attempt raised {error!r}"
            os.write(write, json.dumps(answer).encode())
        finally:
            os._exit(0)
    os.close(write)

    def answered() -> Any:
        with open(read, "rb") as file:
            answer = json.loads(file.read() or "[]")
        os.waitpid(pid, 0)
        return answer

    return answered


def descriptors(pid: int) -> dict[str, str]:
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found[name] = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:  # closed meanwhile
            continue
    return found


def listening(pid: int) -> tuple[list[str], list[str]]:
    """The addresses (in hexadecimal) and the Unix sockets on which a process listens."""
    inodes = {target[8:-1] for target in descriptors(pid).values() if target.startswith("socket:[")}
    tcp, unix = [], []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                tcp.append(fields[1].rpartition(":")[0])
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) & 0x10000 and fields[6] in inodes:
            unix.append(fields[7])
    return tcp, unix


LOOPBACKS = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


def attack(pids: list[int], bomb: bytes) -> list[str]:
    """As another user: what could be entered of the processes, and what was."""
    entered = []
    for pid in pids:
        for name in range(256):
            try:
                os.close(os.open(f"/proc/{pid}/fd/{name}", os.O_RDWR))
                entered.append(f"descriptor {name} of {pid}")
            except OSError:
                pass
        try:
            open(f"/proc/{pid}/mem", "r+b").close()
            entered.append(f"memory of {pid}")
        except OSError:
            pass
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        name = line.split()[7] if len(line.split()) > 7 else ""
        if "gradwire" not in name and "/proc/self/fd" not in name:
            continue
        client = socket.socket(socket.AF_UNIX)
        try:
            client.connect("\0" + name[1:] if name.startswith("@") else name)
            client.sendall(len(bomb).to_bytes(8, "little") + bomb)
            entered.append(f"socket {name}")
        except OSError:
            pass
    for folder, prefix in (
        ("/dev/shm", "gradwire"),
        (tempfile.gettempdir(), "gradwire-mpi-"),
        (tempfile.gettempdir(), "gradwire-bench-"),
    ):
        for name in os.listdir(folder):
            if not name.startswith(prefix):
                continue
            path = os.path.join(folder, name)
            try:
                os.listdir(path) if os.path.isdir(path) else open(path, "rb").close()
                entered.append(path)
            except OSError:
                pass
    return entered


def assault(pids: list[int], tmp_path: Path) -> list[str]:
    path = tmp_path / "made-by-a-pickle"
    bomb = pickle.dumps(Bomb(str(path)))
    entered = as_nobody(lambda: attack(pids, bomb))
    assert not path.exists()
    return entered


def loopback_only(*pids: int) -> bool:
    return {address for pid in pids for address in listening(pid)[0]} <= LOOPBACKS


@needs_root
def test_a_private_socket_accepts_its_own_user_only(tmp_path: Path) -> None:
    """Even if the directory was opened to others."""
    tmp_path.chmod(0o700)
    with listen(str(tmp_path), backlog=2) as listener:

        def knock() -> str:
            client = socket.socket(socket.AF_UNIX)
            client.settimeout(10)
            try:
                client.connect(str(tmp_path / "socket"))
                client.sendall(b"x")
                return f"connected, then got {client.recv(1)!r}"
            except OSError as error:
                return type(error).__name__

        assert as_nobody(knock) == "PermissionError"
        for path in (tmp_path, *tmp_path.parents[:3]):  # as if the directories had been opened to others
            if "pytest" in str(path):
                path.chmod(0o755)
        (tmp_path / "socket").chmod(0o777)
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            os.setuid(NOBODY)
            os.write(write, knock().encode())
            os._exit(0)
        assert accept(listener) is None
        os.waitpid(pid, 0)
        assert os.read(read, 99) in (b"connected, then got b''", b"ConnectionResetError", b"BrokenPipeError")
        os.close(read), os.close(write)
        with connect(str(tmp_path)) as client:
            accepted = accept(listener)
            assert accepted is not None
            with accepted[0] as connection:
                client.sendall(b"x")
                assert (connection.recv(1), accepted[1]) == (b"x", os.getpid())


def test_a_long_directory_is_no_obstacle(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir(mode=0o700)
    with listen(str(folder), backlog=1) as listener, connect(str(folder)):
        accepted = accept(listener)
        assert accepted is not None
        accepted[0].close()


@needs_root
@pytest.mark.parametrize("kind", ["shared_memory", "gloo", "hierarchical"])
def test_ranks_of_the_pool_let_nobody_in(kind: str, tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"

    def rank_main(group: Group) -> int:
        group.barrier()
        (tmp_path / f"{os.getpid()}").touch()
        while not go_on.exists():
            time.sleep(0.01)
        group.barrier()
        return os.getpid()

    found: list[str] = []

    def meanwhile() -> None:
        try:
            deadline = time.monotonic() + 60
            while len(ready := [int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()]) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            found.extend(assault([os.getpid(), *ready], tmp_path))
            found.extend(
                f"{pid} listens on {listening(pid)}" for pid in (os.getpid(), *ready) if not loopback_only(pid)
            )
        finally:
            go_on.touch()

    thread = threading.Thread(target=meanwhile)
    thread.start()
    try:
        run_ranks(rank_main, 2, kind=kind)
    finally:
        thread.join()
    assert found == []


@needs_root
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_the_mpi_socket_lets_nobody_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between mpirun's start and the last rank's arrival, when the parent listens."""
    found: list[Any] = []
    meet = MPILaunch.meet

    def attacked(self: MPILaunch) -> Iterator[Any]:
        found.append(listening(os.getpid())[1])
        found.append(assault([os.getpid(), self.pid], tmp_path))
        return meet(self)

    monkeypatch.setattr(MPILaunch, "meet", attacked)
    with MPIPool(Spawn("raise SystemExit(3)")) as pool, pytest.raises(GroupError, match="mpirun exited with code 3"):
        pool.run(GroupJob(lambda group: None, MPIGroup.over_store), 2)
    sockets, entered = found
    assert len(sockets) == 1  # the attack had something to try
    assert entered == []


@needs_root
@pytest.mark.usefixtures("warm_ranks")
def test_ranks_of_a_benchmark_let_nobody_in(tmp_path: Path) -> None:
    found: list[Any] = []

    def task(context: RankContext) -> None:
        context.barrier.wait()
        if context.rank == 0:
            context.report(os.getpid())
        context.barrier.wait()

    def on_report(pid: int) -> None:
        pids = [os.getpid(), pid]
        found.append(
            assault(pids, tmp_path) + [f"{pid} listens on {listening(pid)}" for pid in pids if not loopback_only(pid)]
        )

    run_world(task, 2, name="attacked", on_report=on_report)
    assert found == [[]]


@needs_root
def test_ranks_of_the_launcher_let_nobody_in(tmp_path: Path, warm_python: WarmPython) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys, time
            import gradwire as gw
            group = gw.init()
            group.barrier()
            print(os.getpid(), os.getppid(), flush=True)
            time.sleep(60)
            """
        )
    )
    launcher = warm_python.talk(GRADWIRE_RUN, "--nproc", "2", "--no-prefix", str(script))
    try:
        assert launcher.stdout is not None
        pids = {int(pid) for _ in range(2) for pid in launcher.stdout.readline().split()}
        assert launcher.pid in pids
        entered = assault(sorted(pids), tmp_path)
        entered += [f"{pid} listens on {listening(pid)}" for pid in pids if not loopback_only(pid)]
    finally:
        launcher.terminate()
        launcher.communicate()
    assert entered == []


# -- stores --------------------------------------------------------------------------------------------------------------------


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for task in os.listdir(f"/proc/{pid}/task"):
        for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
            found += family(int(child))
    return found


def listening_ports(pids: list[int]) -> list[int]:
    ports = set()
    for pid in pids:
        inodes = {target[8:-1] for target in descriptors(pid).values() if target.startswith("socket:[")}
        lines = [
            line.split()
            for table in ("tcp", "tcp6")
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()
        ]
        for fields in lines:
            if fields[3] == "0A" and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)


def falsify(port: int) -> list[str]:
    """As another user: report a rank as lost to every group that has keys in the store at `port`; all keys that are there."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 3)  # where gloo listens, and no store, nothing answers
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1))
    keys = store.list_keys()
    for key in keys:
        if key.endswith("/changes"):
            number, joined = 0, 1000  # of the groups in use, and later than anything before
            store.set(key.removesuffix("changes") + "lost", json.dumps([1, "killed by a stranger", number, joined]))
            store.add(key, 1)
    return keys


STORE_SCRIPT = """
    import os, sys, time
    import torch.distributed as dist
    import gradwire as gw

    folder, way = sys.argv[1:]
    if way == "backend":
        gw.register_backend()
        dist.init_process_group("gradwire")
        group = gw.from_process_group()
    else:
        group = gw.init(kind="gloo", timeout=60)
    group.barrier()
    open(f"{folder}/ready-{group.rank}", "w").close()
    while not os.path.exists(f"{folder}/go-on"):
        time.sleep(0.01)
    group.check_peers()  # reads what the membership has of the others
    group.barrier()
    os.write(1, b"well\\n")  # whole: both ranks write to one file
    group.close()
"""


TORCHRUN = "from torch.distributed.run import main; main()"


def start_ranks(way: str, folder: Path, python: WarmPython) -> list[Any]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(STORE_SCRIPT))
    command = ["2", str(script), str(folder), way]
    if way == "gradwire run":
        return [python.start(GRADWIRE_RUN, "--no-prefix", "-n", *command, capture=True)]
    if way == "torchrun":
        return [python.start(TORCHRUN, "--standalone", "--nproc-per-node", *command, capture=True)]
    free = host_store()  # only to find a port
    port = free.port
    del free
    environ = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if way == "manual, with LOCAL_WORLD_SIZE":
        environ |= {"LOCAL_WORLD_SIZE": "2"}
    code = script.read_text()
    return [python.start(code, str(folder), way, env=environ | {"RANK": str(rank)}, capture=True) for rank in range(2)]


TORCHRUN_WAY = pytest.param("torchrun", marks=pytest.mark.acceptance)  # whose ranks import torch


@needs_root
@pytest.mark.parametrize("way", ["gradwire run", TORCHRUN_WAY, "manual", "manual, with LOCAL_WORLD_SIZE", "backend"])
def test_another_user_cannot_end_a_job_through_a_store(
    way: str, tmp_path: Path, warm_python: WarmPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in os.environ:
        if name.startswith("GLOO"):
            monkeypatch.delenv(name)
    started = start_ranks(way, tmp_path, warm_python)
    try:
        deadline = time.monotonic() + 100
        while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
            assert all(process.poll() in (None, 0) for process in started), started[0].communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        pids = [pid for process in started for pid in family(process.pid)]
        ports = listening_ports(pids)
        entered = assault(pids, tmp_path)
        keys = [key for found in all_as_nobody([functools.partial(falsify, port) for port in ports]) for key in found]
        (tmp_path / "go-on").touch()
        said = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert ports  # gloo's, at least: there was something to try
    assert entered == []
    assert [process.returncode for process in started] == [0] * len(started), said
    assert "".join(out for out, _ in said) == "well\n" * 2
    assert not [key for key in keys if key.endswith(("/changes", "/lost", "/ticket")) or "gloo" in key], keys


class TestPlantedLinks:
    """Another user has made links in a run directory that lead to files of this user, under the names that a run writes."""

    @pytest.fixture
    def planted(self, tmp_path: Path) -> Iterator[Path]:
        """The directory. At the end every link must be replaced by a private file, and the victim be what it was."""
        victim, run = tmp_path / "victim", tmp_path / "run"
        victim.write_text("precious")
        run.mkdir()
        before = victim.stat()
        names = ["hang-1.json", "outcome.json", "rank-0.awaited", "rank-0.stacks", "rank-0.ring", "rank-0.names"]
        for name in names:
            (run / name).symlink_to(victim)
        yield run
        assert victim.read_text() == "precious"
        assert victim.stat().st_mode == before.st_mode
        written = {path.name: path.lstat().st_mode for path in run.iterdir() if not path.is_symlink()}
        assert written, "nothing was written"
        assert {name: oct(mode) for name, mode in written.items() if mode != 0o100600} == {}

    def test_an_outcome(self, planted: Path) -> None:
        save(planted, RunOutcome("", None, None, ()))
        assert load(planted) is not None

    def test_a_hang_report(self, planted: Path) -> None:
        watch = HangWatch(RunFollower(planted))
        suspect = Suspect(0, 1, Cause.DEAD, ProcessState.GONE)
        *_, line = watch._print(watch._report_of(None, [suspect]))
        assert "saved as" in line
        assert [hang.file for hang in saved_hangs(planted)] == ["hang-1.json"]

    def test_the_answer_to_a_question(self, planted: Path) -> None:
        path = planted / "rank-0.awaited"
        with answer_questions(path) as how:
            since = time.monotonic_ns()
            assert ask({"pid": os.getpid()}, how)
            assert read_answers({0: path}, since=since, within=60) == {0: []}

    def test_a_recorder(self, planted: Path) -> None:
        observe.start(planted, rank=0, size=1)
        observe.stop()
        left = {path.name for path in planted.iterdir() if path.is_symlink()}
        assert left == {"hang-1.json", "outcome.json", "rank-0.awaited"}

    @needs_root
    def test_a_directory_of_another_user_is_refused(self, tmp_path: Path) -> None:
        run = tmp_path / "theirs"
        run.mkdir()
        os.chown(run, NOBODY, NOBODY)
        with pytest.warns(UserWarning, match="belongs to another user, so this process is not recorded"):
            observe.start(run, rank=0, size=1)
        assert list(run.iterdir()) == []
