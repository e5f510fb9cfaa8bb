"""What libraries of others write when a process ends, which no test is about."""

import re

_OF_NANOBIND = re.compile(
    r"(\x1b\[0m)*(nanobind: | - leaked | - \.\.\. skipped|See https://nanobind\.readthedocs\.io/)"
)
"""Triton, which comes with CUDA builds of torch, is bound by nanobind: from torch 2.15 on it lists at exit what was not freed."""


def without_leaks_of_triton(text: str) -> str:
    """`text` without the lines that nanobind writes at exit."""
    return "".join(line for line in text.splitlines(keepends=True) if not _OF_NANOBIND.match(line))
