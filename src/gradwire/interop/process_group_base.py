"""What torch asks of process groups and of backends besides collectives: `OverGroup` (lifetime, timeouts, coalescing, sequence
numbers), and `read_settings`, which parses the arguments of c10d's collectives other than tensors.

The collectives are in `c10d_methods.py`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from gradwire.collectives import Collective, ReduceOp
from gradwire.errors import UsageError, UsageTypeError
from gradwire.events import Handle
from gradwire.groups.base import Group
from gradwire.groups.work import Work
from gradwire.interop.work import KEPT, C10dWorkInfo, TorchWork, translate_hook
from gradwire.runtime.dynamo import untraced

# The name that `dist.record_comm(name)` gives to the communication in its block; torch 2.11 does not have it.
_comm_name: Callable[[], str] = getattr(c10d, "_get_comm_profiling_name", lambda: "")


@dataclass(frozen=True, slots=True)
class Settings:
    """c10d's options, translated to gradwire."""

    reduce_op: ReduceOp = ReduceOp.SUM
    factor: float | Tensor | None = None
    root: int = 0
    timeout: float | None = None
    """The timeout of this operation in seconds; None if the caller gave none."""
    label: str = ""
    """The name given by `dist.record_comm`."""
    async_op: bool = True
    """Whether the caller continues before the operation has finished."""


