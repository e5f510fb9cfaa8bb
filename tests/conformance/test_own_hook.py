"""The example of a user's own hook passes all checks, and its guide shows the code as it is."""

import re
from pathlib import Path

from helpers.warm_python import WarmPython

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_hook.py"
PAGE = (ROOT / "docs" / "hooks.md").read_text()


def test_the_example_runs_as_a_script_and_prints_what_the_guide_says(warm_python: WarmPython) -> None:
    done = warm_python.run_file(EXAMPLE, timeout=300)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"^    (step .*)$", PAGE, re.MULTILINE)
    assert len(said) == 2
    assert done.stdout.splitlines()[:2] == said
    assert done.stdout.endswith("error_feedback() > Alternate() passes all checks\n")


def test_the_guide_quotes_the_example() -> None:
    first, *quoted = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert "set_hook" in first  # how a hook is used, not part of the example
    assert len(quoted) == 3
    for block in quoted:
        assert block in EXAMPLE.read_text(), f"the guide shows code that the example does not have:\n{block}"
