"""`DivergenceCheck`: whether the replicas of a model are still equal, bit by bit, and if not, which rank is wrong.

Data-parallel ranks compute the same update from the same averages, so their parameters stay equal. A flipped bit in memory, a
faulty core, code that runs on one rank only, or a forgotten collective makes them differ, and nothing in training shows it.

Note [Digests]
A tensor is compared by a digest of 8 bytes of its bits, the same on the CPU and on a GPU, where it is computed without a copy to
the host. Each word of 64 bits, plus a multiple of its place, goes through the finalizer of splitmix64 (Steele, Lea, Flood: Fast
Splittable Pseudorandom Number Generators, 2014), and the results are added up. The finalizer is a bijection, so one flipped bit
cannot be missed; changes in several words cancel with a probability of about 2**-64. About 1 ms per MB on one core.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.errors import ReplicasDiverged, UsageError
from gradwire.groups.base import Group
from gradwire.interop import from_process_group
from gradwire.interop.default_group import default_process_group
from gradwire.parallel.module_state import broadcast_coalesced
from gradwire.parallel.trainable import check_module, refuse_dtensors
from gradwire.policies import Divergence, check_policies
from gradwire.reducer.checks.attached_optimizers import check_optimizer
from gradwire.reducer.hook.runner import HookRunner
from gradwire.reducer.rank_agreement import gather_rows
from gradwire.runtime.warnings import warn_user

_SHOWN = 3
"""How many tensors a message names."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that is not the same on all ranks."""

    name: str
    """A parameter, a buffer, or e.g. "exp_avg of fc.weight" in the optimizer's state."""
    ranks: tuple[int, ...]
    """The ranks whose bits are not those of the majority; all ranks if there is none."""
    source: int | None
    """The lowest rank of the majority: the largest set of ranks with the same bits. None for a tie."""


