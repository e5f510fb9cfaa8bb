"""The code blocks of docs/integrations.md."""

from __future__ import annotations

import re
from pathlib import Path

from helpers.warm_python import WarmPython

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


def test_the_block_that_replaces_torchs_class_runs(warm_python: WarmPython) -> None:
    block = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)[0]
    done = warm_python.run(block, timeout=120)
    assert done.stdout.splitlines() == re.findall(r"# -> (.*)", block), done.stderr
