"""Slow links and several hosts, on one machine: where what happens between hosts can be tried. No pytest inside."""

from gradwire.lab.namespaces import Host, hosts, why_not
from gradwire.lab.throttle import Throttled

__all__ = ["Host", "Throttled", "hosts", "why_not"]
