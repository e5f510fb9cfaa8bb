"""Acceptance of detection: are hangs and stragglers reported correctly, and healthy runs not at all? `make acceptance` runs it.

`test_*.py` here are the part that `make test` runs: what counts as a correct report, and a few real runs.
"""