class DivergenceCheck:
    """Compares parameters over all ranks every `every` steps. Every rank makes one and calls `step` after the optimizer's.

    `group` is a gradwire Group or a torch process group; by default that of the model, else torch's default one. With `optimizer`,
    its state is compared, and healed, too. `buffers` names those that should be equal after a step; BatchNorm's statistics are not.

    On the wire: 24 bytes per rank; on a difference 8 more per tensor.

    >>> from gradwire.groups import ThreadGroup
    >>> (group,) = ThreadGroup.world(1)
    >>> check = DivergenceCheck(nn.Linear(2, 1), group, every=100)
    >>> check.step(), check.check()
    ([], [])
    >>> group.close()
    """

    def __init__(
        self,
        module: nn.Module,
        group: Any = None,
        *,
        every: int = 100,
        policy: Divergence = Divergence.RAISE,
        optimizer: torch.optim.Optimizer | None = None,
        buffers: Collection[str] = (),
    ) -> None:
        check_module("DivergenceCheck", module)
        check_policies(policy=(policy, Divergence))
        if every < 1:
            raise UsageError(f"DivergenceCheck(every={every}): it must be at least 1.")
        self._model = module
        self._module: nn.Module = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
        refuse_dtensors("comparing", self._module, ())
        unknown = sorted(set(buffers) - {name for name, _ in self._module.named_buffers()})
        if unknown or isinstance(buffers, str):
            raise UsageError(
                f"DivergenceCheck(buffers={buffers!r}): {', '.join(unknown)}: the model has no such buffer."
            )
        if optimizer is not None:
            check_optimizer(
                f"DivergenceCheck(optimizer={type(optimizer).__name__})",
                optimizer,
                self._module.parameters(),
                without="Leave it out to compare parameters alone.",
            )
        self.group = _group_of(module, group)
        self.every = every
        self.policy = policy
        self.steps = 0
        """How many times `step` was called."""
        self._optimizer = optimizer
        self._buffers = frozenset(buffers)
        self._due = False
        self._shown = False

    def step(self) -> list[Difference]:
        """Count a step, and check if it is due. While a hook such as `diloco` lets ranks differ, the check is put off."""
        self.steps += 1
        self._due = self._due or self.steps % self.every == 0
        replica = getattr(self._model, "replica", None) or getattr(self._model, "_gradwire_replica", None)
        if not self._due or getattr(getattr(replica, "runner", None), "differ", False):
            return []
        self._due = False
        return self.check()

    @torch.no_grad()
    def check(self) -> list[Difference]:
        """Compare now; every rank calls it. Returns what differed, after it was recorded or healed; or raises, on every rank."""
        found = self._compare()
        if not found:
            return []
        healed = self.policy is Divergence.HEAL and all(one.source is not None for one in found)
        error = self._error(found, healed=healed)
        self.group.ledger.events.warn(str(error), step=self.steps - 1)
        if healed:
            self._heal(found)
        elif self.policy is not Divergence.RECORD:
            raise error
        if not self._shown and self.group.rank == 0:
            warn_user(f"{error} Later ones are recorded only.")
        self._shown = True
        return found

    def _tensors(self) -> dict[str, Tensor]:
        names = {id(p): name for name, p in self._module.named_parameters()}
        tensors: dict[str, Tensor] = dict(self._module.named_parameters())
        tensors |= {name: b for name, b in self._module.named_buffers() if name in self._buffers}
        if self._optimizer is not None:
            for number, p in enumerate(p for g in self._optimizer.param_groups for p in g["params"]):
                name = names.get(id(p), f"parameter {number}")
                state = sorted(self._optimizer.state.get(p, {}).items())
                tensors |= {f"{key} of {name}": v for key, v in state if isinstance(v, Tensor)}
        return tensors

    def _compare(self) -> list[Difference]:
        tensors = self._tensors()
        device = next(iter(tensors.values()), torch.empty(0)).device
        mine = digests(list(tensors.values()), device)
        text = "\n".join(f"{name} {t.dtype} {list(t.shape)}" for name, t in tensors.items()).encode()
        names = torch.frombuffer(bytearray(text or b" "), dtype=torch.uint8)
        rows = self._gather(torch.stack([digest(mine), mine.new_tensor(len(tensors)), digest(names).to(device)]))
        if all(row == rows[0] for row in rows):
            return []
        if any(row[1:] != rows[0][1:] for row in rows):
            raise self._of_different_tensors(rows)
        by_rank = self._gather(mine)
        found = []
        for number, name in enumerate(tensors):
            values = [row[number] for row in by_rank]
            if len(set(values)) > 1:
                source, others = _majority(values)
                found.append(Difference(name, others, source))
        return found

    def _gather(self, mine: Tensor) -> list[list[int]]:
        rows: list[list[int]] = gather_rows(self.group, mine, label="digests of parameters").tolist()
        return rows

    def _of_different_tensors(self, rows: Sequence[Sequence[int]]) -> ReplicasDiverged:
        majority = _majority([str(row[1:]) for row in rows])
        text = f"comparing replicas after {_steps(self.steps)}: ranks do not have the same tensors: "
        text += ", ".join(f"rank {rank} {row[1]}" for rank, row in enumerate(rows))
        text += ". Their optimizers have made different steps, or their models are different."
        return ReplicasDiverged(text, ranks=majority[1], tie=majority[0] is None, step=self.steps)

    def _error(self, found: Sequence[Difference], *, healed: bool) -> ReplicasDiverged:
        ranks = sorted({rank for one in found for rank in one.ranks})
        tie = any(one.source is None for one in found)
        named = ", ".join(one.name for one in found[:_SHOWN])
        more = f" and {len(found) - _SHOWN} more tensors" if len(found) > _SHOWN else ""
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        text = f"comparing replicas after {_steps(self.steps)}: {who} "
        if tie:
            text += f"differ in {named}{more}, and no value has a majority, so it is not known which rank is wrong. "
        else:
            text += f"differ{'' if len(ranks) > 1 else 's'} from the majority in {named}{more}. "
        if healed:
            text += "It was copied from a rank of the majority. If it happens again, suspect the machine of that rank."
        elif self.policy is Divergence.RECORD:
            text += "Training continues with different replicas."
        else:
            text += "Load a checkpoint, and look for code that runs on one rank only. If there is none, suspect its machine."
        return ReplicasDiverged(
            text, ranks=tuple(ranks), parameters=tuple(one.name for one in found), tie=tie, step=self.steps
        )

    def _heal(self, found: Sequence[Difference]) -> None:
        """Copy every tensor that differs from a rank of its majority, and compare again."""
        tensors = self._tensors()
        device = next(iter(tensors.values()), torch.empty(0)).device
        for source in sorted({one.source for one in found if one.source is not None}):
            wrong = [tensors[one.name] for one in found if one.source == source]
            # A counter of an optimizer may be on the host, where a group of GPUs cannot send it from.
            sent = [t if t.device.type == device.type else t.to(device) for t in wrong]
            broadcast_coalesced(self.group, sent, src=source)
            for t, received in zip(wrong, sent, strict=True):
                if t is not received:
                    t.copy_(received)
        left = self._compare()
        if left:
            raise self._error(left, healed=False)


