"""Starts and stops the flight recorder of this process."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import itertools
import json
import os
import platform
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradwire.errors import UsageError
from gradwire.observe.hangs.gradient_questions import SUBJECT, SUFFIX, answer_questions
from gradwire.observe.hangs.hang_watch import report_for_error
from gradwire.observe.hangs.stacks import libraries, write_stacks
from gradwire.observe.rings.ring import RingFile, state_of_writer
from gradwire.recorder import writer
from gradwire.recorder.format import HEADER, PAGE, RecordKind
from gradwire.recorder.writer import FlightRecorder, Place, RankInGroup
from gradwire.runtime.host import ProcessState, clock_identity, process_start

_lock = threading.Lock()
_effects = contextlib.ExitStack()
"""The effects of recording on the process: closing it ends them."""
_rank = 0


def start(
    directory: str | os.PathLike[str], *, rank: int | None = None, size: int | None = None, member: str = ""
) -> None:
    """Record this process from now on, in `directory`/rank-N.ring. In an elastic run N is the process's id, `member`: ranks change.

    Every rank calls it, with the same directory; ranks on other hosts may have one of their own. `rank` and `size` are those of
    torch.distributed's default process group unless given. Called again with the same directory, it changes nothing.
    Where there is no room for the ring, training continues without it, with a warning.

    The ring holds the last 65,536 records, in 5 MiB. It costs about a microsecond per collective, bucket and step.
    """
    global _rank
    directory = Path(directory)
    rank, size = _place(rank, size)
    path = directory / f"rank-{member or rank}.ring"
    with _lock:
        if writer.active is not None:
            if writer.active.path == path:
                return
            raise UsageError(
                f"observe.start({str(directory)!r}): this process is recorded in {writer.active.path.parent} already. "
                "Call observe.stop() first."
            )
        _check_not_in_use(path)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if directory.stat().st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "the directory belongs to another user")
            recorder = FlightRecorder(path, header=_header(rank, size, member))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG):
                raise
            _warn(directory, f"{error.strerror}, so this process is not recorded.")
            return
        _record_optimizers(rank)
        _record_torch_ddp(rank)
        try:
            if threading.current_thread() is threading.main_thread():
                _effects.enter_context(write_stacks(path.with_suffix(".stacks")))
            how = _effects.enter_context(answer_questions(path.with_suffix(SUFFIX)))
            recorder.describe(SUBJECT, how)
        except (OSError, RuntimeError) as error:  # no descriptors or threads left; records are worth something without
            _warn(directory, f"stacks and awaited gradients are not recorded: {error}")
        recorder.describe("system", _system())
        writer.active = recorder
        writer.reporter = functools.partial(report_for_error, directory)
        _rank = rank


def _warn(directory: Path, text: str) -> None:
    warnings.warn(f"observe.start({str(directory)!r}): {text}", stacklevel=3)


def stop() -> None:
    """Stop recording. What was recorded stays."""
    with _lock:
        recorder, writer.active = writer.active, None
        writer.reporter = None
        _effects.close()
    if recorder is not None:
        recorder.describe("end", {"time": time.monotonic_ns()})
        recorder.close()


def attach(close: Callable[[], object]) -> None:
    """Call `close` when the recorder is stopped."""
    with _lock:
        _effects.callback(close)


def mark(text: str) -> None:
    """Write a note of your own into the record: it is shown in traces. Without a recorder it does nothing."""
    recorder = writer.active
    if recorder is not None:
        recorder.put(RecordKind.MARK, RankInGroup(rank=_rank), label=str(text))


def samples(number: int) -> None:
    """Count samples (or tokens, or whatever a batch has) that this rank processes: views and `--stats` show them per second.
    Call it once for each batch, on every rank. Without a recorder it does nothing."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise UsageError(f"observe.samples({number!r}): pass how many samples the batch has, a whole number.")
    recorder = writer.active
    if recorder is not None:
        recorder.put(RecordKind.SAMPLES, RankInGroup(rank=_rank), nbytes=number)


