"""`gradwire bench`: what gradwire costs and what it saves, measured beside its peers on this machine."""

from gradwire.cli.bench.command import add_parser, run

__all__ = ["add_parser", "run"]
