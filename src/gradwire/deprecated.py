"""Deprecated names, kept for one version."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any


def renamed(module: str, *, level: int = 2, **names: str) -> Callable[[str], Any]:
    """A module's `__getattr__` for old names: `names` maps each to the dotted path of its replacement.

    `level` is the warning's `stacklevel`: 2 if the module's `__getattr__` is the returned function, 3 if it calls it."""

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = names[name]
        warnings.warn(f"{module}.{name} is now {new}.", DeprecationWarning, stacklevel=level)
        home, _, attribute = new.rpartition(".")
        return getattr(importlib.import_module(home), attribute)

    return get
