"""`gradwire doctor`: whether this machine, or these hosts, can train, and what to change if not."""

from gradwire.cli.doctor.command import add_parser, run

__all__ = ["add_parser", "run"]
