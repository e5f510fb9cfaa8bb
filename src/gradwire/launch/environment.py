"""The environment of a rank that `gradwire run` starts. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gradwire.launch.world import Address

_OTHERS = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_MAX_RESTARTS",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
)
"""What a torchrun around us would have told the ranks of itself."""


def rank_environment(
    base: Mapping[str, str], extra: Mapping[str, str], *, rank: int, size: int, private: str, store: Address, cpus: int
) -> dict[str, str]:
    """The variables of one rank: `base` is the launcher's own environment, `extra` what the user added for the ranks.

    Beside gradwire's variables, among them the name of the `private` store, a rank gets torch's, so that a script which calls
    `dist.init_process_group("gloo")` runs too; they say that `store` is hosted already. Output is not buffered, so that it is seen
    when it is written and not lost with a rank that is killed; a crash in C++ prints a Python traceback; ranks share the cores,
    where torch would give all of them to each; and gloo listens on the loopback interface only, since all ranks are on this host.
    What the user has set is left alone.
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
