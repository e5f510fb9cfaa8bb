"""Find or start a world: `init` joins the one that a launcher started, `supervise` is gradwire's own launcher for one host.

This layer and the command line are the only readers of environment variables, and it alone knows launchers by name.
"""

from gradwire.launch.init import init, leave
from gradwire.launch.world import Address, Launcher, World, find_world

__all__ = ["Address", "Launcher", "World", "find_world", "init", "leave"]
