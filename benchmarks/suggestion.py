"""`python -m benchmarks.suggestion`: the step times that `gradwire suggest` predicts for hooks, and those that are measured.

Two ranks train the transformer of `slowlink`, first with `mean()`, recorded, then with every hook that is predicted; over a real
link of limited rate between two hosts (`gradwire.lab.hosts`), or with shared memory. The median step on the slower rank is taken.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from statistics import fmean, median

import torch
from torch._C._distributed_c10d import PrefixStore

from benchmarks.slowlink_rank import Learner, start
from benchmarks.world import RankContext, run_world
from gradwire import observe
from gradwire.cli.demo.model import standard_library
from gradwire.groups import C10dGroup, SharedMemoryGroup
from gradwire.hooks.named import NAMED_HOOKS
from gradwire.lab import hosts
from gradwire.observe.report.report_model import load_report
from gradwire.observe.report.suggest import CANDIDATES, measure, suggest_text
from gradwire.observe.units import duration
from gradwire.parallel import DistributedDataParallel

WARM_UP = 4
NAMES = ("mean", *(hook.name for hook in CANDIDATES))


def train(folder: Path, memory: bool, size: str, steps: int, context: RankContext) -> dict[str, float]:
    """The seconds per step on this rank, by hook."""
    torch.set_num_threads(1)
    corpus, kind = standard_library(), SharedMemoryGroup if memory else C10dGroup.gloo
    found = {}
    for name in NAMES:
        hook, model = NAMED_HOOKS[name], start(size, seed=0)
        store = PrefixStore(name, context.store)
        with (
            closing(kind(store, context.rank, context.size, timeout=context.timeout, name=name)) as group,
            _recorded(folder, context) if name == "mean" else nullcontext(),
        ):
            ddp = DistributedDataParallel(model, process_group=group)
            ddp.set_hook(hook.build())
            learner = Learner(model, ddp, corpus, seed=context.rank, batch=1, rate=1e-3)
            if hook.needs_optimizer:
                ddp.attach_optimizer(learner.optimizer)
            times = []
            for _ in range(max(WARM_UP, hook.every) + max(steps, 2 * hook.every)):
                begin = time.perf_counter()
                learner.step()
                times.append(time.perf_counter() - begin)
            timed = times[max(WARM_UP, hook.every) :]
            found[name] = fmean(timed) if hook.every > 1 else median(timed)
            ddp.replica.detach()
            context.barrier.wait()
        context.report(None)
    return found


@contextmanager
def _recorded(folder: Path, context: RankContext) -> Iterator[None]:
    observe.start(folder, rank=context.rank, size=context.size)
    yield
    observe.stop()


def compare(mbit: float | None, size: str, steps: int) -> Iterator[str]:
    """Rows of a table: predicted and measured."""
    with tempfile.TemporaryDirectory() as folder, nullcontext(()) if mbit is None else hosts(2, mbit=mbit) as machines:
        task = functools.partial(train, Path(folder), mbit is None, size, steps)
        ranks: Sequence[dict[str, float]] = run_world(task, 2, name="suggestion", on=machines, timeout=240)
        report = load_report(Path(folder))
    measured = {name: max(rank[name] for rank in ranks) for name in NAMES}
    yield f"{'shared memory' if mbit is None else f'{mbit:g} Mbit/s'}: mean {duration(measured['mean'])}"
    yield suggest_text(report)
    step = measure(report)
    for hook in CANDIDATES:
        name, predicted = hook.name, step.predict(hook)
        off = predicted / measured[name] - 1
        yield f"  {name}: predicted {duration(predicted)}, measured {duration(measured[name])} ({off:+.0%})"


def main() -> None:
    """Print the rows of all links."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--links", nargs="+", default=["100", "1000", "memory"], help="Mbit/s, or memory")
    parser.add_argument("--size", default="10m", help="of the model, as for slowlink (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="timed with each hook (default: %(default)s)")
    args = parser.parse_args()
    for link in args.links:
        for line in compare(None if link == "memory" else float(link), args.size, args.steps):
            print(line, flush=True)


if __name__ == "__main__":
    main()
