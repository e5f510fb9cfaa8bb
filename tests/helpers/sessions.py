"""Commands that start processes of their own: all of them end with the command."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence


def run_session(command: Sequence[str], *, env: Mapping[str, str], timeout: float) -> tuple[str, str]:
    """What the command wrote; an error if it failed. When it ends, or is too slow, what it has started is killed."""
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == 0, f"{' '.join(command)} ended with {process.returncode}:\n{out}\n{err}"
    return out, err
