"""`python -m benchmarks overhead --against PATH`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from benchmarks.against import Plan, compare_checkouts, lines_of, table_of


def main() -> int:
    """Compare two checkouts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    overhead = parser.add_subparsers(required=True).add_parser("overhead")
    add = overhead.add_argument
    add("--against", type=Path, required=True, metavar="PATH", help="root of another checkout")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--size", help="GPT-2 of this size; on cuda: small")
    add("--parameters", type=int, help="number of small parameters (default: 400 on the CPU)")
    add("--batch", help="batches, separated by commas (default: 4; for GPT-2: 8, on cuda 1,32)")
    add("--block", type=int, help="timed steps of a variant per turn (default: 3, on cuda 5)")
    add("--rounds", type=int, default=40, help="turns of each process (default: %(default)s)")
    add("--processes", type=int, default=4, help="pairs of processes (default: %(default)s)")
    add("--clock", choices=("wall", "cpu"), help="(default: cpu on the CPU, wall on cuda)")
    add("--json", type=Path)
    args = parser.parse_args()
    cuda = args.device == "cuda"
    size = args.size or ("small" if cuda and args.parameters is None else None)
    batches = args.batch or ("4" if size is None else "1,32" if cuda else "8")
    console, found = Console(highlight=False), []
    for batch in map(int, batches.split(",")):
        clock, block = args.clock or ("wall" if cuda else "cpu"), args.block or (5 if cuda else 3)
        plan = Plan(args.device, size, args.parameters or 400, batch, block, clock)
        comparison = compare_checkouts(
            plan, args.against, processes=args.processes, rounds=args.rounds, console=console
        )
        found.append(comparison.as_json())
        console.print(table_of(comparison))
        for line in lines_of(comparison):
            console.print(line)
    if args.json is not None:
        args.json.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
