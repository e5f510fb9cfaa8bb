"""What a fresh interpreter finds in gradwire, and that the README's programs run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.warm_python import FORKED_RANKS

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
def test_the_readme_tells_the_truth(code, tmp_path, warm_python):
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


def test_importing_gradwire_does_not_import_torch() -> None:
    program = "import sys, gradwire; assert 'torch' not in sys.modules; gradwire.__version__"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
