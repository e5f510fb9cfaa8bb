"""stub"""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    return subparsers.add_parser("parity")


def run(args: argparse.Namespace) -> int:
    return 0
