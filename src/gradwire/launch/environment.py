"""The environment of a rank that `gradwire run` starts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradwire.launch.world import Address

RUN_DIRECTORY = "GRADWIRE_RUN_DIR"
"""The variable that names the directory in which ranks are recorded."""
_OTHERS = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_MAX_RESTARTS",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
)
"""Variables that an outer torchrun would have set."""


@dataclass(frozen=True, slots=True)
class LocalWorld:
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

    In addition to gradwire's variables, among them the name of the private store, a rank gets torch's, so that a script which
    calls `dist.init_process_group("gloo")` runs too; they declare that the store is already hosted. Output is not buffered, so that
    it appears when it is written and is not lost if a rank is killed; a crash in C++ prints a Python traceback; ranks share the
    cores, whereas torch would use all of them in each; and gloo listens only on the loopback interface, since all ranks are on
    this host. Variables that the user has set are not changed.
    """
    ours = {
        "GRADWIRE_RANK": str(rank),
        "GRADWIRE_SIZE": str(world.size),
        "GRADWIRE_STORE": world.private,
        "RANK": str(rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world.size),
        "MASTER_ADDR": world.store.host,
        "MASTER_PORT": str(world.store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    defaults = {
        "OMP_NUM_THREADS": str(max(1, world.cpus // world.size)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    inherited = {name: value for name, value in base.items() if name not in _OTHERS}
    return {**defaults, **inherited, **ours, **extra}
