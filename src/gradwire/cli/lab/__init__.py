"""`gradwire lab`: training experiments on one machine, over deliberately slow links."""

from gradwire.cli.lab.command import add_parser, run

__all__ = ["add_parser", "run"]
