"""Hangs: who waits for whom, and what that rank does instead."""
