"""Ranks of `gradwire run` that start as forks of a process that has imported torch.

It has the command line of the ranks and all variables that they have in common, so whatever Python, torch and its libraries read
when they start is what each rank would have read. Its streams are pipes, like theirs; what was written during the import each rank
writes again. All ranks have one seed for hashes of strings, where PYTHONHASHSEED sets none. A rank joins the group of its guardian.
See Note [A process that was forked] in `runtime/fork_server.py`.
"""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from gradwire.launch.process import Guardian
from gradwire.runtime.forks import ForkServer

MODULES = ("torch",)
"""What the server imports."""
ELASTIC_MODULES = (
    *(*MODULES, "encodings.idna", "gradwire.elasticity.preloaded", "gradwire.autograd.compiled.inductor_pass"),
    *("gradwire.launch.elastic_entry", "gradwire.observe.recording"),
)
"""What it imports for ranks that may be replaced, while others wait."""
_CHUNK = 1 << 16


class PreloadedPython(ForkServer):
    """A fork server, started when this is created, whose forks are ranks. `modules` are by default `MODULES`."""

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        directory: str,
        modules: Sequence[str] | None = None,
    ) -> None:
        super().__init__(modules or MODULES, command=command, directory=directory)
        self._guardian = Guardian()
        common = dict(set.intersection(*(set(environ.items()) for environ in environments)))
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}
        server = self.launch(common, process_group=self._guardian.pid, **streams)
        self._pipes: dict[int, Any] = {1: server.stdout, 2: server.stderr}
        self.descriptors = [self._control.fileno(), *(pipe.fileno() for pipe in self._pipes.values())]
        """To be watched while `reason` is None, and passed to `read`."""

    def read(self) -> None:
        """Read what has arrived from the server."""
        ready = select.select(self.descriptors, [], [], 0.0)[0]
        for fd, pipe in self._pipes.items():
            if pipe.fileno() in ready:
                self._output[fd] += os.read(pipe.fileno(), _CHUNK)
        if self._control.fileno() in ready and self.reason is None:
            self.receive()

    def close(self) -> None:
        """End the server. May be called again."""
        if self._process is not None:
            super().close()
            for pipe in self._pipes.values():
                pipe.close()
            self._guardian.release()
