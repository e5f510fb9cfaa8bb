"""Which rank of which world a process is, by its environment alone."""

import pytest

from gradwire.errors import UsageError
from gradwire.launch import Address, Launcher, World, find_world

GRADWIRE = {"GRADWIRE_RANK": "1", "GRADWIRE_SIZE": "4", "GRADWIRE_STORE": "123:4:5:678"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
BY_HAND = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
SBATCH = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "SLURM_NODEID": "0"}
SRUN = {
    **SBATCH,
    "SLURM_PROCID": "4",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "3,2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}


def test_alone():
    world = find_world({"PATH": "/bin", "GRADWIRE_HOME": "/"})
    assert world == World(0, 1, Launcher.NONE, local_rank=0, local_size=1)
    assert world.on_one_host


def test_gradwire_run():
    world = find_world(GRADWIRE)
    expected = World(1, 4, Launcher.GRADWIRE, local_rank=1, local_size=4, private="123:4:5:678")
    assert world == expected
    assert world.on_one_host


def test_torchrun():
    world = find_world(TORCHRUN)
    assert (world.rank, world.size, world.launcher) == (3, 8, Launcher.TORCHRUN)
    assert (world.local_rank, world.local_size, world.on_one_host) == (1, 2, False)
    assert (world.store, world.hosted, world.attempt) == (Address("node1", 29500), True, "2")


def test_torchs_variables_by_hand():
    world = find_world(BY_HAND)
    assert (world.rank, world.size, world.hosted, world.attempt) == (3, 8, False, "")
    assert (world.local_rank, world.local_size, world.on_one_host) == (None, None, False)


@pytest.mark.parametrize(
    ("environ", "place"), [(OPEN_MPI, (5, 6, 2, 3)), (HYDRA, (1, 2, 0, 1)), ({**HYDRA, **OPEN_MPI}, (5, 6, 2, 3))]
)
def test_mpirun(environ, place):
    world = find_world(environ)
    assert (world.rank, world.size, world.local_rank, world.local_size) == place
    assert (world.launcher, world.store, world.hosted) == (Launcher.MPIRUN, Address("", 0), False)


def test_mpirun_with_a_meeting_place():
    assert find_world({**OPEN_MPI, "MASTER_ADDR": "a", "MASTER_PORT": "5"}).store == Address("a", 5)
    assert find_world({**OPEN_MPI, "MASTER_ADDR": "a"}).store == Address("a", 0)
    with pytest.raises(UsageError, match="under mpirun: MASTER_ADDR is not set"):
        find_world({**OPEN_MPI, "MASTER_PORT": "5"})


def test_srun():
    world = find_world(SRUN)
    assert (world.rank, world.size, world.launcher) == (4, 7, Launcher.SLURM)
    assert (world.local_rank, world.local_size, world.hosted) == (1, 2, False)
    assert world.store is not None
    assert world.store.host == "gpu07"  # where rank 0 is, not where srun was called
    assert 12_000 <= world.store.port < 32_000


def test_every_rank_of_a_step_finds_the_same_port_and_another_step_another():
    def port(**changes: str) -> int:
        store = find_world({**SRUN, **changes}).store
        assert store is not None
        return store.port

    assert port() == port(SLURM_PROCID="0", SLURM_NODEID="0")
    assert len({port(), port(SLURM_STEP_ID="2"), port(SLURM_JOB_ID="78"), port(SLURM_JOB_ID="79")}) == 4
    assert port(MASTER_PORT="4711") == 4711


def test_srun_on_one_host_needs_no_name():
    environ = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_NODEID": "0"}
    del environ["SLURM_STEP_NODELIST"]
    world = find_world(environ)
    assert world.on_one_host
    assert world.store is not None
    assert world.store.host == "127.0.0.1"
    assert find_world({**environ, "MASTER_ADDR": "head"}).store == Address("head", world.store.port)


def test_srun_in_old_names():
    environ = {**SRUN, "SLURM_JOBID": "77", "SLURM_STEPID": "1", "SLURM_NTASKS": "7", "SLURM_NTASKS_PER_NODE": "2"}
    environ["SLURM_JOB_NODELIST"] = environ["SLURM_STEP_NODELIST"]
    for name in ("JOB_ID", "STEP_ID", "STEP_NUM_TASKS", "STEP_TASKS_PER_NODE", "STEP_NODELIST"):
        del environ[f"SLURM_{name}"]
    assert find_world(environ) == find_world(SRUN)


@pytest.mark.parametrize("step", [None, "batch", "4294967290", "4294967291", "4294967292"])
def test_the_shell_of_sbatch_or_salloc_is_alone(step):
    environ = SBATCH if step is None else {**SBATCH, "SLURM_STEP_ID": step}
    assert find_world(environ).launcher is Launcher.NONE


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({**SRUN, **OPEN_MPI, **TORCHRUN, **GRADWIRE}, Launcher.GRADWIRE),
        ({**SRUN, **OPEN_MPI, **TORCHRUN}, Launcher.TORCHRUN),
        ({**SRUN, **BY_HAND}, Launcher.TORCHRUN),
        ({**SRUN, **OPEN_MPI}, Launcher.MPIRUN),
        ({**SRUN, **HYDRA}, Launcher.MPIRUN),  # mpiexec whose proxies were started by srun
        ({**SRUN, "PMI_RANK": "4", "PMI_SIZE": "7"}, Launcher.SLURM),  # srun --mpi=pmi2
        ({**SRUN, "WORLD_SIZE": "7", "MASTER_ADDR": "gpu07"}, Launcher.SLURM),  # a batch script's leftovers
        ({**OPEN_MPI, "RANK": "1"}, Launcher.MPIRUN),
        ({**SBATCH, **OPEN_MPI}, Launcher.MPIRUN),
        ({**SBATCH, **TORCHRUN}, Launcher.TORCHRUN),
    ],
)
def test_the_inner_launcher_counts(environ, launcher):
    assert find_world(environ).launcher is launcher


