"""`gradwire run`: its options, passed on to the launcher.

Start N processes of a script on this machine; gw.init() makes them ranks of one world. Each line of their output is shown with
its rank. When one fails the others are stopped, its traceback is shown last, and its exit code is returned. Signals are
forwarded to all ranks; a second Ctrl-C kills them. SIGUSR1 shows where every rank stands, and is forwarded only to ranks that
handle it. Rank 0 reads what is piped in; no rank reads the terminal.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

from gradwire.cli.arguments import Parser, at_least, number, positive
from gradwire.cli.elastic_options import add_elastic, check_elastic, elastic_plan
from gradwire.errors import UsageError
from gradwire.launch.environment import CHECK_DIVERGENCE, HOOK, NONFINITE, RUN_DIRECTORY, LocalWorld, rank_environment
from gradwire.launch.preload import ELASTIC_MODULES, PreloadedPython
from gradwire.launch.preload_check import preloaded_modules, source_of, why_not_preload
from gradwire.launch.process import FORWARDED
from gradwire.launch.run_script import python_command
from gradwire.launch.store_host import LOOPBACK, StoreHost
from gradwire.launch.world import Address
from gradwire.observe.hangs import SOFT_DEADLINE
from gradwire.observe.rings.runs import KEPT, clear_run, new_run, runs_directory
from gradwire.runtime.private_file import create, name_of

_SEVERAL_HOSTS = (
    "gradwire run starts ranks on this machine only. For several hosts use torchrun, mpirun or srun: gw.init() works"
)
_HINTS = {
    **dict.fromkeys(["--node-rank", "--master-addr", "--master-port"], _SEVERAL_HOSTS),
    **dict.fromkeys(["--rdzv-endpoint", "--rdzv-backend", "--rdzv-id", "--rdzv-conf"], _SEVERAL_HOSTS),
    "--max-restarts": "Ranks are replaced with --elastic MIN:MAX, for scripts that use gw.elastic()",
    "--no-python": "gradwire run starts Python scripts, and modules with -m. Use torchrun: gw.init() works under it",
    **dict.fromkeys(["--redirects", "--tee", "-r", "-t"], "All output is shown; --log-dir DIR writes it to files too"),
}
"""Hints for torchrun's options that are not supported."""

HOOKS = (
    *("mean", "bf16", "fp16", "quantize8", "quantize4", "quantize2", "quantize1", "sign"),
    *("power_sgd", "power_sgd16", "power_sgd_batched", "top_k", "dgc"),
)
"""Those of `hooks.named`, whose import takes a second, that need no optimizer."""


def add_options(parser: Parser) -> None:
    parser.usage = "gradwire run [options] [-m] SCRIPT [arguments of the script]"
    parser.epilog = (
        "For several hosts use torchrun, mpirun or srun: gw.init() works under each. Elastic runs: --hub and --join."
    )
    parser.hints = _HINTS
    _add_starting(parser)
    add_elastic(parser)
    _add_recording(parser)
    _add_checks(parser)
    # One argument for both, not REMAINDER, from which argparse drops a first "--".
    script = "a Python file, or with -m a module, and its arguments"
    parser.add_argument("script", nargs=argparse.PARSER, metavar="SCRIPT", help=script)


def _add_starting(parser: argparse.ArgumentParser) -> None:
    """How ranks are started and ended, and what is done with their output."""
    add = parser.add_argument
    ranks = "number of ranks, or gpu, cpu or auto (default: one per GPU, else one per core)"
    add("-n", "--nproc", "--nproc-per-node", type=_count, default="auto", metavar="N", help=ranks)
    add("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as after python -m")
    env = "set an environment variable for the ranks; may be repeated"
    add("--env", action="append", default=[], type=_assignment, metavar="NAME=VALUE", help=env)
    preload = "let each rank import torch itself, instead of forking all from a process that has imported it"
    add("--no-preload", action="store_true", help=preload)
    add("--no-prefix", action="store_true", help="show lines without the rank")
    logs = "also write each rank's output to DIR/rank-N.log"
    add("--log-dir", type=Path, metavar="DIR", help=logs)
    timeout = "how long ranks may take to end after SIGTERM before they are killed (default: %(default)g)"
    add("--timeout", type=_seconds, default=10.0, metavar="SECONDS", help=timeout)
    add("--standalone", action="store_true", help="as for torchrun; ranks are always on this machine only")
    add("--nnodes", type=_one_host, metavar="1", help="as for torchrun; must be 1")


