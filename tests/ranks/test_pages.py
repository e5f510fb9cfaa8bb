"""Every Python block of every page runs: those of a page one after another, as its reader would run them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gradwire.lab import why_not

WHY_NOT = why_not(mbit=100)

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
PAGES = {
    str(path.relative_to(ROOT)): BLOCK.findall(path.read_text())
    for path in [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md"]
}
ELSEWHERE = {
    "docs/hooks.md": "tests/conformance/test_own_hook.py",
    "docs/own-group.md": "tests/conformance/test_own_group.py",
    "docs/mpi.md": "tests/ranks/groups/mpi/test_exit.py",
    "docs/integrations.md": "tests/integrations/test_page.py",
    "docs/observe.md": "tests/unit/observe/test_export.py",
}
"""Pages that quote an example, or need more than one process, and the tests that run or compare their blocks."""

MODEL = """
import os, torch, torch.distributed as dist, gradwire as gw
[group] = gw.ThreadGroup.world(1)
model = gw.DistributedDataParallel(torch.nn.Linear(4, 4), process_group=group)
"""
SETUP = {
    "docs/autograd.md": """
import torch, gradwire as gw
model = torch.nn.ModuleDict({"encoder": torch.nn.Sequential(torch.nn.Linear(2, 2))})
activations = model["encoder"](torch.ones(1, 2))
loss = activations.sum()
""",
    "docs/hierarchical.md": """
import os, torch, torch.distributed as dist, gradwire as gw
store, rank, size = dist.HashStore(), 0, 1
model = torch.nn.Linear(2, 2)
[inside], across = gw.ThreadGroup.world(1), None  # on one host nothing goes across
""",
    "docs/hook-catalog.md": MODEL,
    "docs/interop.md": """
import os, torch
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
model = torch.nn.Linear(4, 4)
""",
    "docs/shared-memory.md": """
import torch.distributed as dist
from gradwire import SharedMemoryGroup
store, rank, size = dist.HashStore(), 0, 1
""",
}
"""What a page's reader has already: a model, a store."""


@pytest.mark.parametrize("page", [page for page, blocks in PAGES.items() if blocks and page not in ELSEWHERE])
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path, warm_python: Any) -> None:
    script = tmp_path / "page.py"
    blocks = "\n".join(PAGES[page])
    script.write_text("\n".join([SETUP.get(page, ""), f"import os\nos.chdir({str(tmp_path)!r})", blocks]))
    if "hosts(" in script.read_text() and WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    done = warm_python.run_file(script, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("page", "test"), ELSEWHERE.items())
def test_the_other_pages_have_their_own_tests(page: str, test: str) -> None:
    assert PAGES[page]
    assert Path(page).name in (ROOT / test).read_text()


def test_every_page_is_in_the_site() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}


@pytest.mark.parametrize("page", [*PAGES, "README.md"])
def test_tables_and_blocks_of_a_page_are_lines_of_their_own(page: str) -> None:
    """An editor that fills paragraphs makes one line of them, which no longer is a table."""
    text = (ROOT / page).read_text()
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    assert not re.search(r"\| *\|\s*:?---", prose)
    assert all(re.fullmatch(r" *```[\w-]*", line) for line in text.splitlines() if "```" in line)