def without(environ: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key != name}


@pytest.mark.parametrize(
    ("environ", "missing"),
    [
        *((without(GRADWIRE, name), name) for name in GRADWIRE),
        *((without(TORCHRUN, name), name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
        *((without(BY_HAND, name), name) for name in BY_HAND),
        *((without(OPEN_MPI, name), name) for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")),
        *((without(HYDRA, name), name) for name in ("PMI_RANK", "PMI_SIZE")),
        (without(SRUN, "SLURM_PROCID"), "SLURM_PROCID"),
        (without(SRUN, "SLURM_JOB_ID"), "SLURM_JOB_ID or SLURM_JOBID"),
        (without(SRUN, "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST or SLURM_JOB_NODELIST"),
        ({**BY_HAND, "MASTER_ADDR": ""}, "MASTER_ADDR"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_half_an_environment_is_an_error_that_names_the_other_half(environ, missing):
    with pytest.raises(UsageError, match=f"finding the world under .*: {missing} is not set"):
        find_world(environ)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**BY_HAND, "RANK": "first"}, "under torchrun: RANK is 'first', not a number"),
        ({**BY_HAND, "RANK": "-1"}, "RANK is '-1', not a number"),
        ({**BY_HAND, "RANK": "8"}, "rank 8 of 8 ranks"),
        ({**BY_HAND, "WORLD_SIZE": "0"}, "rank 3 of 0 ranks"),
        ({**TORCHRUN, "MASTER_PORT": "0"}, "under torchrun: MASTER_PORT is 0, which is not a valid port"),
        ({**OPEN_MPI, "MASTER_ADDR": "a", "MASTER_PORT": "70000"}, "under mpirun: MASTER_PORT is 70000"),
        ({**SRUN, "MASTER_PORT": "0"}, "under SLURM: MASTER_PORT is 0"),
        ({**GRADWIRE, "GRADWIRE_STORE": "4000"}, "GRADWIRE_STORE is '4000', not the name of a private store"),
        ({**GRADWIRE, "GRADWIRE_STORE": "127.0.0.1:4000"}, "GRADWIRE_STORE is '127.0.0.1:4000', not the name"),
        ({**GRADWIRE, "GRADWIRE_STORE": "1:2:3:../4"}, "GRADWIRE_STORE is '1:2:3:../4', not the name"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "many"}, "SLURM_STEP_TASKS_PER_NODE is 'many'"),
        ({**SRUN, "SLURM_NODEID": "9"}, "SLURM_NODEID is 9, but there are"),
        ({**SRUN, "SLURM_STEP_NODELIST": "gpu["}, "reading the list of hosts 'gpu\\['"),
    ],
)
def test_nonsense_is_named(environ, message):
    with pytest.raises(UsageError, match=message):
        find_world(environ)
