"""Names of a package that are imported when they are first used, so that its lighter modules can be imported alone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, names: Mapping[str, str], *, then: Callable[[], object] = lambda: None) -> None:
    """Give `package`, which calls this, a `__getattr__` and a `__dir__` (its own would be any name to a type checker). `names` are
    separated by spaces, by the module that has them; by "", modules. `then` is called after each import."""
    homes = {name: module or name for module, several in names.items() for name in several.split()}
    module = vars(sys.modules[package])

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = importlib.import_module(f"{package}.{homes[name]}")
        then()
        value = module[name] = home if name == homes[name] else getattr(home, name)
        return value

    module.update(__getattr__=find, __dir__=lambda: sorted({*module, *homes}))
