"""The launcher's loop, in this process, on scripts that do not import torch, so that they start at once."""

import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from gradwire.launch.run_script import python_command
from gradwire.launch.supervise import LaunchSpec, supervise

HEAD = """
import os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
folder = os.path.dirname(__file__)
def mark(name):
    open(os.path.join(folder, f"{name}-{rank}"), "w").close()
def wait_for(mark):
    while not os.path.exists(os.path.join(folder, mark)):
        time.sleep(0.01)
"""


@pytest.fixture
def launch(tmp_path, capfdbinary):
    """Run a script on some ranks: (exit code, stdout, stderr)."""

    def start(script: str, size: int = 2, **options) -> tuple[int, bytes, bytes]:
        for mark in tmp_path.glob("*-[0-9]"):  # of an earlier launch
            mark.unlink()
        file = tmp_path / "script.py"
        file.write_text(HEAD + textwrap.dedent(script))
        ranks = [str(rank) for rank in range(size)]
        environments = [{"RANK": rank, "GRADWIRE_RANK": rank, "PYTHONUNBUFFERED": "1"} for rank in ranks]
        errors = Path(tempfile.mkdtemp(dir=tmp_path))
        command = [sys.executable, *python_command("gradwire.launch.run_script", errors=str(errors)), str(file)]
        code = supervise(LaunchSpec(command, environments, errors=errors, **options))
        return code, *capfdbinary.readouterr()

    return start
