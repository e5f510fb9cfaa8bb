"""gradwire imports no library of an integration, and each integration names its extra where the library is missing."""

from __future__ import annotations

import tomllib
from pathlib import Path

from helpers.warm_python import WarmPython

ROOT = Path(__file__).parents[2]
NAMES = ["accelerate", "lightning", "ray", "transformers"]
CODE = """
import importlib, pkgutil, sys
import gradwire, gradwire.cli, gradwire.integrations
names = sys.argv[1:]
for name in gradwire.__all__:
    getattr(gradwire, name)
print(sorted(set(names) & set(sys.modules)))
for name in names:
    sys.modules[name] = None  # as if it were not installed
for name in names:
    try:
        importlib.import_module(f"gradwire.integrations.{name}")
    except ImportError as error:
        print(error)
"""


def test_libraries_are_imported_by_their_integration_only(warm_python: WarmPython) -> None:
    done = warm_python.run(CODE, *NAMES, timeout=120)
    first, *errors = done.stdout.splitlines()
    assert first == "[]", done.stderr
    assert [error.rpartition(": ")[2] for error in errors] == [f"pip install 'gradwire[{name}]'" for name in NAMES]


def test_each_has_an_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(NAMES) <= set(extras)