def _add_recording(parser: argparse.ArgumentParser) -> None:
    """What is recorded of the ranks, and shown while they run."""
    add = parser.add_argument
    run_dir = "where the flight recorders of the ranks write (default: a new directory in ~/.local/state/gradwire/runs, where "
    add("--run-dir", type=Path, metavar="DIR", help=f"{run_dir}the last {KEPT} runs are kept)")
    add("--no-record", action="store_true", help="do not record what the ranks do")
    hang = "report a hang when ranks have waited for so long in a collective, and ten times as long as usual (default: "
    hang += "%(default)g; 0 or never: do not)"
    add("--hang-after", type=_hang_after, default=SOFT_DEADLINE, metavar="SECONDS", help=hang)
    watch = "show all ranks in a live view below their output; without a terminal, the same as --stats 10"
    add("--watch", action="store_true", help=watch)
    add("--stats", type=positive, metavar="SECONDS", help="print a line of figures of the run at this interval")
    observe = (
        "record a script that does not call gradwire too, from its start: steps of torch's DDP, and where ranks hang"
    )
    add("--observe", action="store_true", help=observe)


def _add_checks(parser: argparse.ArgumentParser) -> None:
    """What gradwire's models do in scripts that do not choose it."""
    add = parser.add_argument
    replace = "run a script written for torch's DistributedDataParallel on gradwire's, unchanged"
    add("--replace-ddp", action="store_true", help=replace)
    hook = f"with --replace-ddp: reduce gradients by this hook, with error feedback where needed: {', '.join(HOOKS)}"
    add("--hook", choices=HOOKS, metavar="NAME", help=hook)
    verify = (
        "run the script twice, with fixed seeds, and end it after N optimizer steps: with torch's DistributedDataParallel and with "
        "gradwire's; compare gradients and parameters of each step, bit by bit. Exit code 0: equal; 1: different; 2: they cannot "
        "be compared; or that of the script if it fails. Not with --hook: a hook that compresses changes gradients"
    )
    add("--verify-ddp", type=at_least(1), metavar="N", help=verify)
    nonfinite = (
        "check the gradients of gradwire's models for NaN and infinity, unless the script chooses a policy: end the run, "
        "skip such steps, or only record them (on a CPU, the first one is recorded in any case)"
    )
    add("--nonfinite", choices=("raise", "skip", "record"), help=nonfinite)
    divergence = "compare the replicas of gradwire's models bit by bit every so many steps; end the run if they differ"
    add("--check-divergence", type=at_least(1), metavar="STEPS", help=divergence)


def run(args: argparse.Namespace) -> int:
    """Start the ranks, wait for them, and return the exit code."""
    script, *arguments = args.script[1:] if args.script[0] == "--" else args.script
    if not args.module and not Path(script).is_file():
        wrong = "it is a directory" if Path(script).is_dir() else "there is no such file"
        raise UsageError(
            f"gradwire run {script}: {wrong}. Options of gradwire run go before the script; "
            "-m runs a module by its name."
        )
    if args.verify_ddp is not None:
        return _verify(args, script, arguments)
    if args.hook is not None and not args.replace_ddp:
        raise UsageError(
            f"gradwire run --hook {args.hook}: it is for models that take the place of torch's. Add --replace-ddp; a script that "
            "uses gradwire calls model.set_hook(...)."
        )
    starter = "gradwire.integrations.ddp_script" if args.replace_ddp else "gradwire.launch.run_script"
    return _launch(args, [script, *arguments], starter, {}, observe=args.observe or args.replace_ddp)


