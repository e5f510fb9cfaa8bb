"""A short description of the machine: a figure without its machine means nothing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

import gradwire
from gradwire.runtime.jit import compiler


def describe(device: torch.device | None = None) -> dict[str, str]:
    """The machine, its software, and its current load."""
    facts = {"cpu": f"{_cpu()}, {_cores()} usable of {os.cpu_count()} cores", "system": _system()}
    if device is not None and device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        facts["gpu"] = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    facts["software"] = f"gradwire {gradwire.__version__}, {versions}"
    facts["loops"] = f"compiled by {compiler()}" if compiler() else "not compiled: pip install gradwire[jit]"
    facts["load"] = " ".join(f"{load:.2f}" for load in os.getloadavg()) + " (1, 5, 15 minutes, at the start)"
    return facts


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _system() -> str:
    return f"{platform.system()} {platform.release()} on {platform.machine()}"


def _cpu() -> str:
    """The processor's name. /proc has it only on some architectures; lscpu decodes the ids of the others."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if shutil.which("lscpu") is not None:
        plain = {**os.environ, "LC_ALL": "C"}
        listed = subprocess.run(["lscpu"], capture_output=True, text=True, check=False, env=plain)
        for line in listed.stdout.splitlines():
            if line.startswith("Model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
