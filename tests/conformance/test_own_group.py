"""The example of a user's own group passes the whole suite, and its guide shows the code as it is."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from gradwire.testing.conformance import check_group, check_names
from helpers.warm_python import WarmPython

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_group.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_group", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_alone(example: ModuleType) -> None:
    report = check_group(lambda fn: example.run(fn, 1))
    assert set(report.ran) | set(report.skipped) == set(check_names())


def test_the_example_runs_as_a_script_and_is_a_group(warm_python: WarmPython) -> None:
    done = warm_python.run_file(EXAMPLE, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "[10.0, 10.0, 10.0, 10.0]" in done.stdout
    assert f"{len(check_names())} checks passed on 3 ranks" in done.stdout


def test_the_guide_quotes_the_example() -> None:
    quoted = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own-group.md").read_text(), re.DOTALL)
    assert len(quoted) >= 5
    source = EXAMPLE.read_text()
    for block in quoted:
        assert block in source, f"the guide shows code that the example does not have:\n{block}"