def _verify(args: argparse.Namespace, script: str, arguments: Sequence[str]) -> int:
    if args.hook is not None:
        raise UsageError(
            f"gradwire run --verify-ddp {args.verify_ddp} --hook {args.hook}: with a hook that compresses, gradients are not "
            "those of torch's class. Omit --hook; `gradwire report A B` compares the speed of two runs."
        )
    args.nproc = _ranks(args.nproc)

    def launch(name: str, variables: Mapping[str, str]) -> int:
        places = {key: None if (path := vars(args)[key]) is None else path / name for key in ("run_dir", "log_dir")}
        one = argparse.Namespace(**{**vars(args), **places})
        seed = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED") or "0"}
        starter = "gradwire.integrations.verified_script"
        return _launch(one, [script, *arguments], starter, {**seed, **variables}, observe=True)

    from gradwire.cli.verify_ddp import verify_ddp

    return verify_ddp(launch, steps=args.verify_ddp, ranks=args.nproc)


def _launch(
    args: argparse.Namespace, words: Sequence[str], starter: str, variables: Mapping[str, str], *, observe: bool
) -> int:
    """Run the script `words[0]` with its arguments by the module `starter`, which gets `variables` in its environment."""
    size = _ranks(args.nproc)
    picture, stats = _view(args)
    check_elastic(args, size)
    recorded = _run_directory(args, words[0])
    with ExitStack() as stack:
        private = create()
        stack.callback(os.close, private)
        store = stack.enter_context(closing(StoreHost()))
        errors = recorded.get(RUN_DIRECTORY) or stack.enter_context(tempfile.TemporaryDirectory(prefix="gradwire-"))
        options = python_command(starter, errors=errors, observe=observe and bool(recorded))
        plan = elastic_plan(args, Path(errors))
        if plan is not None and plan.hub is not None:
            stack.callback(plan.hub.close)
        command = [sys.executable, *options, *(["-m"] if args.module else []), *words]
        world = LocalWorld(size, name_of(private), Address(LOOPBACK, store.port), len(os.sched_getaffinity(0)))
        variables = {**recorded, **variables, **({} if plan is None else plan.variables)}
        environments = _environments(args, world, variables)
        source = _source(words[0], module=args.module)
        cold = "--no-preload" if args.no_preload else "" if source is None else why_not_preload(source)
        folder = os.getcwd() if args.module else os.path.dirname(os.path.realpath(words[0]))
        modules = preloaded_modules(source) if plan is None else ELASTIC_MODULES
        preload = None if cold else PreloadedPython(command, environments, directory=folder, modules=modules)
        if preload is not None:
            stack.callback(preload.close)
        held = FORWARDED if plan is None else []  # until there are handlers; a hub is started before
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, signal.pthread_sigmask(signal.SIG_BLOCK, held))

        # What the launcher needs from here on, it imports while the other process imports torch.
        from gradwire.launch.supervise import LaunchSpec, Supervisor
        from gradwire.launch.supervise_elastic import ElasticSupervisor
        from gradwire.observe.hangs.hang_watch import HangWatch
        from gradwire.observe.rings.run_follower import RunFollower
        from gradwire.observe.run_status import RunMonitor

        ranks = RunFollower(Path(recorded[RUN_DIRECTORY]), since=time.monotonic_ns()) if recorded else None
        if ranks is not None:
            stack.callback(ranks.close)
        spec = LaunchSpec(
            command,
            environments,
            preload=preload,
            cold=cold,
            grace=args.timeout,
            prefix=not args.no_prefix,
            log_dir=args.log_dir,
            store=store,
            directory=None if ranks is None else ranks.directory,
            errors=Path(errors),
            watch=None if ranks is None else HangWatch(ranks, deadline=args.hang_after),
            monitor=None if ranks is None else RunMonitor(ranks, size=size, stats=stats),
            picture=picture,
        )
        return (Supervisor(spec) if plan is None else ElasticSupervisor(spec, plan)).supervise()


