"""Integrations: gradwire imports no library of one, each names its extra, and the blocks of docs/integrations.md run."""

import ast
import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

from helpers.warm_python import WarmPython

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "integrations.md").read_text()
FIRST, *QUOTED = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)


def test_the_block_that_replaces_torchs_class_runs(warm_python: WarmPython) -> None:
    done = warm_python.run(FIRST, timeout=120)
    assert done.stdout.splitlines() == re.findall(r"# -> (.*)", FIRST), done.stderr


def lines(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines())


def test_the_other_blocks_are_in_the_example_that_is_named_before_them() -> None:
    names = re.findall(r"\[(examples/\w+\.py)\]", PAGE)
    assert len(names) == len(QUOTED) > 0
    for name, block in zip(names, QUOTED, strict=True):
        for part in re.split(r"^ *\.\.\.\n", block, flags=re.M):  # what is left out
            assert lines(part) in lines((ROOT / name).read_text()), name


NAMES = ["accelerate", "lightning", "ray", "transformers"]


def libraries(path: Path) -> set[str]:
    """Those that a file imports, anywhere in it."""
    found, text = set(), path.read_text()
    if not any(name in text for name in NAMES):
        return found
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found & set(NAMES)


def test_a_library_is_imported_by_its_integration_only() -> None:
    source = ROOT / "src" / "gradwire"
    importers = {str(path.relative_to(source)): libraries(path) for path in source.rglob("*.py")}
    own = {f"integrations/{name}.py": {name} for name in NAMES}
    own["integrations/transformers.py"] |= {"accelerate"}  # whose classes Trainer uses
    assert {path: names for path, names in importers.items() if names} == own


@pytest.mark.parametrize("name", NAMES)
def test_without_the_library_the_error_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in ("accelerate", name):
        monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, f"gradwire.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'gradwire\[{name}\]'"):
        importlib.import_module(f"gradwire.integrations.{name}")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert name in extras
