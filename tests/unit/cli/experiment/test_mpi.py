"""Finding Open MPI, and how ranks are started under it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest

from gradwire.cli.experiment import mpi

LAUNCHER = mpi.Launcher("mpirun", "Open MPI v5.0.11")


def test_with_a_core_for_every_rank_nothing_special_is_asked_for(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert LAUNCHER.command(2, cores=2) == ["mpirun", "-n", "2", "--bind-to", "none"]
    assert LAUNCHER.environment(2, cores=2) == {}


def test_with_more_ranks_than_cores_it_may_crowd_and_yields(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert LAUNCHER.command(4, cores=2)[-2:] == ["--map-by", ":OVERSUBSCRIBE"]
    assert LAUNCHER.environment(4, cores=2) == {"OMPI_MCA_mpi_yield_when_idle": "1"}


def test_root_must_say_so(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert set(LAUNCHER.environment(2, cores=2)) == {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"}


def test_the_rank_is_in_the_environment():
    assert mpi.rank_under_mpirun({"OMPI_COMM_WORLD_RANK": "3"}) == 3


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
def test_mpirun_beside_the_interpreter_is_preferred(monkeypatch, tmp_path):
    monkeypatch.setattr(subprocess, "run", _said(0, "Open MPI v5.0.11, package: x"))
    assert mpi.find() == mpi.Launcher(str(tmp_path / "mpirun"), "Open MPI v5.0.11")


@pytest.mark.usefixtures("_installed")
def test_no_mpirun(monkeypatch, tmp_path):
    (tmp_path / "mpirun").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert mpi.find() == "there is no mpirun"


def test_no_mpi4py(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert mpi.find() == "mpi4py is not installed (pip install gradwire[mpi])"
