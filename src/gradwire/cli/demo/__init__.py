"""`gradwire demo`: a small transformer trained data-parallel on real text, on this machine."""

from gradwire.cli.demo.command import add_parser, run

__all__ = ["add_parser", "run"]
