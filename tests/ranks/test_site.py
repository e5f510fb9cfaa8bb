"""The documentation site builds without a warning, and shows every public name."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


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
