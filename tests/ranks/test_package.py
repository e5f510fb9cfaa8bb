"""The wheel and the source distribution: what they hold, what they say, and that the README's first block runs from the wheel."""

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel], [source] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


def test_the_wheel_holds_the_package_and_nothing_else(packages):
    with zipfile.ZipFile(packages[0]) as wheel:
        names = wheel.namelist()
    files = {path for path in (ROOT / "src").rglob("*") if path.is_file() and path.parent.name != "__pycache__"}
    assert {str(path.relative_to(ROOT / "src")) for path in files} <= set(names)
    assert "gradwire/py.typed" in names
    assert all(name.startswith(("gradwire/", "gradwire-")) for name in names)


def test_the_source_can_be_tested_and_built(packages):
    with tarfile.open(packages[1]) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert {"pyproject.toml", "Makefile", "README.md", "LICENSE", "requirements-dev.txt", "mkdocs.yml"} <= names
    assert {"src/gradwire/__init__.py", "tests/conftest.py", "docs/index.md", "examples/train.py"} <= names


def test_what_the_package_says_of_itself(packages):
    with zipfile.ZipFile(packages[0]) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        said = email.message_from_string(wheel.read(name).decode())
    assert said["Name"] == "gradwire"
    assert said["Requires-Python"] == ">=3.11"
    assert {label.partition(",")[0] for label in said.get_all("Project-URL")} >= {"Homepage", "Documentation", "Issues"}
    assert said["Description-Content-Type"] == "text/markdown"
    page = said.get_payload()
    assert len(re.findall(r"\]\(", page)) == len(re.findall(r"\]\((?:https://|#)", page))  # nothing relative
    assert "![" in page


@pytest.mark.acceptance
def test_the_first_block_of_the_readme_runs_from_the_wheel(packages, tmp_path):
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
        "--target",
        str(tmp_path / "site"),
    ]
    subprocess.run([*install, str(packages[0])], check=True, timeout=300, capture_output=True)
    block = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)[0]
    where = "import gradwire\nprint(gradwire.__file__)\n"
    (tmp_path / "block.py").write_text(f"import sys\nsys.path.insert(0, {str(tmp_path / 'site')!r})\n{where}{block}")
    done = subprocess.run(
        [sys.executable, "block.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    place, *printed = done.stdout.splitlines()
    assert Path(place).is_relative_to(tmp_path)
    assert printed == re.findall(r"# -> (.*)$", block, re.M)
