"""How programs under mpirun end: with the right exit code, promptly, with nothing left behind, and never not at all."""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from gradwire.testing.mpi import command, find_mpirun, missing, settings
from helpers.exit_messages import without_leaks_of_triton

pytestmark = [pytest.mark.skipif(missing() is not None, reason=str(missing())), pytest.mark.usefixtures("whole_exit")]

PRELUDE = """
import sys, time, torch
import gradwire.groups.mpi.runtime as runtime
from gradwire.collectives import build
from gradwire.errors import CollectiveTimeout, GroupError
from gradwire.groups.mpi import MPIGroup
group = MPIGroup(timeout=20)
group.on_completion(lambda info: None)
group.all_reduce(torch.ones(3))
"""

QUIET = {
    "just finishing, in MPI that the group started": """
        works = [group.all_reduce(torch.ones(100_000), async_op=True) for _ in range(5)]
        group.all_reduce(torch.ones(9, dtype=torch.bfloat16), async_op=True)
    """,
    "operations that nobody joined": """
        import os, pathlib
        submitted = pathlib.Path(os.environ["TMPDIR"], "submitted")
        if group.rank == 0:
            works = [group.all_reduce(torch.ones(100_000), async_op=True) for _ in range(3)]
            works.append(group.all_reduce(torch.ones(3, dtype=torch.bfloat16), async_op=True))
            works += [group.recv(torch.ones(3), src=1, async_op=True), group.send(torch.ones(3), dst=1, async_op=True)]
            future = works[0].get_future()
            submitted.touch()
        else:
            while not submitted.exists():  # rank 0 could submit no more to a group that this rank has left
                time.sleep(0.01)
            submitted.unlink()
    """,
    "closed and aborted": """
        part, other = group.split(0), group.split(0)
        if group.rank == 0:
            part.all_reduce(torch.ones(100_000), async_op=True)
            part.close(timeout=0.1)
            other.all_reduce(torch.ones(100_000), async_op=True)
            other.abort("here")
        group.close()
    """,
    "MPI ended by the program": """
        from mpi4py import MPI
        group.close()
        MPI.Finalize()
    """,
}


def run(script: str, folder: Path, n: int = 2, limit: float = 300) -> tuple[int, str, float]:
    """Exit code, all that was said, and the seconds it took."""
    began = time.perf_counter()
    done = subprocess.run(
        [*command(str(find_mpirun()), n), sys.executable, "-c", script],
        env={**os.environ, **settings(n), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit,
        check=False,
    )
    return done.returncode, without_leaks_of_triton(done.stdout), time.perf_counter() - began


@pytest.mark.parametrize("name", QUIET)
def test_it_ends_well(name: str, tmp_path: Path) -> None:
    before = "import mpi4py\nmpi4py.rc.initialize = False\n" if "that the group started" in name else ""
    code, said, seconds = run(before + PRELUDE + textwrap.dedent(QUIET[name]), tmp_path)
    assert (code, said) == (0, "")
    assert seconds < 150  # a rank that waits for another at exit waits longer
    assert not list(tmp_path.iterdir())


def test_an_uncaught_exception_ends_all_ranks_with_its_code(tmp_path: Path) -> None:
    code, said, _ = run(
        PRELUDE + "if group.rank == 1: raise LookupError('my own')\ngroup.all_reduce(torch.ones(2))", tmp_path
    )
    assert code == 1
    assert "LookupError: my own" in said
    assert "PeerLost" in said  # the other was told
    assert "rank 1 is lost: it has closed its group" in said


@pytest.mark.parametrize(("how", "body"), [
    ("an uncaught exception", "raise LookupError('my own')"),
    ("operations that never completed", "group.all_reduce(torch.ones(2), async_op=True)"),
])  # fmt: skip
def test_a_rank_that_hangs_does_not_hold_the_job(how: str, body: str, tmp_path: Path) -> None:
    script = f"runtime.EXIT_PATIENCE = 2\nif group.rank == 1: time.sleep(250)\n{body}"
    code, said, seconds = run(PRELUDE + script, tmp_path)
    assert code == 128 + signal.SIGALRM
    assert "Alarm clock" in said
    assert seconds < 200


PAGE = (Path(__file__).parents[4] / "docs" / "mpi.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_the_page_matches_the_code(code: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    status, said, _ = run(code.replace("29517", str(port)), tmp_path)
    assert (status, said.splitlines()) == (0, re.findall(r"# -> (.*)$", code, re.M))
