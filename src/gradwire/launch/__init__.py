"""Find or start a world: `init` joins the one that a launcher started, `Supervisor` is gradwire's own launcher for one host.

This layer and the command line are the only readers of environment variables, and only this layer knows specific launchers. The
launcher does not import torch: `elastic`, `init` and `leave`, which do, are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradwire.launch.world import Address, Launcher, World, find_world
from gradwire.runtime.lazy import lazy

if TYPE_CHECKING:
    from gradwire.launch.elastic_entry import elastic
    from gradwire.launch.entry import init, leave

__all__ = ["Address", "Launcher", "World", "elastic", "find_world", "init", "leave"]
lazy(__name__, {"elastic_entry": "elastic", "entry": "init leave"})
