"""`elastic`: join the run that the environment describes, or begin one of a single process."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradwire.elasticity.deal import Deal
from gradwire.elasticity.hub import HubClient, Records
from gradwire.elasticity.quorum import Limits
from gradwire.elasticity.run import ElasticRun
from gradwire.elasticity.run_records import RunRecords
from gradwire.elasticity.state import Source, safetensors
from gradwire.elasticity.view_groups import ViewGroups
from gradwire.errors import UsageError
from gradwire.groups.base import DEFAULT_TIMEOUT
from gradwire.groups.kinds import AUTO
from gradwire.hooks.base import CommHook
from gradwire.launch.environment import shared_memory_options
from gradwire.launch.run_script import start_recorder
from gradwire.launch.world import find_world
from gradwire.policies import Buckets, Graph
from gradwire.runtime.cleanup import on_failure


def elastic(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    hook: CommHook | None = None,
    data: Deal | None = None,
    steps: int | None = None,
    update: Callable[[], object] | None = None,
    warm_up: Callable[[], object] | None = None,
    register: Mapping[str, Any] | None = None,
    state: Source | Iterable[Source] | None = None,
    min_ranks: int | None = None,
    patience: float = 600.0,
    quorum: int | None = None,
    grace: float = 0.0,
    rescue: str | os.PathLike[str] | None = None,
    kind: str = AUTO,
    timeout: float = DEFAULT_TIMEOUT,
    graph: Graph = Graph.ALL_USED,
    buckets: Buckets | None = None,
    check_every: int = 100,
) -> ElasticRun:
    """Join a run whose members may die, leave and join. Returns when this process is a member, with the state of the others; a
    process that comes when training has ended exits here.

    `data` deals each step's samples to the members; a run ends after `steps`. A commit calls `update`, by default
    `optimizer.step`: clip gradients, step a GradScaler or a scheduler there. `warm_up` is called before anybody waits for this
    process: a forward and backward of any batch, which compiles the model; what they change is dropped. `register` names whatever
    else has a `state_dict` that members that join need. `state`, a file of `run.save` or a list of those of all ranks, is where a
    run begins that nobody else has begun. Below `min_ranks` (that of `gradwire run --elastic`) training waits, for `patience`
    seconds; then the state is saved in the file `rescue`, and `TooFewMembers` raised. Parameters are compared every `check_every`
    steps. With `hooks.diloco` members commit rounds of steps; when `quorum` members have waited for `grace` seconds at the end of
    one, others end it where they are.
    """
    environ = os.environ
    start_recorder(find_world(environ), "gw.elastic()")
    run = ElasticRun(model, optimizer, hook=hook, data=data, graph=graph, buckets=buckets)
    with on_failure(run.release):
        run.steps, run.check_every, run.rescue = steps, check_every, rescue
        run.training.update = update or optimizer.step
        run.training.joins.allowed &= kind != "nccl"  # which has no group of two for tensors of the host
        run.register(**(register or {}))
        _check_options(run, quorum, rescue)
        if state is not None:
            run.load_state_dict(state)
        groups = ViewGroups(kind, timeout=timeout, **shared_memory_options(environ))
        weakref.finalize(run, groups.close).atexit = False
        connect, me, starters = _hub(environ, min_ranks or 1)
        limits = Limits(*_limits(environ, data, min_ranks), starters, patience, quorum or 0, grace)
        with contextlib.closing(connect()) as records:
            last = records.last_view()
        groups.warm(starters if last is None else len(last.members) + 1, {p.dtype for p in model.parameters()})
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, functools.partial(_leave, run, os.getpid()))
        if warm_up is not None:
            run.training.warm_up(warm_up)
        run.start(me, connect, groups, limits)
        if not run.performer.member.holds:
            raise SystemExit(0)  # training has ended, and the rest of the script is for those that have trained
    return run


def _limits(environ: Mapping[str, str], data: Deal | None, min_ranks: int | None) -> tuple[int, int | None]:
    fewest, _, most = environ.get("GRADWIRE_ELASTIC", "1:").partition(":")
    slots = None if data is None else data.slots
    return int(fewest) if min_ranks is None else min_ranks, min(int(most), slots or int(most)) if most else slots


def _check_options(run: ElasticRun, quorum: int | None, rescue: str | os.PathLike[str] | None) -> None:
    if quorum is not None and (quorum < 1 or run.training.retries):
        raise UsageError(
            f"gw.elastic(quorum={quorum}, hook={run.training.replica.hook!r}): it is a number of members, at least one, at the "
            "end of a round, and only hooks such as diloco() have rounds. Leave it out."
        )
    if rescue is not None:
        safetensors()
        if not Path(rescue).absolute().parent.is_dir():
            raise UsageError(f"gw.elastic(rescue={os.fspath(rescue)!r}): there is no such directory. Make it before.")


def _leave(run: ElasticRun, process: int, number: int, _: object) -> None:
    """Handle SIGTERM. In a child of this process, and when training has ended, it ends the process as if nobody handled it."""
    if not run.finished and os.getpid() == process:
        return run.leave()
    signal.signal(number, signal.SIG_DFL)
    return signal.raise_signal(number)


def _hub(environ: Mapping[str, str], min_ranks: int) -> tuple[Callable[[], RunRecords], str, int]:
    """How to reach the hub, this process's name in the run, and how many processes begin it."""
    if "GRADWIRE_HUB" not in environ:
        world = find_world(environ)
        if min_ranks > 1:
            raise UsageError(
                f"gw.elastic(min_ranks={min_ranks}): this process is alone, and no other one can join. Start the script with "
                "gradwire run --elastic MIN:MAX."
            )
        if world.size > 1:
            raise UsageError(
                f"gw.elastic() on {world}: there is no hub, which decides who is in the run. Let this launcher start "
                "another one: gradwire run --elastic MIN:MAX for the script, once on each host."
            )
        with tempfile.TemporaryDirectory() as directory:
            records = Records(Path(directory) / "hub")
        connect = lambda: RunRecords(records)  # noqa: E731
        weakref.finalize(connect, records.close)
        return connect, "alone", 1
    host, _, port = environ["GRADWIRE_HUB"].rpartition(":")
    key, address = bytes.fromhex(environ.get("GRADWIRE_HUB_KEY", "")), (host, int(port))
    starters = int(environ.get("GRADWIRE_STARTERS") or 0)
    return lambda: RunRecords(HubClient(address, key=key)), environ["GRADWIRE_MEMBER"], starters
