"""`python -m gradwire.launch.observed [-m] SCRIPT ...`: run a script that does not call gradwire, with the flight recorder on.

`gradwire run --observe` starts ranks this way.
"""

from __future__ import annotations

import os
import sys
import warnings

from gradwire.errors import UsageError
from gradwire.launch.environment import RUN_DIRECTORY
from gradwire.launch.run_script import run_script
from gradwire.launch.world import find_world
from gradwire.observe.recording import start


def main() -> None:
    """Start the recorder, and run the script."""
    sys.argv = sys.argv[1:]  # the command that is recorded
    directory = os.environ.get(RUN_DIRECTORY)
    if directory:
        world = find_world(os.environ)
        try:
            start(directory, rank=world.rank, size=world.size)
        except (OSError, UsageError) as error:  # training does not depend on it
            warnings.warn(f"{world}: it is not recorded. {error}", stacklevel=1)
    run_script(sys.argv)


if __name__ == "__main__":
    main()
