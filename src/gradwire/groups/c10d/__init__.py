"""`C10dGroup`: any torch.distributed process group as a Group."""

from gradwire.groups.c10d.group import C10dGroup as C10dGroup
