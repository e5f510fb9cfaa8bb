"""Shared memory inside a host, any other group between hosts."""

from gradwire.collectives import Layout as Layout
from gradwire.groups.hierarchical.group import HierarchicalGroup as HierarchicalGroup
