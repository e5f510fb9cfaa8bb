"""The laws of hooks, without the one that takes hundreds of steps."""

from gradwire.testing.laws import LAWS, pays_back

SHORT_LAWS = tuple(law for law in LAWS if law is not pays_back)
"""For dtypes and sizes other than those in which a hook is checked by all laws."""
