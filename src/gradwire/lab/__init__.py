"""Slow links and several hosts, emulated on one machine. Does not depend on pytest."""

from gradwire.lab.namespaces import Host, hosts, why_not
from gradwire.lab.throttle import Throttled

__all__ = ["Host", "Throttled", "hosts", "why_not"]
