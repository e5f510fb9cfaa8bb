"""`gradwire lab`: training experiments on one machine, over links that are slow on purpose."""

from gradwire.cli.lab.command import add_parser, run

__all__ = ["add_parser", "run"]
