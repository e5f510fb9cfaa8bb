"""Documents and examples: every Python block of every page and of the README runs, as its reader would run it; the site builds."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gradwire.lab import why_not
from helpers.warm_python import FORKED_RANKS, GRADWIRE_RUN

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
RANK_0 = """
import os, torch
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
model = torch.nn.Linear(4, 4)
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
    "docs/ddp.md": MODEL,
    "docs/hook-catalog.md": MODEL,
    "docs/interop.md": RANK_0,
    "docs/meshes.md": RANK_0,
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


EXPECTED = {
    "train.py": r"step 200: loss 0\.\d+",
    "stock_ddp.py": r"loss 0\.00\d+ over SharedMemoryGroup",
    "diloco.py": r"loss 0\.\d+ after 200 steps and 10 exchanges",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_trains_on_two_ranks(name: str, warm_python: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    done = warm_python.run(GRADWIRE_RUN, "--nproc", "2", "--no-prefix", str(ROOT / "examples" / name), timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(EXPECTED[name], done.stdout.strip().splitlines()[-1])


def test_the_example_of_an_elastic_run_trains(monkeypatch: Any, tmp_path: Path) -> None:
    """Its launcher has a thread, so it cannot fork."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    words = ["--nproc", "2", "--no-prefix", "--elastic", "1:2", str(ROOT / "examples" / "elastic.py"), "1.25"]
    command = [sys.executable, "-m", "gradwire", "run", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"step 40: loss 0\.\d+\n$", done.stdout)


def test_the_example_of_a_slow_rank_trains(warm_python: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    words = [str(ROOT / "examples" / "slow_rank.py"), "--steps", "3", "--data", "0"]
    done = warm_python.run(GRADWIRE_RUN, "--nproc", "2", "--no-prefix", *words, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3 steps on 2 ranks\n"


def test_the_example_of_a_fault_fails_as_it_should(warm_python: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    script = str(ROOT / "examples" / "hang.py")
    done = warm_python.run(GRADWIRE_RUN, "--nproc", "2", "--no-prefix", script, "shape", timeout=300)
    assert done.returncode == 1
    assert "CollectiveMismatch" in done.stderr


def test_every_example_is_run_by_a_test() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    examples = {example.name for example in (ROOT / "examples").glob("*.py")}
    assert {example for example in examples if example not in tests} == set()


README = (Path(__file__).parents[2] / "README.md").read_text()


BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)


def test_the_names_are_there_by_every_way_to_ask_for_them():
    code = (
        "import sys, gradwire\n"
        "assert not {'torch', 'gradwire.testing'} & set(sys.modules)\n"
        "assert gradwire.DistributedDataParallel and gradwire.init and gradwire.groups and gradwire.hooks\n"
        "assert 'gradwire.testing' not in sys.modules, 'training does not import the machinery of tests'\n"
        "assert set(gradwire.__all__) <= set(dir(gradwire))\n"
        "from gradwire import *\n"
        "assert set(gradwire.__all__) - {'__version__'} <= set(globals())\n"
        "assert gradwire.DistributedDataParallel is DistributedDataParallel is gradwire.parallel.DistributedDataParallel\n"
        "assert gradwire.init is init is gradwire.launch.init and callable(init)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: re.sub(r"\W+", " ", code)[-40:])
def test_the_readme_matches_the_code(code, tmp_path, warm_python):
    page = tmp_path / "page.py"
    page.write_text(FORKED_RANKS + code)
    done = warm_python.run_file(page, timeout=300)
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout.splitlines() == re.findall(r"# -> (.*)$", code, re.M)


def test_after_import_gradwire_the_backend_is_there() -> None:
    program = """
import torch.distributed as dist
import gradwire
dist.init_process_group("gradwire", store=dist.HashStore(), rank=0, world_size=1)
assert type(gradwire.from_process_group()).__name__ == "C10dGroup"
dist.destroy_process_group()
gradwire.register_backend(kind="threads")  # another kind, from now on
dist.init_process_group("gradwire", store=dist.HashStore(), rank=0, world_size=1)
assert type(gradwire.from_process_group()).__name__ == "ThreadGroup"
dist.destroy_process_group()
"""
    # A fresh interpreter: warm ones have imported gradwire before torch.distributed.
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.acceptance
def test_the_site_builds_without_a_warning_and_has_every_public_name(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        module = re.findall(r"^::: ([\w.]+)$", page.read_text(), re.M)[0]
        text = (tmp_path / "api" / page.stem / "index.html").read_text()
        found = importlib.import_module(module)
        own = [name for name, value in vars(found).items() if isinstance(value, type) and value.__module__ == module]
        public = getattr(found, "__all__", own)
        shown = [name for name in public if name[0] != "_" and not isinstance(getattr(found, name), ModuleType)]
        assert shown
        missing = [name for name in shown if not re.search(rf'id="{module}(\.\w+)*\.{name}"', text)]
        assert missing == [], module


def test_pictures_are_shown_small_and_load_nothing():
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    shown = {
        file for page in pages for _, file in re.findall(r"!\[([^\]]+)\]\([^)]*images/([^)]+)\)", page.read_text())
    }
    for picture in sorted((ROOT / "docs" / "images").iterdir()):
        assert picture.name in shown, f"{picture.name} is shown nowhere, or without a text"
        assert picture.stat().st_size < 150_000, picture.name
        if picture.suffix == ".svg":
            drawn = picture.read_text()
            assert set(re.findall(r"https?://[^\s\"')]+", drawn)) == {"http://www.w3.org/2000/svg"}, picture.name
