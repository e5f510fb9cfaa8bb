"""The table of checks, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

from gradwire.groups.base import Group
from gradwire.testing.conformance import (
    aliasing,
    callbacks,
    completion,
    data_movement,
    dtypes,
    forks,
    lifecycle,
    memory,
    p2p,
    reductions,
    subgroups,
    usage,
    work,
)
from gradwire.testing.conformance.compare import Problems


@dataclass(frozen=True, slots=True)
class Check:
    """One check. `fresh`: it may break its world, and needs a separate one. `ranks`: the minimum number of ranks."""

    run: Callable[[Group], Problems]
    ranks: int = 1
    fresh: bool = False

    @property
    def name(self) -> str:
        """Its name in reports and in `only`."""
        return self.run.__name__.removeprefix("check_")


def _all(module: ModuleType, *, ranks: int = 1, fresh: bool = False, but: Sequence[Check] = ()) -> list[Check]:
    """Every check of a module, in the order in which they are written; `but` are those with other requirements."""
    found = [
        run for name, run in vars(module).items() if name.startswith("check_") and run.__module__ == module.__name__
    ]
    others = {check.run for check in but}
    return [*(Check(run, ranks, fresh) for run in found if run not in others), *but]


_CHECKS = (
    *_all(reductions),
    *_all(data_movement),
    *_all(memory),
    *_all(aliasing, but=[Check(aliasing.check_aliasing, ranks=2)]),
    *_all(p2p, ranks=2),
    *_all(subgroups),
    *_all(work),
    *_all(
        completion,
        but=[
            Check(completion.check_hook_raising, ranks=2, fresh=True),
            Check(completion.check_hooks_at_close, fresh=True),
        ],
    ),
    *_all(dtypes, but=[Check(dtypes.check_refused_dtypes, ranks=2, fresh=True)]),
    *_all(usage, ranks=2, fresh=True),
    *_all(callbacks, ranks=2, fresh=True),
    *_all(lifecycle, ranks=2, fresh=True, but=[Check(lifecycle.check_close, fresh=True)]),
    *_all(forks, ranks=2, fresh=True),
)

CHECKS = tuple(sorted(_CHECKS, key=lambda check: check.fresh))
BY_NAME = {check.name: check for check in CHECKS}
