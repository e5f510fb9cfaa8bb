"""`find_world`: which rank of which world a process is, from its environment alone. Pure: no socket, no torch, no clock.

Note [Who started this process]
Launchers nest, and the variables of the outer one are still set under the inner one. So the order is from innermost to outermost:

1. `gradwire run`: only it sets GRADWIRE_RANK.
2. torch's variables, from torchrun or from the user. WORLD_SIZE or RANK alone is often a leftover of a batch script, so another
   launcher takes precedence over half of this pair.
3. mpirun: Open MPI's variables, then PMI's (MPICH, Intel MPI). `srun --mpi=pmi2` sets PMI's too: if equal to SLURM's, it is SLURM.
4. SLURM, if srun started the process. The shell of sbatch or salloc is alone: its step, if any, has a number reserved by SLURM.
5. Otherwise a single process.

If only some variables of a launcher are set, the error names the missing ones: running alone would make N worlds of one rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from gradwire.errors import UsageError
from gradwire.runtime.private_file import is_name

Environment = Mapping[str, str]

_LOOPBACK = "127.0.0.1"
_FIRST_RESERVED_STEP = 0xFFFFFFF0  # SLURM numbers steps from 0; its own (batch, extern, interactive) from the top
_PORTS = range(12_000, 32_000)  # below Linux's ephemeral ports


class Launcher(Enum):
    """Who started the ranks."""

    GRADWIRE = "gradwire run"
    TORCHRUN = "torchrun"
    """torchrun, or anything else that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    MPIRUN = "mpirun"
    """mpirun or mpiexec of Open MPI, MPICH or Intel MPI."""
    SLURM = "SLURM"
    NONE = "a single process"


@dataclass(frozen=True, slots=True)
class Address:
    """The store's address. Port 0: rank 0 chooses one and sends it to the others; host "": rank 0's own."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class World:
    """A process's rank in its world, and the world's rendezvous store."""

    rank: int
    size: int
    launcher: Launcher
    local_rank: int | None = None
    local_size: int | None = None
    """Rank and number of ranks on this host, if known."""
    store: Address | None = None
    """The store's address; None for a single process, and if the launcher has made a private store."""
    private: str = ""
    """The name of the private store that the launcher has made; empty if it has made none."""
    hosted: bool = False
    """Whether the launcher hosts the store; otherwise rank 0 does."""
    attempt: str = ""
    """Distinguishes the attempts of a launcher that restarts ranks over one store."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise UsageError(
                f"finding the world under {self.launcher.value}: rank {self.rank} of {self.size} ranks. Ranks count from 0 to "
                "size - 1: check which variables were changed manually."
            )

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks are known to be on this host."""
        return self.local_size == self.size

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} ({self.launcher.value})"


def find_world(environ: Environment) -> World:
    """The world of a process with these environment variables. See Note [Who started this process].

    >>> print(find_world({}))
    rank 0 of 1 (a single process)
    >>> print(find_world({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}))
    rank 1 of 4 (torchrun)
    """
    if any(name in environ for name in ("GRADWIRE_RANK", "GRADWIRE_SIZE", "GRADWIRE_STORE")):
        return _gradwire_run(_Reader(environ, Launcher.GRADWIRE))
    if "TORCHELASTIC_RUN_ID" in environ or ("RANK" in environ and "WORLD_SIZE" in environ):
        return _torchrun(_Reader(environ, Launcher.TORCHRUN))
    if "OMPI_COMM_WORLD_RANK" in environ or "OMPI_COMM_WORLD_SIZE" in environ:
        return _mpirun(_Reader(environ, Launcher.MPIRUN), "OMPI_COMM_WORLD")
    srun = _is_srun(environ)
    if ("PMI_RANK" in environ or "PMI_SIZE" in environ) and not (srun and _pmi_is_slurms(environ)):
        return _mpirun(_Reader(environ, Launcher.MPIRUN), "PMI")
    if srun:
        return _slurm(_Reader(environ, Launcher.SLURM))
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _torchrun(_Reader(environ, Launcher.TORCHRUN))
    return World(0, 1, Launcher.NONE, local_rank=0, local_size=1)


class _Reader:
    """Reads variables for one launcher; errors name those that are missing or invalid."""

    def __init__(self, environ: Environment, launcher: Launcher) -> None:
        self.environ = environ
        self.launcher = launcher

    def text(self, *names: str) -> str:
        """The first of `names` that is set."""
        for name in names:
            if self.environ.get(name):
                return self.environ[name]
        raise UsageError(
            f"finding the world under {self.launcher.value}: {' or '.join(names)} is not set, but other variables of "
            f"{self.launcher.value} are. Start every rank with {self.launcher.value}, or unset its variables to run alone."
        )

    def invalid(self, value: object, why: str, *names: str) -> UsageError:
        """The error for a value of the first of `names` that is set."""
        name = next(name for name in names if self.environ.get(name))
        return UsageError(
            f"finding the world under {self.launcher.value}: {name} is {value!r}, {why}. Check which variables were changed "
            "manually."
        )

    def number(self, *names: str) -> int:
        """The same as a number of 0 or more."""
        text = self.text(*names)
        if not text.isascii() or not text.isdigit():
            raise self.invalid(text, "not a number", *names)
        return int(text)

    def port(self, name: str) -> int:
        """The same as a port that can be connected to."""
        port = self.number(name)
        if not 0 < port < 1 << 16:
            raise self.invalid(port, "which is not a valid port (1 to 65535)", name)
        return port

    def maybe(self, *names: str) -> int | None:
        """The same, or None if none of them is set."""
        return self.number(*names) if any(self.environ.get(name) for name in names) else None


