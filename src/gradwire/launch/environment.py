"""The environment of a rank that `gradwire run` starts. Pure."""

from __future__ import annotations

from collections.abc import Mapping

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


def rank_environment(
    base: Mapping[str, str], extra: Mapping[str, str], *, rank: int, size: int, private: str, store: Address, cpus: int
) -> dict[str, str]:
    """The variables of one rank: `base` is the launcher's own environment, `extra` what the user added for the ranks.

    In addition to gradwire's variables, among them the name of the `private` store, a rank gets torch's, so that a script which
    calls `dist.init_process_group("gloo")` runs too; they declare that `store` is already hosted. Output is not buffered, so that
    it appears when it is written and is not lost if a rank is killed; a crash in C++ prints a Python traceback; ranks share the
    cores, whereas torch would use all of them in each; and gloo listens only on the loopback interface, since all ranks are on
    this host. Variables that the user has set are not changed.
    """
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
        "GLOO_SOCKET_IFNAME": "lo",
    }
    inherited = {name: value for name, value in base.items() if name not in _OTHERS}
    return {**defaults, **inherited, **ours, **extra}
