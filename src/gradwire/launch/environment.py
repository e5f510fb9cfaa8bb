"""The environment of a rank that `gradwire run` starts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradwire.errors import UsageError
from gradwire.launch.world import Address
from gradwire.policies import DefaultChecks, NonFinite

RUN_DIRECTORY = "GRADWIRE_RUN_DIR"
"""The variable that names the directory in which ranks are recorded."""
NONFINITE, CHECK_DIVERGENCE = "GRADWIRE_NONFINITE", "GRADWIRE_CHECK_DIVERGENCE"
"""The variables that choose checks for models whose code chooses none."""
_OTHERS = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_MAX_RESTARTS",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
)
"""Variables that an outer torchrun would have set."""


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
