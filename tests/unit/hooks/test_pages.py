"""The code blocks of pages in docs/hooks that can be run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGES = Path(__file__).parents[3] / "docs" / "hooks"


@pytest.mark.parametrize("page", ["combinators", "periodic", "state"])
def test_the_examples_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page, one after another."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", (PAGES / f"{page}.md").read_text(), re.M | re.S)
    assert blocks
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    if "group" in names:
        names["group"].close()
