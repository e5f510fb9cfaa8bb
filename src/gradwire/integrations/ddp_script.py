"""`python -m gradwire.integrations.ddp_script [-m] SCRIPT ...`: run a script written for torch's DDP on gradwire's.

`gradwire run --replace-ddp` starts ranks this way; torchrun and other launchers can too.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from gradwire.integrations.ddp_replacement import replace_ddp
from gradwire.launch import run_script
from gradwire.launch.environment import HOOK
from gradwire.parallel import DistributedDataParallel


def main() -> None:
    """Replace torch's class, and run the script."""
    if not sys.argv[1:] or sys.argv[1:] == ["-m"]:
        print(
            "usage: python -m gradwire.integrations.ddp_script [-m] SCRIPT [arguments of the script]", file=sys.stderr
        )
        sys.exit(2)
    replace_ddp(hook=os.environ.get(HOOK) or None)
    if os.environ.get("RANK", "0") == "0":
        _confirm_first(DistributedDataParallel)
    run_script.main()


def _confirm_first(cls: Any) -> None:
    """Print the hook of the first model that is wrapped."""
    original, done = cls.__init__, False

    @functools.wraps(original)
    def init(model: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal done
        original(model, *args, **kwargs)
        if not done and hasattr(model, "replica"):  # else all gradients are delayed
            done = True
            print(
                f"gradwire: DistributedDataParallel is gradwire's, with {model.replica.hook}",
                file=sys.stderr,
                flush=True,
            )

    cls.__init__ = init


if __name__ == "__main__":
    main()
