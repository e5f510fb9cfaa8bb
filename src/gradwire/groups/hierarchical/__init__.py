"""Shared memory inside a host, any other group between hosts."""

from gradwire.collectives import Layout
from gradwire.groups.hierarchical.group import HierarchicalGroup

__all__ = ["HierarchicalGroup", "Layout"]
