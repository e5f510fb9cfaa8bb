"""Slow links and several hosts, on one machine: where what happens between hosts can be tried. No pytest inside."""

from gradwire.lab.namespaces import Host, hosts, why_not

__all__ = ["Host", "hosts", "why_not"]
