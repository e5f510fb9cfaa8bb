"""Hangs: who waits for whom, and what that rank does instead."""

SOFT_DEADLINE = 5.0
"""Seconds after which a wait may be a hang."""
