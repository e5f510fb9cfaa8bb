"""The conformance suite that every Group must pass: `check_group`. Does not depend on pytest."""

from gradwire.testing.conformance.suite import ConformanceError, Failure, Report, check_group, check_names

__all__ = ["ConformanceError", "Failure", "Report", "check_group", "check_names"]
