"""The code blocks of docs/integrations.md run, or are from the examples, which other tests run."""

import re
from pathlib import Path

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
