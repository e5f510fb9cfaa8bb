"""The laws of hooks, without the one that takes hundreds of steps and those of which dtype and size make no difference."""

from gradwire.testing.laws import LAWS, conserves, forks, pays_back

SHORT_LAWS = tuple(law for law in LAWS if law not in (pays_back, forks, conserves))
"""For dtypes and sizes other than those in which a hook is checked by all laws."""
