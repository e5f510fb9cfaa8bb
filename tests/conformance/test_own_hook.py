"""The example of a user's own hook keeps the laws, and its guide shows the code as it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_hook.py"
PAGE = (ROOT / "docs" / "hooks.md").read_text()


def test_the_example_runs_as_a_script_and_prints_what_the_guide_says() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=300, check=True)
    said = re.findall(r"^    (step .*)$", PAGE, re.MULTILINE)
    assert len(said) == 2
    assert done.stdout.splitlines()[:2] == said
    assert done.stdout.endswith("error_feedback() > Alternate() keeps the laws\n")


def test_the_guide_quotes_the_example() -> None:
    first, *quoted = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert "set_hook" in first  # how a hook is used, not part of the example
    assert len(quoted) == 3
    for block in quoted:
        assert block in EXAMPLE.read_text(), f"the guide shows code that the example does not have:\n{block}"
