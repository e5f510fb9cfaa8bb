"""What `gradwire doctor` does: it examines this host or all of them, shows the findings, and returns the exit code."""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist
from rich.console import Console
from rich.text import Text

from gradwire.cli.doctor.host_checks import HostFinding, Level, examine, unusable_engines, versions
from gradwire.cli.doctor.link_speed import judge, measure
from gradwire.errors import GradwireError, GroupError, UsageError
from gradwire.groups import Group
from gradwire.interop import as_process_group
from gradwire.launch import Launcher, find_world, init, leave
from gradwire.observe.units import plural
from gradwire.runtime.host import host_identity
from gradwire.testing import run_ranks

_LEAST_ROOM = 30
"""Characters in a line of a finding, below which it is left to the terminal to wrap it."""
_STYLES = {Level.OK: "green", Level.NOTE: "yellow", Level.PROBLEM: "bold red"}


@dataclass(frozen=True, slots=True)
class Examination:
    """The findings of every host, and those about all of them."""

    hosts: Mapping[str, Sequence[HostFinding]]
    together: Sequence[HostFinding] = ()

    @property
    def problems(self) -> int:
        every = [*self.together, *(one for findings in self.hosts.values() for one in findings)]
        return sum(one.level is Level.PROBLEM for one in every)


def run(args: argparse.Namespace) -> int:
    """Examine, show, and return 1 if there is a problem."""
    if args.hosts and args.quick:
        raise UsageError("gradwire doctor --hosts --quick: hosts are examined by ranks that meet. Omit one of the two.")
    found = _hosts(args.timeout) if args.hosts else Examination({socket.gethostname(): list(_here(args))})
    if found is None:  # rank 0 shows it
        return 0
    if args.json:
        print(json.dumps({"problems": found.problems, **asdict(found)}, indent=2))
    else:
        show(Console(highlight=False), found)
    return 1 if found.problems else 0


def show(console: Console, found: Examination) -> None:
    """Print all findings, in groups."""
    for host, findings in found.hosts.items():
        if len(found.hosts) > 1:
            console.print(Text(host, style="bold"), soft_wrap=True)
        _show(console, findings)
    if found.together:
        _show(console, found.together)
    conclusion = plural(found.problems, "problem") if found.problems else "no problem found"
    console.print(Text(conclusion, style=_STYLES[Level.PROBLEM if found.problems else Level.OK]))


def _show(console: Console, findings: Sequence[HostFinding]) -> None:
    width = max(len(one.name) for one in findings)
    area = ""
    for one in findings:
        if one.area != area:
            area = one.area
            console.print(Text(area, style="dim"))
        value, style = _wrapped(console, one.value, 12 + width), _STYLES[one.level]
        console.print(Text.assemble((f"  {one.level:<8}", style), f"{one.name:<{width}}  {value}"), soft_wrap=True)
        if one.fix:
            fix = _wrapped(console, one.fix, 15 + width)
            console.print(Text(f"{'':{12 + width}}-> {fix}", style=style), soft_wrap=True)
    console.print()


def _wrapped(console: Console, text: str, column: int) -> str:
    """`text` in lines that begin at `column`, if it is shown on a terminal with room for them. In a file a finding is one line."""
    room = console.width - column
    if not console.is_terminal or room < _LEAST_ROOM:
        return text
    lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    return f"\n{'':{column}}".join(lines)


def _here(args: argparse.Namespace) -> Iterator[HostFinding]:
    yield from examine(os.environ, several_hosts=False)
    if args.quick:
        return
    if not args.json:
        print("starting two ranks to measure how fast they reach each other", file=sys.stderr, flush=True)
    for kind in ("shared_memory", "gloo"):
        if unusable_engines()[kind]:
            continue
        try:
            [link] = run_ranks(functools.partial(measure, ranks=(0, 1)), 2, kind=kind, timeout=args.timeout)[0]
            yield HostFinding("two ranks", kind, str(link))
        except GradwireError as error:
            fix = "two ranks of this host could not exchange messages: look at the problems above, and at the error"
            yield HostFinding("two ranks", kind, f"{type(error).__name__}: {error}", Level.PROBLEM, fix)


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a rank has found on its host, for rank 0."""

    host: str
    identity: str
    versions: Mapping[str, str]
    findings: Sequence[HostFinding]


def _hosts(timeout: float) -> Examination | None:
    world = find_world(os.environ)
    if world.launcher in (Launcher.NONE, Launcher.GRADWIRE) or world.size == 1:
        raise UsageError(
            f"gradwire doctor --hosts, in {world}: start it on every host with torchrun, mpirun or srun, e.g. "
            "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m gradwire doctor --hosts."
        )
    host, findings = socket.gethostname(), examine(os.environ, several_hosts=not world.on_one_host)
    try:
        mine = RankReport(host, host_identity(), versions(), findings)
        return _meet(init("gloo", timeout=timeout, name="doctor"), mine)
    except GroupError as error:  # the reason may be a setting of this host
        fix = "not all hosts could be examined: look at the error, and at what every host has printed"
        met = HostFinding("hosts", host, f"{type(error).__name__}: {error}", Level.PROBLEM, fix)
        return Examination({host: [*(one for one in findings if one.level is not Level.OK), met]})
    finally:
        leave()


def _meet(group: Group, mine: RankReport) -> Examination | None:
    """Exchange reports, and measure the links between the lowest ranks of all hosts; the result is on rank 0."""
    every: list[RankReport] = [mine] * group.size
    dist.all_gather_object(every, mine, group=as_process_group(group))
    first = sorted({report.identity: rank for rank, report in reversed(list(enumerate(every)))}.values())
    links = measure(group, first)
    if group.rank != 0:
        return None
    names = [report.host for report in every]
    if len({names[rank] for rank in first}) < len(first):  # e.g. containers that have one name
        names = [f"{report.host} (rank {rank})" for rank, report in enumerate(every)]
    same = compare({names[rank]: every[rank].versions for rank in first})
    return Examination({names[rank]: every[rank].findings for rank in first}, [*same, *judge(links, names)])


def compare(hosts: Mapping[str, Mapping[str, str]]) -> Iterator[HostFinding]:
    """Findings about `versions()` by host: they must be the same."""
    for name in next(iter(hosts.values())):
        by_value: dict[str, list[str]] = {}
        for host, found in hosts.items():
            by_value.setdefault(found[name], []).append(host)
        if len(by_value) > 1:
            value = "; ".join(f"{value} on {', '.join(where)}" for value, where in by_value.items())
            yield HostFinding("hosts", name, value, Level.PROBLEM, f"install the same {name} on all hosts")
        else:
            yield HostFinding("hosts", name, f"{next(iter(by_value))} on all")
