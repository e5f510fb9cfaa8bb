"""Benchmarks of gradwire, run in a clone: `python -m benchmarks WHAT`. Nothing in the package imports them."""
