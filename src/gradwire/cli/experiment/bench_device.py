"""The device of a benchmark in this process, and the state it is measured in."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gradwire.errors import UsageError


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Declare `--device`."""
    text = "%(choices)s (default: %(default)s)"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", metavar="DEVICE", help=text)


def find_device(command: str, kind: str) -> torch.device:
    """The device that `command --device kind` means."""
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"{command} --device cuda: torch sees no CUDA device. Omit --device for the CPU.")
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)


@contextmanager
def settled(*, one_thread: bool) -> Iterator[None]:
    """No garbage from before, and perhaps one thread, where more would only add noise."""
    # oneDNN writes every kernel that it makes to /tmp/perf-PID.map, for profilers, and leaves the file there.
    os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")
    threads = torch.get_num_threads()
    if one_thread:
        torch.set_num_threads(1)
    gc.collect()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