def read_settings(method: str, args: Sequence[Any] = (), named: Mapping[str, Any] | None = None) -> Settings:
    """Parse the arguments after the tensors of one call of c10d's `method`.

    >>> from datetime import timedelta
    >>> read_settings("broadcast", (1, timedelta(seconds=5)))
    Settings(reduce_op=<ReduceOp.SUM: 'sum'>, factor=None, root=1, timeout=5.0, label='', async_op=True)
    """
    reduce_op, factor, root, timeout, async_op = ReduceOp.SUM, None, 0, None, True
    for value in (*args, *(named or {}).values()):
        if value is None:
            continue
        if isinstance(value, timedelta):
            timeout = _seconds(value)
        elif isinstance(value, int):
            root = value
        elif isinstance(value, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
            reduce_op, factor = translate_reduce_op(value)
        elif hasattr(value, "timeout"):
            if getattr(value, "sparseIndices", None) is not None:
                raise UsageError(f"{method}: sparseIndices is set. Pass a sparse COO tensor instead.")
            if hasattr(value, "reduceOp"):
                reduce_op, factor = translate_reduce_op(value.reduceOp)
            root = getattr(value, "rootRank", 0)
            timeout = _seconds(value.timeout)
            async_op = getattr(value, "asyncOp", True)
        else:
            raise UsageTypeError(
                f"{method}: {value!r} is neither one of c10d's option objects nor a ReduceOp, root rank or timedelta."
            )
    return Settings(reduce_op, factor, root, timeout, _comm_name(), async_op)


def _seconds(timeout: timedelta) -> float | None:
    # c10d encodes "not given" as zero or, in option objects, as minus one millisecond.
    value = timeout.total_seconds()
    return value if value > 0 else None


def translate_reduce_op(op: Any) -> tuple[ReduceOp, float | Tensor | None]:
    """c10d's ReduceOp as ours, with the factor of PREMUL_SUM.

    >>> translate_reduce_op(dist.ReduceOp.MAX)
    (<ReduceOp.MAX: 'max'>, None)
    """
    # The pickled state is the only way to read the factor in all supported versions of torch.
    kind, factor = (op, None) if isinstance(op, dist.ReduceOp.RedOpType) else op.__getstate__()
    try:
        return ReduceOp[kind.name], factor
    except KeyError:
        raise UsageError(
            f"c10d's ReduceOp {kind.name} is not supported. Pass one of {', '.join(o.name for o in ReduceOp)}."
        ) from None


@untraced
class OverGroup:
    """A gradwire group under torch's names, in whichever form: a process group, or the backend of one."""

    supports_time_estimate = _supports_time_estimate = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False

    def __init__(
        self, group: Group, devices: Sequence[str], backend_name: str, coalescing: list[list[Work]] | None = None
    ) -> None:
        """`coalescing` are the blocks that were begun, of a process group and its backend alike."""
        self.group = group
        self._devices = tuple(torch.device(device).type for device in devices)
        self._backend_name = backend_name
        self._parts: Counter[tuple[int, ...]] = Counter()
        self._sequence = 0
        self._coalescing: list[list[Work]] = [] if coalescing is None else coalescing
        self._dropped: deque[TorchWork] = deque(maxlen=KEPT)

    def submit(self, settings: Settings, *ops: Collective) -> TorchWork:
        """Submit collectives to the group: every method of c10d ends here."""
        works: list[Work] = []
        for op in ops:
            work: object = self.group.submit(op if settings.timeout is None else op.within(settings.timeout))
            if not isinstance(work, Work):
                raise UsageTypeError(
                    f"{op} on {self.group}: submit returned {work!r}, not a gradwire Work. "
                    f"{type(self.group).__name__}.submit must return the Work that begin(op) gave it."
                )
            self._sequence = work.seq + 1
            works.append(work)
        if self._coalescing:
            self._coalescing[-1] += works
        return TorchWork(*works, dropped=self._dropped)

    def getBackendName(self) -> str:
        """The backend's name in `dist.get_backend` and torch's logs; never "gloo" or "nccl"."""
        return self._backend_name

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.group.allocate(size, dtype=dtype, device=device)

    def supports_tensor_alloc(self, device: torch.device | int) -> bool:
        """True for the devices it serves: FSDP2 can then allocate its buffers from the group. C++ asks for a CUDA device."""
        return ("cuda" if isinstance(device, int) else device.type) in self._devices

    def _name_part(self, name: str, ranks: Sequence[int]) -> str:
        """The name of another subgroup of these ranks, of the group called `name`."""
        self._parts[tuple(ranks)] += 1
        return f"{name}/{'.'.join(map(str, ranks))}.{self._parts[tuple(ranks)]}"

    # -- lifetime ------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        self.group.abort("torch aborted the process group")

    def shutdown(self) -> None:
        """Close the group: what `dist.destroy_process_group` does last."""
        self._dropped.clear()
        self.group.close()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of operations submitted from now on."""
        self.group.set_timeout(timeout.total_seconds())

    _set_default_timeout = set_timeout

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """A no-op: `set_timeout` changes the timeout of operations. torch allows a group to ignore this."""

    def reconfigure(self, *args: object, **named: object) -> Any:
        """Not possible, under any of its three names: the members of a gradwire group are fixed."""
        raise UsageError(f"changing the ranks of {self.group}: its members are fixed. Make a new group over a store.")

    merge_remote_group = get_reconfigure_handle = reconfigure

    def new_window(self, tensor: Tensor | None = None) -> Any:
        """Not possible: there are no one-sided operations."""
        raise UsageError(f"new_window of {self.group}: it has no one-sided operations. Use send and recv.")

    # -- coalescing: operations start at once, and the end of the block returns one Work for all of them ------------------

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalescing.append([])

    def _end_coalescing(self, device: torch.device | None = None) -> Any:
        if not self._coalescing:
            raise UsageError(f"_end_coalescing on {self.group}: no block was started. Call _start_coalescing first.")
        works = self._coalescing.pop()
        return TorchWork(*works) if works else None

    # -- completion hooks and numbers ----------------------------------------------------------------------------------

    def _register_on_completion_hook(self, hook: Callable[[C10dWorkInfo], None]) -> Handle:
        """Call `hook(info)` once per finished operation, with c10d's WorkInfo. Any number of hooks; the Handle removes it."""
        if not callable(hook):
            raise UsageTypeError(f"completion hook of {self.group}: {hook!r} is not callable. Pass a function.")
        return self.group.on_completion(translate_hook(hook))

    def _has_hooks(self) -> bool:
        return bool(self.group.ledger.hooks)

    def _wait_for_pending_works(self) -> None:
        """Wait until operations in flight have finished and their hooks were called, at most until their deadlines."""
        for work in list(self.group.ledger.pending.values()):
            over = threading.Event()
            work.add_done_callback(lambda _, over=over: over.set())  # type: ignore[misc]
            over.wait(max(0.0, work.deadline - time.perf_counter()) + 1.0)  # the watchdog fails it at its deadline
        self.group.flush_completions()

    def _enable_collectives_timing(self) -> None:
        """A no-op: every operation is timed."""

    def _get_sequence_number_for_group(self) -> int:
        """One more than the number of the last operation that torch submitted."""
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """A no-op: every rank counts from 0."""
