"""`python -m gradwire.integrations.ddp_script [-m] SCRIPT ...`: run a script written for torch's DDP on gradwire's.

`gradwire run --replace-ddp` starts ranks this way; torchrun and other launchers can too.
"""

from __future__ import annotations

import os
import sys

from gradwire.integrations.ddp_replacement import replace_ddp
from gradwire.launch import run_script
from gradwire.launch.environment import HOOK


def main() -> None:
    """Replace torch's class, and run the script."""
    if not sys.argv[1:] or sys.argv[1:] == ["-m"]:
        print(
            "usage: python -m gradwire.integrations.ddp_script [-m] SCRIPT [arguments of the script]", file=sys.stderr
        )
        sys.exit(2)
    replace_ddp(hook=os.environ.get(HOOK) or None)
    run_script.main()


if __name__ == "__main__":
    main()
