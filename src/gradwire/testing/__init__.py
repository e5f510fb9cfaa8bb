"""Tools for testing code that communicates: run a function on ranks of any kind, find leftovers. Does not depend on pytest."""

from gradwire.testing.conformance import ConformanceError, check_group, check_names
from gradwire.testing.laws import check_hook
from gradwire.testing.leftovers import Leftovers
from gradwire.testing.pool.pool import RankPool, default_pool
from gradwire.testing.pool.protocol import LeftBehind
from gradwire.testing.ranks import kinds, run_ranks
from gradwire.testing.simulate import Exchange, OuterSimulation, Simulation, simulate, simulate_outer

__all__ = [
    "ConformanceError",
    "Exchange",
    "LeftBehind",
    "Leftovers",
    "OuterSimulation",
    "RankPool",
    "Simulation",
    "check_group",
    "check_hook",
    "check_names",
    "default_pool",
    "kinds",
    "run_ranks",
    "simulate",
    "simulate_outer",
]
