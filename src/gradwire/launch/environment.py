"""Variables that gradwire sets for the ranks of `gradwire run`, and those that it reads. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from gradwire.errors import UsageError
from gradwire.launch.world import Address
from gradwire.policies import DefaultChecks, NonFinite

RUN_DIRECTORY = "GRADWIRE_RUN_DIR"
NONFINITE, CHECK_DIVERGENCE = "GRADWIRE_NONFINITE", "GRADWIRE_CHECK_DIVERGENCE"
"""The variables that choose checks for models whose code chooses none."""
SERVER = "GRADWIRE_PRELOAD"
"""The variable that makes the process of a rank the server of preload.py: a descriptor, modules and a directory, as JSON."""
HOOK = "GRADWIRE_HOOK"
"""The variable that names the hook of models that take the place of torch's."""
VERIFY = "GRADWIRE_VERIFY_DDP"
"""The variable of ranks whose steps are compared: the class, the number of steps, and the directory, separated by colons."""
HUB, HUB_KEY, MEMBER = "GRADWIRE_HUB", "GRADWIRE_HUB_KEY", "GRADWIRE_MEMBER"
ELASTIC, STARTERS = "GRADWIRE_ELASTIC", "GRADWIRE_STARTERS"
"""The variables of an elastic run: the address of its hub, the key in hexadecimal digits, the id of the process, the least and the
largest number of ranks (2:8), and for how many processes the first view waits; unset for those that come later."""
SHM_DIRECTORY, SHM_ROOM = "GRADWIRE_SHM_DIRECTORY", "GRADWIRE_SHM_ROOM"
"""The variables for the location and the maximum size of shared memory."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_OTHERS = (
    *("TORCHELASTIC_", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *(HUB, MEMBER, ELASTIC, STARTERS),
)
"""How the names of variables begin that an outer torchrun, or an outer elastic run, would have set."""


def read_checks(environment: Mapping[str, str]) -> DefaultChecks:
    """The checks that the environment chooses.

    >>> read_checks({NONFINITE: "skip", CHECK_DIVERGENCE: "100"})
    DefaultChecks(nonfinite=<NonFinite.SKIP: 'skip'>, check_divergence=100)
    """
    policy, every = environment.get(NONFINITE) or NonFinite.PASS.value, environment.get(CHECK_DIVERGENCE) or None
    values = [one.value for one in NonFinite]
    if policy not in values:
        raise UsageError(f"{NONFINITE}={policy}: must be one of {', '.join(values)}.")
    if every is not None and not (every.isdecimal() and int(every)):
        raise UsageError(f"{CHECK_DIVERGENCE}={every}: must be a number of steps, at least 1.")
    return DefaultChecks(NonFinite(policy), None if every is None else int(every))


class LocalWorld(NamedTuple):
    """What the ranks that `gradwire run` starts on this host have in common."""

    size: int
    private: str
    """The name of their private store."""
    store: Address
    """The store for torch's own groups."""
    cpus: int
    """Cores that they share."""


def rank_environment(base: Mapping[str, str], extra: Mapping[str, str], rank: int, world: LocalWorld) -> dict[str, str]:
    """The variables of one rank: `base` is the launcher's own environment, `extra` what the user added for the ranks.

    In addition to gradwire's variables a rank gets torch's, so that a script which calls `dist.init_process_group("gloo")` runs
    too; they declare that the store is already hosted. Output is not buffered, a crash in C++ prints a Python traceback, ranks
    share the cores, and gloo listens only on the loopback interface, if a hub does. Variables that the user has set stay.
    """
    size, private, store, cpus = world
    ours = {
        "GRADWIRE_RANK": str(rank),
        "GRADWIRE_SIZE": str(size),
        "GRADWIRE_STORE": private,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cpus // size)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **({"GLOO_SOCKET_IFNAME": "lo"} if extra.get(HUB, "127.").startswith("127.") else {}),
    }
    inherited = {name: value for name, value in base.items() if not name.startswith(_OTHERS)}
    return {**defaults, **inherited, **ours, **extra}


def shared_memory_options(
    environ: Mapping[str, str], *, directory: str | None = None, room: int | None = None
) -> dict[str, Any]:
    """Keyword arguments of groups that share memory: what the caller gave, or else the environment.

    >>> shared_memory_options({"GRADWIRE_SHM_ROOM": "2G"}, directory="/mnt/shm")
    {'directory': '/mnt/shm', 'room': 2147483648}
    """
    if room is None and (text := environ.get(SHM_ROOM, "")):
        match = re.fullmatch(r"(\d+)\s*([KMGT]?)(iB|B)?", text.strip(), re.IGNORECASE)
        if match is None:
            raise UsageError(
                f"{SHM_ROOM} is {text!r}, not a number of bytes. Write a number, or one with K, M, G or T."
            )
        room = int(match[1]) * _UNITS[match[2].upper()]
    return {"directory": directory or environ.get(SHM_DIRECTORY) or None, "room": room}