def _place(rank: int | None, size: int | None) -> tuple[int, int]:
    if rank is None or size is None:
        import torch.distributed as dist

        known = dist.is_available() and dist.is_initialized()
        rank = rank if rank is not None else dist.get_rank() if known else 0
        size = size if size is not None else dist.get_world_size() if known else rank + 1
    if not 0 <= rank < size:
        raise UsageError(f"observe.start(rank={rank}, size={size}): ranks count from 0 to size - 1.")
    return rank, size


def _header(rank: int, size: int, member: str = "") -> dict[str, Any]:
    import torch

    from gradwire.collectives.op_kinds import OpKind

    header = {
        "rank": rank,
        "size": size,
        "member": member,
        "pid": os.getpid(),
        "process_start": process_start(os.getpid()) or "",
        "host": socket.gethostname(),
        "clock": clock_identity(),
        "started": time.monotonic_ns(),
        "started_wall": time.time_ns(),
        "main_thread": threading.main_thread().ident,
        "libraries": libraries(),
        "ops": [kind.value for kind in OpKind],
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "gradwire": sys.modules["gradwire"].__version__,
        "command": " ".join(sys.argv)[:500],
    }
    for name, short in (("command", header["command"][:100]), ("command", ""), ("libraries", [])):
        if len(json.dumps(header)) > PAGE - HEADER.size:  # a character may take 12 bytes in JSON
            header[name] = short
    return header


def _system() -> dict[str, Any]:
    """What the rank runs on. CUDA is not initialized for it."""
    import torch

    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
    }


def _check_not_in_use(path: Path) -> None:
    """Refuse to take the ring of a process that still writes it: two ranks were given the same number."""
    try:
        with RingFile(path) as ring:
            pid, rank, state = int(ring.header["pid"]), ring.header["rank"], state_of_writer(ring.header)
    except (OSError, UsageError):
        return
    if pid != os.getpid() and state not in (ProcessState.GONE, ProcessState.UNKNOWN):
        raise UsageError(
            f"observe.start({str(path.parent)!r}): process {pid} records as rank {rank} there. Pass each process's own rank=, or "
            "another directory."
        )


def _record_optimizers(rank: int) -> None:
    from gradwire.autograd.optimizer_steps import after_optimizer_steps, before_optimizer_steps

    member = RankInGroup(rank=rank)

    def record(kind: RecordKind, *_: Any) -> None:
        if (recorder := writer.active) is not None:
            recorder.put(kind, member)

    _effects.callback(before_optimizer_steps(functools.partial(record, RecordKind.OPTIMIZER_BEGAN)).remove)
    _effects.callback(after_optimizer_steps(functools.partial(record, RecordKind.OPTIMIZER_ENDED)).remove)


def _record_torch_ddp(rank: int) -> None:
    """Record when a forward of torch's own DDP begins and ends, in scripts that do not call gradwire. Backward ends with the
    optimizer's step. `gradwire run --replace-ddp` puts our class in its place, which records itself."""
    import torch

    if not torch.distributed.is_available():
        return
    cls: Any = torch.nn.parallel.DistributedDataParallel
    if cls.__module__ != "torch.nn.parallel.distributed":
        return
    original = cls.forward
    member, steps = RankInGroup(rank=rank), itertools.count()

    @functools.wraps(original)
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = writer.active
        if recorder is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return original(module, *args, **kwargs)
        place = Place(next(steps))
        recorder.put(RecordKind.FORWARD_BEGAN, member, place=place)
        result = original(module, *args, **kwargs)
        recorder.put(RecordKind.FORWARD_ENDED, member, place=place)
        return result

    def restore() -> None:
        if cls.forward is forward:
            cls.forward = original

    cls.forward = forward
    _effects.callback(restore)


def _forget() -> None:
    """In a forked child: what the parent has registered is not the child's, whose own recorder may come."""
    global _lock
    _lock = threading.Lock()  # which a thread of the parent may have held
    _effects.close()


os.register_at_fork(after_in_child=_forget)
atexit.register(stop)
