"""The error for a library that an integration needs and that is not installed."""

from __future__ import annotations


def missing_library(error: ModuleNotFoundError, *, extra: str) -> ImportError:
    """An ImportError that names the extra which installs the library.

    >>> missing_library(ModuleNotFoundError("No module named 'ray'"), extra="ray")
    ImportError("No module named 'ray'. gradwire.integrations.ray needs it: pip install 'gradwire[ray]'")
    """
    return ImportError(
        f"{error}. gradwire.integrations.{extra} needs it: pip install 'gradwire[{extra}]'", name=error.name
    )
