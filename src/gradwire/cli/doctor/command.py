"""What `gradwire doctor` does: it examines this host or all of them, shows the findings, and returns the exit code."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from gradwire.cli.doctor.examine import HostFinding, Level, compare, examine
from gradwire.cli.doctor.facts import Facts, collect
from gradwire.cli.doctor.link_speed import LinkSpeed, judge, measure
from gradwire.errors import GradwireError, GroupError, UsageError
from gradwire.groups import Group
from gradwire.launch import Launcher, find_world, init, leave
from gradwire.testing import run_ranks

_LEAST_ROOM = 30
"""Characters in a line of a finding, below which it is left to the terminal to wrap it."""
_STYLES = {Level.OK: "green", Level.NOTE: "yellow", Level.PROBLEM: "bold red"}


def run(args: argparse.Namespace) -> int:
    """Examine, show, and return 1 if there is a problem."""
    if args.hosts and args.quick:
        raise UsageError("gradwire doctor --hosts --quick: hosts are examined by ranks that meet. Omit one of the two.")
    found = _hosts(args.timeout) if args.hosts else _here(args)
    if found is None:  # rank 0 shows it
        return 0
    if args.json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        found.show(Console(highlight=False))
    return 1 if found.problems else 0


class Examination:
    """The findings of every host, and those about all of them."""

    def __init__(self, by_host: dict[str, list[HostFinding]], together: Sequence[HostFinding] = ()) -> None:
        self.by_host = by_host
        self.together = list(together)

    @property
    def problems(self) -> int:
        """How many there are."""
        every = [*self.together, *(one for findings in self.by_host.values() for one in findings)]
        return sum(one.level is Level.PROBLEM for one in every)

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "problems": self.problems,
            "hosts": {host: [one.as_dict() for one in findings] for host, findings in self.by_host.items()},
            "together": [one.as_dict() for one in self.together],
        }

    def show(self, console: Console) -> None:
        """For people."""
        for host, findings in self.by_host.items():
            if len(self.by_host) > 1:
                console.print(Text(host, style="bold"), soft_wrap=True)
            _show(console, findings)
        if self.together:
            _show(console, self.together)
        several = "" if self.problems == 1 else "s"
        verdict = f"{self.problems} problem{several}" if self.problems else "no problem found"
        console.print(Text(verdict, style=_STYLES[Level.PROBLEM if self.problems else Level.OK]))


def _show(console: Console, findings: Sequence[HostFinding]) -> None:
    width = max(len(one.name) for one in findings)
    column = 12 + width
    area = ""
    for one in findings:
        if one.area != area:
            area = one.area
            console.print(Text(area, style="dim"))
        value = _wrapped(console, one.value, column)
        line = Text.assemble((f"  {one.level.value:<8}", _STYLES[one.level]), f"{one.name:<{width}}  {value}")
        console.print(line, soft_wrap=True)
        if one.fix:
            fix = _wrapped(console, one.fix, column + 3)
            console.print(Text(f"{'':{column}}-> {fix}", style=_STYLES[one.level]), soft_wrap=True)
    console.print()


def _wrapped(console: Console, text: str, column: int) -> str:
    """`text` in lines that begin at `column`, if it is shown on a terminal with room for them. In a file a finding is one line."""
    room = console.width - column
    if not console.is_terminal or room < _LEAST_ROOM:
        return text
    lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    return f"\n{'':{column}}".join(lines)


def _here(args: argparse.Namespace) -> Examination:
    facts = collect()
    findings = examine(facts, several_hosts=False)
    if not args.quick:
        if not args.json:
            print("starting two ranks to measure how fast they reach each other", file=sys.stderr, flush=True)
        findings += [
            _between_ranks(kind, args.timeout) for kind in ("shared_memory", "gloo") if not facts.engines[kind]
        ]
    return Examination({facts.host: findings})


def _between_ranks(kind: str, timeout: float) -> HostFinding:
    try:
        [link] = run_ranks(functools.partial(measure, ranks=(0, 1)), 2, kind=kind, timeout=timeout)[0]
    except GradwireError as error:
        fix = "two ranks of this host could not exchange messages: look at the problems above, and at the error"
        return HostFinding("two ranks", kind, f"{type(error).__name__}: {error}", Level.PROBLEM, fix)
    return HostFinding("two ranks", kind, str(link))


def _hosts(timeout: float) -> Examination | None:
    world = find_world(os.environ)
    if world.launcher in (Launcher.NONE, Launcher.GRADWIRE) or world.size == 1:
        raise UsageError(
            f"gradwire doctor --hosts, in {world}: start it on every host with torchrun, mpirun or srun, e.g. "
            "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m gradwire doctor --hosts."
        )
    facts = collect()
    try:
        with _joined(timeout) as group:
            every = [Facts.from_json(text) for text in _gather(group, facts.as_json())]
            first = _first_ranks(every)
            links = measure(group, first)
            return _examine_all(every, first, links) if group.rank == 0 else None
    except GroupError as error:
        return _examine_alone(facts, error, several_hosts=not world.on_one_host)


@contextlib.contextmanager
def _joined(timeout: float) -> Iterator[Group]:
    try:
        yield init("gloo", timeout=timeout, name="doctor")
    finally:
        leave()


def _gather(group: Group, text: str) -> list[str]:
    """The texts of all ranks, which differ in length."""
    mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    lengths = torch.zeros(group.size, dtype=torch.int64)
    group.all_gather_into_tensor(lengths, torch.tensor([len(mine)]), label="lengths")
    longest = int(lengths.max())
    padded, gathered = torch.zeros(longest, dtype=torch.uint8), torch.zeros(group.size * longest, dtype=torch.uint8)
    padded[: len(mine)] = mine
    group.all_gather_into_tensor(gathered, padded, label="facts")
    return [
        bytes(row[:length].tolist()).decode() for row, length in zip(gathered.view(group.size, -1), lengths.tolist())
    ]


def _first_ranks(every: Sequence[Facts]) -> list[int]:
    """The lowest rank of each host."""
    return sorted({facts.identity: rank for rank, facts in reversed(list(enumerate(every)))}.values())


def _examine_alone(facts: Facts, error: GroupError, *, several_hosts: bool) -> Examination:
    """What this rank shows if the ranks did not meet, or lost each other: the reason may be a setting of this host."""
    wrong = [one for one in examine(facts, several_hosts=several_hosts) if one.level is not Level.OK]
    fix = "not all hosts could be examined: look at the error, and at what every host has printed"
    met = HostFinding("hosts", facts.host, f"{type(error).__name__}: {error}", Level.PROBLEM, fix)
    return Examination({facts.host: [*wrong, met]})


def _examine_all(every: Sequence[Facts], first: Sequence[int], links: Sequence[LinkSpeed]) -> Examination:
    names = [facts.host for facts in every]
    if len({names[rank] for rank in first}) < len(first):  # e.g. containers that have one name
        names = [f"{facts.host} (rank {rank})" for rank, facts in enumerate(every)]
    several = len(first) > 1
    by_host = {names[rank]: examine(every[rank], several_hosts=several) for rank in first}
    together = list(compare({names[rank]: every[rank] for rank in first}))
    return Examination(by_host, [*together, *judge(links, names)])
