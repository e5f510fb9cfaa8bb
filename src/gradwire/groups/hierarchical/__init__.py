"""Shared memory inside a host, any other group between hosts."""

from gradwire.groups.hierarchical.group import HierarchicalGroup
from gradwire.groups.hierarchical.layout import Layout

__all__ = ["HierarchicalGroup", "Layout"]
