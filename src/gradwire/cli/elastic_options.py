"""The options of `gradwire run` for elastic runs, and the key of a hub."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwire.cli.arguments import at_least
from gradwire.errors import UsageError
from gradwire.launch.chaos_schedule import ChaosSchedule, chaos_rates
from gradwire.observe.units import plural
from gradwire.runtime.private_file import read_private, write_private

if TYPE_CHECKING:  # a run that is not elastic does without
    from gradwire.launch.supervise_elastic import ElasticPlan

_REACH = 30.0
"""Seconds in which a hub that should be there must answer, with a run if one is joined."""
_PAUSE = 0.2
_SHORTEST = 16
_ELASTIC_ONLY = {"--hub", "--spares", "--key-file", "--chaos"}


def add_elastic(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    elastic = "for a script that trains with gw.elastic(): a rank that dies is replaced while the others go on, with at least MIN "
    elastic += "and at most MAX ranks; one that gets SIGTERM leaves"
    add("--elastic", type=_limits, metavar="MIN:MAX", help=elastic)
    spares = "with --elastic or --join: K more processes that are ready to take the place of a rank that dies"
    add("--spares", type=at_least(0), default=0, metavar="K", help=spares)
    hub = "with --elastic: use the hub at this address, started by gradwire hub, instead of one of its own on this machine"
    add("--hub", type=address, metavar="HOST:PORT", help=hub)
    join = "add ranks of this machine to the elastic run with the hub at this address; with --elastic, begin it if nobody has"
    add("--join", type=address, metavar="HOST:PORT", help=join)
    key = "the file with the key of the hub, for --hub and --join; with --elastic alone it is made if it does not exist"
    add("--key-file", type=Path, metavar="FILE", help=key)
    chaos = "with --elastic or --join: faults at random times, so many in a second on this machine, once training has begun: "
    chaos += "kill, stop (SIGSTOP, for 2 s) or term (SIGTERM) a rank, or kill the hub; e.g. kill=0.05/s,stop=0.01/s,hub=0.01/s"
    add("--chaos", type=chaos_rates, metavar="KIND=RATE/s,...", help=chaos)
    seed = "with --chaos: the seed of the times and ranks of the faults (default: %(default)s)"
    add("--chaos-seed", type=int, default=0, metavar="N", help=seed)


def elastic_plan(args: argparse.Namespace, directory: Path) -> ElasticPlan | None:
    """How the members of the run may change, if they may. The records of a hub of its own are kept in `directory`."""
    if args.elastic is None and args.join is None:
        return None
    from gradwire.elasticity.hub import HubClient
    from gradwire.elasticity.run_records import RunRecords
    from gradwire.launch.hub_host import HubHost, host_and_port
    from gradwire.launch.supervise_elastic import ElasticPlan

    chaos = None if args.chaos is None else ChaosSchedule(args.chaos, args.chaos_seed)
    least, limits = (0, "") if args.elastic is None else (args.elastic[0], "{}:{}".format(*args.elastic))
    where = args.hub or args.join
    if where is None:
        key = os.urandom(32) if args.key_file is None else read_key(args.key_file, make=True)
        path = directory / "hub.records"
        path.unlink(missing_ok=True)  # of an earlier run
        own = HubHost(path, key)
        return ElasticPlan(least, limits, own.address, key, own, args.spares, chaos=chaos)
    _wait(args.key_file.exists)
    key, mine = read_key(args.key_file), limits and f"{limits} {os.urandom(4).hex()}"
    hub = HubClient(where, key=key, timeout=_REACH)
    known = _wait(lambda: RunRecords(hub).begin(mine))
    hub.close()
    if args.hub and known != mine:
        raise UsageError(
            f"gradwire run --hub {host_and_port(where)}: this hub has the records of a run already. Join it with "
            "--join, or start the hub with a new file."
        )
    if not known:
        raise UsageError(
            f"gradwire run --join {host_and_port(where)}: no run has begun at this hub. Add --elastic MIN:MAX to begin one."
        )
    least, limits, begins = least if known == mine else 0, known.partition(" ")[0], bool(limits)
    return ElasticPlan(least, limits, where, key, spares=args.spares, chaos=chaos, begins=begins)


def _wait(ready: Callable[[], Any]) -> Any:
    """For what may still have to be started, on another host."""
    until = time.monotonic() + _REACH
    while not (found := ready()) and time.monotonic() < until:
        time.sleep(_PAUSE)
    return found


def check_elastic(args: argparse.Namespace, ranks: int) -> None:
    """Refuse options that do not go together."""
    chosen = {f"--{option.replace('_', '-')}" for option, value in vars(args).items() if value}
    elastic, keyed = chosen & {"--elastic", "--join"}, chosen & {"--hub", "--join"}
    stock = chosen & {"--verify-ddp", "--replace-ddp"}
    for found, advice in (
        ({"--join"} & chosen and {"--hub"} & chosen, "not with --join, which can begin a run, too. Omit it"),
        (elastic and stock, "torch's class is not elastic. Omit --elastic and --join"),
        (not elastic and chosen & _ELASTIC_ONLY, "it needs --elastic or --join. Add one of them"),
        ({"--chaos"} - chosen and chosen & {"--chaos-seed"}, "it needs --chaos. Add it"),
        (keyed and "hub" in (args.chaos or ()) and {"--chaos hub"}, "the hub is not this launcher's. Omit hub"),
        ({"--key-file"} - chosen and keyed, "it needs --key-file. Name that of the hub"),
    ):
        if found:
            raise UsageError(f"gradwire run {min(found)}: {advice}.")
    if args.elastic is not None and not args.elastic[0] <= ranks <= args.elastic[1]:
        raise UsageError(
            f"gradwire run --nproc {ranks} --elastic {{}}:{{}}: it begins with {plural(ranks, 'rank')}. Choose limits that include "
            "this; to wait for more of other hosts, pass min_ranks= to gw.elastic.".format(*args.elastic)
        )


def read_key(path: Path, *, make: bool = False) -> bytes:
    """The key in a file that only this user can read; with `make`, it is made if it is not there."""
    try:
        if make and not path.exists():
            write_private(path, os.urandom(32).hex().encode() + b"\n")
        key = read_private(path).strip()
        if path.stat().st_mode & 0o077 or len(key) < _SHORTEST:
            raise UsageError(
                f"reading the key in {path}: others can read it, or it has fewer than {_SHORTEST} characters. Remove the file, "
                "let gradwire hub make a new one, and copy it to the other hosts."
            )
    except OSError as error:
        raise UsageError(f"reading the key in {path}: {error.strerror}. Name the key file of the hub.") from error
    return key


def address(text: str) -> tuple[str, int]:
    """HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host, int(port)


def _limits(text: str) -> tuple[int, int]:
    with suppress(ValueError):
        least, most = map(int, text.split(":"))
        if 1 <= least <= most:
            return least, most
    raise argparse.ArgumentTypeError(f"{text!r} is not MIN:MAX, two whole numbers of 1 or more")
