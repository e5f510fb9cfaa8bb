"""`gradwire bench`: what gradwire costs and what it saves, compared with its alternatives on this machine."""

from gradwire.cli.bench.command import add_parser, run

__all__ = ["add_parser", "run"]