def _environments(args: argparse.Namespace, world: LocalWorld, extra: Mapping[str, str]) -> list[dict[str, str]]:
    """Of all ranks, and then of spares."""
    checks = {NONFINITE: args.nonfinite, CHECK_DIVERGENCE: args.check_divergence, HOOK: args.hook}
    chosen = {name: str(value) for name, value in checks.items() if value is not None}
    base = {name: value for name, value in os.environ.items() if name != RUN_DIRECTORY}  # of a run around this one
    extra = {**chosen, **extra, **dict(args.env)}
    environments = [rank_environment(base, extra, rank, world) for rank in range(world.size + args.spares)]
    for spare in environments[world.size :]:
        spare.update(dict.fromkeys(("GRADWIRE_SIZE", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(len(environments))))
    return environments


def _source(script: str, *, module: bool) -> bytes | None:
    """Of the script; None for an installed module."""
    with suppress(OSError):
        return source_of(script, module=module).read_bytes()
    return None


def _view(args: argparse.Namespace) -> tuple[Any, float | None]:
    """The live view, if it was asked for and there is a terminal for it, and the interval of lines of figures."""
    if args.no_record and (args.watch or args.stats is not None):
        raise UsageError("gradwire run --watch and --stats show what is recorded: omit --no-record.")
    if not args.watch:
        return None, args.stats
    from gradwire.launch.display import find_terminal
    from gradwire.observe.run_status import PLAIN_INTERVAL

    if find_terminal(os.environ) is None:
        return None, args.stats or PLAIN_INTERVAL
    from gradwire.cli.live_view import picture  # takes a while to import, and most runs do not need it

    return picture, args.stats


def _run_directory(args: argparse.Namespace, script: str) -> dict[str, str]:
    """The variable with the directory in which ranks record, if recording is possible: training does not depend on it."""
    if args.no_record:
        if args.run_dir is not None or args.observe:
            raise UsageError("gradwire run --no-record, with --run-dir or --observe: choose one.")
        return {}
    directory: Path | None = args.run_dir
    try:
        if directory is None:
            directory = new_run(runs_directory(os.environ), script)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        clear_run(directory)
    except OSError as error:
        if args.run_dir is not None:
            raise UsageError(f"gradwire run --run-dir {directory}: {error.strerror}.") from None
        print(f"gradwire run: this run is not recorded: {error}", file=sys.stderr)
        return {}
    return {RUN_DIRECTORY: str(directory.absolute())}


def _ranks(word: int | str) -> int:
    """How many ranks a number, "gpu", "cpu" and "auto" are."""
    if isinstance(word, int):
        return word
    cpus = len(os.sched_getaffinity(0))
    if word == "cpu":
        return cpus
    gpus = count_gpus()
    if word == "gpu" and not gpus:
        raise UsageError("gradwire run --nproc gpu: there is no GPU that torch can use. Pass a number, or cpu.")
    return gpus or cpus


def count_gpus() -> int:
    """How many GPUs torch sees. torch is imported only if the machine has a GPU driver."""
    if not any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/nvmap", "/dev/dxg", "/dev/kfd")):
        return 0
    import torch

    return torch.cuda.device_count()


def _count(text: str) -> int | str:
    return text if text in ("auto", "cpu", "gpu") else at_least(1, otherwise=", nor gpu, cpu or auto")(text)


def _one_host(text: str) -> int:
    if text not in ("1", "1:1"):
        raise argparse.ArgumentTypeError(f"{text!r} hosts: {_SEVERAL_HOSTS[0].lower()}{_SEVERAL_HOSTS[1:]}")
    return 1


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _hang_after(text: str) -> float:
    return (0.0 if text == "never" else _seconds(text)) or math.inf


_seconds = number(float, lambda value: 0 <= value < math.inf, "a number of seconds, 0 or more")
