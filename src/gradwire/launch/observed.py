"""`python -m gradwire.launch.observed [-m] SCRIPT ...`: run a script that does not call gradwire, with the flight recorder on.

`gradwire run --observe` starts ranks this way.
"""

from __future__ import annotations

import os
import runpy
import sys
import warnings

from gradwire.errors import UsageError
from gradwire.launch.environment import RUN_DIRECTORY
from gradwire.launch.world import find_world
from gradwire.observe.recording import start


def main() -> None:
    """Start the recorder, and become the script."""
    words = sys.argv[1:]
    is_module = words[:1] == ["-m"]
    sys.argv = words = words[is_module:]
    directory = os.environ.get(RUN_DIRECTORY)
    if directory:
        world = find_world(os.environ)
        try:
            start(directory, rank=world.rank, size=world.size)
        except (OSError, UsageError) as error:  # training does not depend on it
            warnings.warn(f"{world}: it is not recorded. {error}", stacklevel=1)
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