class DivergenceSchedule:
    """Checks a replicated model every so many steps, if any, as `gradwire run --check-divergence` asks for."""

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._last = 0
        """After how many steps the model was checked last."""

    def before_forward(self, module: nn.Module, runner: HookRunner, *, steps: int, sync: bool) -> None:
        """Check if it is due and a backward follows that is averaged: there all ranks have made the same steps."""
        if not self._every or steps % self._every or steps == self._last or not (sync and torch.is_grad_enabled()):
            return
        if module.training and not runner.uneven and not runner.differ:
            self._last = steps
            check = DivergenceCheck(module, runner.group)
            check.steps = steps
            check.check()


def _steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"


def _majority(values: Sequence[int | str]) -> tuple[int | None, tuple[int, ...]]:
    """The lowest rank with the most frequent value, and the ranks with another; None and all ranks if several are as frequent.

    >>> _majority([7, 7, 8]), _majority([7, 8])
    ((0, (2,)), (None, (0, 1)))
    """
    (most, count), *others = Counter(values).most_common(2)
    if others and others[0][1] == count:
        return None, tuple(range(len(values)))
    return values.index(most), tuple(rank for rank, value in enumerate(values) if value != most)


def _group_of(module: nn.Module, group: Any) -> Group:
    if group is None:
        group = getattr(module, "group", None)
    if isinstance(group, Group):
        return group
    if group is None:
        group = default_process_group(instead="DivergenceCheck(model, group)")
    return from_process_group(group)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))
_CPU_CHUNK, _GPU_CHUNK = 1 << 16, 1 << 22
"""Words that are mixed at a time: on the CPU, as many as stay in its cache; on a GPU, enough to keep it busy."""


@torch.no_grad()
def digest(t: Tensor) -> Tensor:
    """The digest of all elements, in the order of the shape, whatever their order in memory: an int64 on the tensor's device.

    >>> a = torch.zeros(3)
    >>> bool(digest(a) == digest(torch.zeros(3))), bool(digest(a) == digest(-a))
    (True, False)
    """
    if t.layout is not torch.strided or t.is_meta:
        raise UsageError(
            f"digest of a {'meta' if t.is_meta else t.layout} tensor: it has no bytes that could be compared."
        )
    data = t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()  # words must be aligned
    whole = data.numel() // 8
    total = torch.full((1,), _signed(_GOLDEN), dtype=torch.int64, device=t.device) * (data.numel() + 1)
    _mix_(total)
    chunk = min(whole, _CPU_CHUNK if t.device.type == "cpu" else _GPU_CHUNK)
    if whole:
        places = torch.arange(1, chunk + 1, device=t.device) * _signed(_GOLDEN)
        for number, words in enumerate(data[: 8 * whole].view(torch.int64).split(chunk)):
            shift = _signed(number * chunk * _GOLDEN % (1 << 64))
            total += _mix_((words + places[: words.numel()]).add_(shift)).sum()
    if data.numel() % 8:
        last = torch.zeros(8, dtype=torch.uint8, device=t.device)
        last[: data.numel() % 8] = data[8 * whole :]
        total += _mix_(last.view(torch.int64) + _signed((whole + 1) * _GOLDEN % (1 << 64)))
    return total[0]


def digests(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    if not tensors:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.stack([digest(t).to(device) for t in tensors])


def _mix_(z: Tensor) -> Tensor:
    """The finalizer of splitmix64, in place. Integers wrap around, and shifts of int64 keep the sign, which is masked."""
    for bits, factor in _ROUNDS:
        z.bitwise_xor_((z >> bits).bitwise_and_((1 << (64 - bits)) - 1))
        if factor != 1:
            z.mul_(factor)
    return z
