"""The launcher's loop, in this process, on scripts that do not import torch, so that they start at once."""

import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from gradwire.launch import preload
from gradwire.launch.run_script import python_command
from gradwire.launch.supervise import LaunchSpec, Supervisor
from gradwire.launch.supervise_elastic import ElasticSupervisor

HEAD = """
import os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
folder = os.path.dirname(__file__)
def mark(name):
    open(os.path.join(folder, f"{name}-{rank}"), "w").close()
def wait_for(mark):
    while not os.path.exists(os.path.join(folder, mark)):
        time.sleep(0.01)
def stay():  # not in one call: a signal that arrives just before it is handled after it
    while True:
        time.sleep(0.01)
"""


@pytest.fixture
def launch(tmp_path, capfdbinary, request):
    """Run a script on some ranks: (exit code, stdout, stderr). "forked": they are forks of one process, which imports `module`."""
    forked = getattr(request, "param", None) == "forked"

    def start(
        script: str, size: int = 2, module: str = "", cold: str = "", plan=None, **options
    ) -> tuple[int, bytes, bytes]:
        for mark in tmp_path.glob("*-[0-9]"):  # of an earlier launch
            mark.unlink()
        file = tmp_path / "script.py"
        file.write_text(HEAD + textwrap.dedent(script))
        ranks = [str(rank) for rank in range(size)]
        path = f"{tmp_path / 'lib'}:{Path(__file__).parents[2]}"
        shared = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path, **({} if plan is None else plan.variables)}
        environments = [{"RANK": rank, "GRADWIRE_RANK": rank, **shared} for rank in ranks]
        errors = Path(tempfile.mkdtemp(dir=tmp_path))
        command = [sys.executable, *python_command("gradwire.launch.run_script", errors=str(errors)), str(file)]
        if forked:
            (tmp_path / "lib").mkdir()
            (tmp_path / "lib" / "heavy.py").write_text(HEAD.replace("rank =", "#") + textwrap.dedent(module))
            heavy = {"directory": str(tmp_path), "modules": ["heavy"]}  # torch takes seconds
            options["preload"] = server = preload.PreloadedPython(command, environments, **heavy)
        spec = LaunchSpec(command, environments, errors=errors, **options)
        code = (Supervisor(spec) if plan is None else ElasticSupervisor(spec, plan)).supervise()
        if forked:
            assert (server.reason or "").startswith(cold)
            assert bool(server.reason) == bool(cold)
        return code, *capfdbinary.readouterr()

    return start
