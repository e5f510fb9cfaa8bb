"""gradwire in other people's training loops: scripts for torch's DDP, Accelerate, Transformers, Lightning, Ray Train.

One module for each library, which alone imports it. Nothing else in gradwire depends on this package.
"""

from gradwire.integrations.ddp_replacement import replace_ddp
from gradwire.integrations.installed_hooks import hook_controls, install_hook, load_hook_states, save_hook_states

__all__ = ["hook_controls", "install_hook", "load_hook_states", "replace_ddp", "save_hook_states"]