def _gradwire_run(read: _Reader) -> World:
    rank, size = read.number("GRADWIRE_RANK"), read.number("GRADWIRE_SIZE")
    store = read.text("GRADWIRE_STORE")
    if not is_name(store):
        raise read.invalid(store, "not the name of a private store", "GRADWIRE_STORE")
    return World(rank, size, read.launcher, local_rank=rank, local_size=size, private=store)


def _torchrun(read: _Reader) -> World:
    return World(
        read.number("RANK"),
        read.number("WORLD_SIZE"),
        read.launcher,
        local_rank=read.maybe("LOCAL_RANK"),
        local_size=read.maybe("LOCAL_WORLD_SIZE"),
        store=Address(read.text("MASTER_ADDR"), read.port("MASTER_PORT")),
        hosted=read.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=read.environ.get("TORCHELASTIC_RESTART_COUNT", ""),
    )


def _mpirun(read: _Reader, prefix: str) -> World:
    """The store's address is as set by the user; by default rank 0 chooses one and sends it over MPI."""
    store = Address(read.environ.get("MASTER_ADDR", ""), 0)
    if read.environ.get("MASTER_PORT"):
        store = Address(read.text("MASTER_ADDR"), read.port("MASTER_PORT"))
    return World(
        read.number(f"{prefix}_RANK"),
        read.number(f"{prefix}_SIZE"),
        read.launcher,
        local_rank=read.maybe(f"{prefix}_LOCAL_RANK", "MPI_LOCALRANKID"),
        local_size=read.maybe(f"{prefix}_LOCAL_SIZE", "MPI_LOCALNRANKS"),
        store=store,
    )


def _is_srun(environ: Environment) -> bool:
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    return step.isdigit() and int(step) < _FIRST_RESERVED_STEP


def _pmi_is_slurms(environ: Environment) -> bool:
    mine = environ.get("PMI_RANK"), environ.get("PMI_SIZE")
    return mine == (environ.get("SLURM_PROCID"), environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS")))


def _slurm(read: _Reader) -> World:
    rank, size = read.number("SLURM_PROCID"), read.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    local_size = _tasks_here(read)
    if read.environ.get("MASTER_PORT"):
        port = read.port("MASTER_PORT")
    else:
        job, step = read.number("SLURM_JOB_ID", "SLURM_JOBID"), read.number("SLURM_STEP_ID", "SLURM_STEPID")
        port = _PORTS[(job * 101 + step) % len(_PORTS)]  # neighboring jobs and steps on one host get different ones
    # Not SLURM_LAUNCH_NODE_IPADDR: that is the node that called srun, perhaps a login node. Rank 0 is on the step's first host.
    host = read.environ.get("MASTER_ADDR") or (
        _LOOPBACK if local_size == size else first_host(read.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
    )
    local_rank = read.maybe("SLURM_LOCALID")
    return World(rank, size, read.launcher, local_rank=local_rank, local_size=local_size, store=Address(host, port))


def _tasks_here(read: _Reader) -> int | None:
    """How many tasks the step has on this host: of `2(x3),1` the first three hosts have 2, and the fourth 1."""
    node, text = read.maybe("SLURM_NODEID"), read.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    if not text or node is None:
        return read.maybe("SLURM_NTASKS_PER_NODE")
    hosts = 0
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        hosts += int(times or 1)
        if node < hosts:
            return int(count)
    raise UsageError(
        f"finding the world under SLURM: SLURM_STEP_TASKS_PER_NODE is {text!r}, which should look like 2(x3),1, and SLURM_NODEID "
        f"is {node}, but there are {hosts} hosts. Check which variables were changed manually."
    )


def first_host(nodelist: str) -> str:
    """The first host of SLURM's compressed list: `node[01-03,07],gpu5` is node01, node02, node03, node07 and gpu5.

    >>> first_host("node[01-03,07],gpu5"), first_host("r[8-10]n[0-1]-ib")
    ('node01', 'r8n0-ib')
    """
    first = re.match(r"(?:[^\[\],]|\[\d+(?:[-,]\d+)*\])+(?=,|$)", nodelist)
    if first is None:
        raise UsageError(
            f"reading the list of hosts {nodelist!r}: it should look like node[01-03,07],gpu5. Under SLURM it comes from "
            "SLURM_STEP_NODELIST, and MASTER_ADDR can be set to the host of rank 0 instead."
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])
