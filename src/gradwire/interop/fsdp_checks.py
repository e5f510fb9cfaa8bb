"""Checks of what hooks reduce inside FSDP: whether it is finite, decided by all ranks together when backward has ended.

A NaN in one shard is on no rank that holds the others, so all ranks that train the model exchange 8 bytes at the end of each
backward. Everything is examined when the hook of its module runs, because FSDP frees what was reduced; only what was found is kept.
FSDP queues its own end of backward before any hook runs, so it has ended when the check begins.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.autograd.backward_end import at_backward_end
from gradwire.errors import UsageError, UsageTypeError
from gradwire.groups.base import Group
from gradwire.hooks.bucket import BucketSpec, GradBucket
from gradwire.policies import NonFinite, check_policies
from gradwire.reducer.checks import nonfinite_report
from gradwire.reducer.checks.nonfinite_search import Found, Look, Search, examine, narrowest
from gradwire.reducer.hook.hook_states import StepFork
from gradwire.reducer.hook.runner import HookRunner


@dataclass(frozen=True, slots=True)
class CheckedModule:
    """The hook of one FSDP module."""

    runner: HookRunner
    first: int
    """The number of its first parameter in the model."""
    row: int
    """The number that stands for a row without names: see Note [What a shard's bucket is] in fsdp.py."""
    parameters: Sequence[Tensor]
    advice: str


class FsdpChecks:
    """Checks the gradients of one FSDP model for NaN and infinity: pass it to the hooks of all its modules, as `checks`.

    `group` is of all ranks that train the model, shards and replicas. Ranks exchange 8 bytes at the end of each backward.
    """

    def __init__(self, group: Group, *, nonfinite: NonFinite) -> None:
        if not isinstance(group, Group):
            raise UsageTypeError(
                f"FsdpChecks({group!r}): not a gradwire Group. Pass that of all ranks: gw.from_process_group(dist.group.WORLD)."
            )
        check_policies(nonfinite=(nonfinite, NonFinite))
        self._group = group
        self._policy = nonfinite
        self._handler = nonfinite_report.NonFiniteHandler(nonfinite)
        self._modules: list[CheckedModule] = []
        self._names: list[str] = []
        self._shapes: list[tuple[int, ...]] = []
        self._steps = -1
        self._runs = False
        self._forks: list[StepFork] = []
        self._forget()

    def add(
        self,
        runner: HookRunner,
        parts: Sequence[tuple[str, tuple[int, ...]]],
        parameters: Sequence[Tensor],
        advice: str,
    ) -> CheckedModule:
        """Check the hook of one more module, on these parts of its parameters."""
        if not parts:
            raise UsageError("FsdpChecks: errors name parameters. Pass named_parameters to each hook.")
        first = len(self._names)
        for name, shape in (*parts, (f"{parts[0][0]} or another parameter of its module", (0,))):
            self._names.append(name)
            self._shapes.append(shape)
        self._modules.append(CheckedModule(runner, first, first + len(parts), parameters, advice))
        return self._modules[-1]

    def run(
        self,
        module: CheckedModule,
        bucket: GradBucket,
        reduce: Callable[[GradBucket], Tensor],
        result_spec: BucketSpec,
        *,
        is_named: bool,
    ) -> Tensor:
        """Reduce a bucket of `module`, and examine it before and after. The result consists of the parameters of `result_spec`."""
        if self._policy is NonFinite.PASS:
            return reduce(bucket)
        spec = bucket.spec
        if not self._runs:  # the first one of a backward
            self._runs = True
            self._device = spec.device
            at_backward_end(self._ended, failed=self._forget)
            for fork in self._forks:
                fork.commit()  # of a backward that has failed
            may_drop = self._policy is not NonFinite.RECORD
            self._forks = [one.runner.states.fork() for one in self._modules if may_drop]
        search, first, hook = Search(spec.names), module.first if is_named else module.row, module.runner.hook
        before = search.before(bucket, narrowest(hook if hook.passes_nonfinite else None, spec.dtype))
        result = reduce(bucket)
        # An average may be overwritten too, so it is examined now.
        after = search.before(GradBucket(result_spec, result.reshape(-1), (), is_last=True), None)
        self._seen += [(before, first, False), (after, first, True)]
        return result

    def _forget(self) -> None:
        """No backward runs, or the last one has failed."""
        self._runs = False
        self._device = torch.device("cpu")
        self._seen: list[tuple[Look, int, bool]] = []
        """What was examined, the number of its first parameter in the model, and whether it is an average."""

    def _ended(self) -> None:
        seen, device = self._seen, self._device
        self._forget()
        self._steps += 1
        report = self._report(seen, device)
        rejected = None if report is None else self._handler.handle(report, self._group)
        for fork in self._forks:
            (fork.commit if rejected is None else fork.drop)()
        for module in self._modules:
            for parameter in module.parameters if isinstance(rejected, nonfinite_report.StepSkipped) else ():
                parameter.grad = None
        if rejected is not None and not isinstance(rejected, nonfinite_report.StepSkipped):
            raise rejected.error

    def _report(
        self, seen: Sequence[tuple[Look, int, bool]], device: torch.device
    ) -> nonfinite_report.NonFiniteReport | None:
        gradients: list[Found] = []
        averages: list[Found] = []
        for (_, first, is_average), found in zip(seen, examine([look for look, _, _ in seen]), strict=True):
            whole = [each._replace(parameter=each.parameter + first) for each in found]
            (averages if is_average else gradients).extend(whole)
        if not nonfinite_report.any_rank(bool(gradients or averages), self._group, device):
            return None
        findings = nonfinite_report.exchange(self._group, gradients, averages, device=device)
        module = self._module_of(findings)
        return nonfinite_report.NonFiniteReport(
            findings,
            self._names,
            self._shapes,
            hook=module.runner.name,
            averages_only=module.runner.hook.passes_nonfinite,
            step=self._steps,
            in_grads=True,
            advice=module.advice,
        )

    def _module_of(self, findings: Sequence[nonfinite_report.RankFindings]) -> CheckedModule:
        """The module that the report is about."""
        found = [one.gradient for one in findings if one.gradient] or [one.average for one in findings if one.average]
        firsts = [module.first for module in self._modules]
        return self._modules[bisect.bisect(firsts, found[0].parameter) - 1]
