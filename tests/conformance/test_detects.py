"""The suite finds what is wrong: groups with one fault each, and the check that must see it."""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from gradwire.collectives import Collective, OpKind, ReduceOp
from gradwire.errors import ClosedError, GroupError, UsageError
from gradwire.events import CollectiveFinished
from gradwire.groups import Group, GroupWrapper, ThreadGroup, Work, WorkInfo
from gradwire.groups.ledger import Ledger
from gradwire.testing import run_ranks
from gradwire.testing.conformance import ConformanceError, Failure, Report, check_group, check_names, lifecycle


class Faulty(GroupWrapper):
    """A group with a fault: each subclass breaks one thing."""


class OffByOne(Faulty):
    def submit(self, op: Collective) -> Work:
        work = super().submit(op)
        if op.kind is OpKind.ALL_REDUCE and op.outputs[0].numel() == 7:
            work.wait()
            with torch.no_grad():
                op.outputs[0].view(-1)[-1:].fill_(1)
        return work


class RanksDiffer(Faulty):
    def submit(self, op: Collective) -> Work:
        work = super().submit(op)
        if op.reduce_op is ReduceOp.AVG and op.outputs[0].dtype is torch.float32:
            work.wait()
            op.outputs[0].mul_(1 + self.rank * 2**-23)
        return work


class WritesInputs(Faulty):
    def submit(self, op: Collective) -> Work:
        work = super().submit(op)
        if op.kind is OpKind.ALL_GATHER:
            work.wait()
            op.inputs[0].detach().zero_()
        return work


class WritesOffTheRoot(Faulty):
    def submit(self, op: Collective) -> Work:
        work = super().submit(op)
        if op.kind is OpKind.REDUCE and self.rank != op.root:
            work.wait()
            op.outputs[0].detach().zero_()
        return work


class WritesGaps(Faulty):
    def submit(self, op: Collective) -> Work:
        work = super().submit(op)
        for t in op.outputs:
            if t.dim() == 1 and t.stride() == (2,):
                work.wait()
                t.detach().as_strided((t.numel() * 2 - 1,), (1,))[1::2].zero_()
        return work


class WritesFirst(Faulty):
    def submit(self, op: Collective) -> Work:
        if op.kind is OpKind.ALL_TO_ALL_SINGLE:
            op.outputs[0].detach().zero_()
        return super().submit(op)


class IgnoresFactors(Faulty):
    def submit(self, op: Collective) -> Work:
        if op.reduce_op is ReduceOp.PREMUL_SUM:
            op = replace(op, reduce_op=ReduceOp.SUM, factor=None)
        return super().submit(op)


class WrongSource(Faulty):
    def submit(self, op: Collective) -> Work:
        work = super().submit(op)
        if op.kind is OpKind.RECV and op.peer is None:
            work.wait()
            work.source = (work.source_rank() + 1) % self.size
        return work


class IgnoresTags(Faulty):
    def submit(self, op: Collective) -> Work:
        return super().submit(replace(op, tag=0))


class LosesLabels(Faulty):
    def submit(self, op: Collective) -> Work:
        return super().submit(replace(op, label=""))


class Blocks(Faulty):
    def submit(self, op: Collective) -> Work:
        work = super().submit(op)
        if op.kind is OpKind.BARRIER:
            work.limit(0.5)
            work.wait()
        return work


class IgnoresKeys(Faulty):
    def split(self, color: int | None, key: int | None = None) -> Group | None:
        return super().split(color, None)


class NoneIsAColor(Faulty):
    def split(self, color: int | None, key: int | None = None) -> Group | None:
        return super().split(0 if color is None else color, key)


class HooksTwice(Faulty):
    def on_completion(self, fn: Callable[[WorkInfo], None]) -> object:  # type: ignore[override]
        super().on_completion(fn)
        return super().on_completion(fn)


class HooksInline(Faulty):
    def __init__(self, inner: Group) -> None:
        super().__init__(inner)
        self.ledger.hooks.put = lambda info: [fn(info) for fn in self.ledger.hooks._hooks]  # type: ignore[method-assign]


class SwallowsHookErrors(Faulty):
    def submit(self, op: Collective) -> Work:
        self.ledger.hook_errors.clear()
        work = super().submit(op)
        work.wait = lambda timeout=None: (self.ledger.hook_errors.clear(), Work.wait(work, timeout))[1]  # type: ignore[method-assign]
        return work


class FinishesTwice(Faulty):
    def submit(self, op: Collective) -> Work:
        work = super().submit(op)
        if self.events and work.is_completed():
            facts = (work.finished or 0.0, self.ledger.name, self.rank, work.seq, op.kind.value, op.label, op.nbytes)
            self.events.emit(CollectiveFinished(*facts, duration=0.0))
        return work


class ForgetsDeadlines(Faulty):
    def submit(self, op: Collective) -> Work:
        work = super().submit(replace(op, timeout=None))
        work.limit = lambda timeout: None  # type: ignore[method-assign]
        if op.label == "unwatched":
            work.ledger.pending.pop(work.seq, None)
        return work


class HidesTheMissing(Faulty):
    def __init__(self, inner: Group) -> None:
        super().__init__(inner)
        self.ledger.arrivals = lambda work: None


class NewErrorEachTime(Faulty):
    def submit(self, op: Collective) -> Work:
        work = super().submit(op)

        def wait(timeout: float | None = None) -> bool:
            try:
                return Work.wait(work, timeout)
            except GroupError as error:
                raise type(error)(str(error), op=work.op.signature) from None  # type: ignore[call-arg]

        work.wait = wait  # type: ignore[method-assign, assignment]
        return work


class AbortsQuietly(Faulty):
    def abort(self, reason: str = "") -> None:
        pass


class ClosesForGood(Faulty):
    def close(self, timeout: float = 5.0) -> None:
        if self.closed:
            raise ClosedError("closed before")
        super().close(timeout)


class OpenAfterClose(Faulty):
    def submit(self, op: Collective) -> Work:
        return Work(op, self.ledger, seq=0, timeout=1.0) if self.closed else super().submit(op)


class WrongMemory(Faulty):
    def allocate(self, numel: int, *, dtype: torch.dtype = torch.float32, device: object = "cpu") -> torch.Tensor:  # type: ignore[override]
        return torch.empty(numel)


class SharedMemoryByMistake(Faulty):
    def __init__(self, inner: Group) -> None:
        super().__init__(inner)
        self.memory = torch.empty(1000)

    def allocate(self, numel: int, *, dtype: torch.dtype = torch.float32, device: object = "cpu") -> torch.Tensor:  # type: ignore[override]
        return self.memory[:numel] if dtype is torch.float32 else torch.empty(numel, dtype=dtype)


class ChecksNothing(Faulty):
    def submit(self, op: Collective) -> Work:
        try:
            return super().submit(op)
        except UsageError as error:
            if isinstance(error, ClosedError):
                raise
            work = Work(op, self.ledger, seq=0, timeout=1.0)
            work.finish()
            return work


class RaisesItsOwn(Faulty):
    def submit(self, op: Collective) -> Work:
        if op.label == "which?":
            raise KeyError("sizes differ")
        return super().submit(op)


class Detaches(Faulty):
    def submit(self, op: Collective) -> Work:
        for t in op.outputs:
            if isinstance(t, torch.nn.Parameter):
                t.requires_grad_(False)
        return super().submit(op)


class WritesInItsOwnMode(Faulty):
    def submit(self, op: Collective) -> Work:
        with torch.inference_mode(False):
            for t in op.outputs:
                t.detach().view(-1)[:0].zero_()
        return super().submit(op)


class AbandonsWhenDropped(Faulty):
    def __init__(self, inner: Group) -> None:
        super().__init__(inner)
        weakref.finalize(self, _abandon, self.ledger).atexit = False


def _abandon(ledger: Ledger) -> None:
    for work in list(ledger.pending.values()):
        work.fail(GroupError("the group was dropped"))


class WaitsForNobody(Faulty):
    def submit(self, op: Collective) -> Work:
        if op.label == "from anyone":
            return Work(op, self.ledger, seq=0, timeout=op.timeout or 1.0)
        return super().submit(op)


FAULTS: list[tuple[type[Faulty], str]] = [
    (OffByOne, "all_reduce_ops"),
    (RanksDiffer, "all_reduce_same_bits"),
    (WritesInputs, "all_gather"),
    (WritesOffTheRoot, "reduce"),
    (WritesGaps, "gaps"),
    (WritesFirst, "aliasing"),
    (IgnoresFactors, "premul_sum"),
    (WrongSource, "recv_any"),
    (IgnoresTags, "send_recv_tags"),
    (LosesLabels, "hooks_once"),
    (LosesLabels, "events"),
    (LosesLabels, "wait_timeout"),
    (LosesLabels, "deadline"),
    (Blocks, "barrier"),
    (IgnoresKeys, "split_key"),
    (NoneIsAColor, "split_none"),
    (HooksTwice, "hooks_once"),
    (HooksInline, "hooks_once"),
    (SwallowsHookErrors, "hook_raising"),
    (FinishesTwice, "events"),
    (ForgetsDeadlines, "deadline_unwatched"),
    (HidesTheMissing, "deadline"),
    (HidesTheMissing, "missing_rank"),
    (NewErrorEachTime, "deadline"),
    (AbortsQuietly, "abort"),
    (ClosesForGood, "close"),
    (OpenAfterClose, "close"),
    (WrongMemory, "allocate"),
    (SharedMemoryByMistake, "allocate"),
    (ChecksNothing, "usage_errors"),
    (RaisesItsOwn, "mismatch"),
    (Detaches, "leaves"),
    (WritesInItsOwnMode, "inference_tensors"),
]


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_a_fault_is_found(fault: type[Faulty], check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "SOON", 1.0)  # what these groups never do is not awaited for long
    # Without an abort that wakes them, ranks end by the check's own deadlines, after 10 s or more.
    timeout = 60.0 if fault is AbortsQuietly else 8.0
    with pytest.raises(ConformanceError) as caught:
        check_group(lambda fn: run_ranks(fn, 3, timeout=timeout, wrap=fault), only=[check])
    assert {failure.check for failure in caught.value.failures} == {check}
    assert f"  {check}" in str(caught.value)


@pytest.mark.parametrize("kind", ["threads", "shared_memory", "gloo"])
@pytest.mark.parametrize(
    ("fault", "check"), [(AbandonsWhenDropped, "dropped_group"), (WaitsForNobody, "recv_any_alone")]
)
def test_a_fault_is_found_on_every_kind(fault: type[Faulty], check: str, kind: str) -> None:
    """Those of what a group does when it, or everybody else, is gone."""
    with pytest.raises(ConformanceError) as caught:
        check_group(lambda fn: run_ranks(fn, 3, kind=kind, timeout=30.0, wrap=fault), only=[check])
    assert {failure.check for failure in caught.value.failures} == {check}


def test_the_faultless_wrapper_passes() -> None:
    """The faults above are found because of the fault, not because of the wrapper."""
    assert check_group(lambda fn: run_ranks(fn, 3, wrap=Faulty)).ran == check_names()


def test_a_broken_world_ends_the_shared_run_and_says_what_was_not_reached() -> None:
    class Broken(Faulty):
        def submit(self, op: Collective) -> Work:
            if op.kind is OpKind.GATHER and self.rank == 1:
                raise OSError("the cable is out")
            return super().submit(op)

    with pytest.raises(ConformanceError, match="the cable is out") as caught:
        check_group(
            lambda fn: run_ranks(fn, 3, timeout=8.0, wrap=Broken), only=["broadcast", "gather", "scatter", "close"]
        )
    error = caught.value
    assert Failure("gather", 1, "it raised OSError at compare.py") in [
        replace(failure, problem=failure.problem.partition(":")[0]) for failure in error.failures
    ]
    assert {failure.check for failure in error.failures} == {"gather"}
    assert error.unreached == ("scatter", "close")
    assert "not reached" in str(error)


def test_a_world_that_cannot_be_made_is_a_failure() -> None:
    def no_world(fn: Callable[[Group], object]) -> list[object]:
        raise OSError("no room")

    with pytest.raises(ConformanceError, match="make_world raised OSError: no room"):
        check_group(no_world, only=["split"])


def test_make_world_must_return_what_the_function_returned() -> None:
    with pytest.raises(UsageError, match="in rank order"):
        check_group(lambda fn: [None], only=["split"])


def test_unknown_checks_are_refused() -> None:
    with pytest.raises(UsageError, match="all_reduce_ops"):
        check_group(lambda fn: [], only=["no such check"])


def test_the_report_lists_what_ran_and_what_needs_more_ranks() -> None:
    def alone(fn: Callable[[Group], object]) -> list[object]:
        with ThreadGroup.world(1)[0] as group:
            return [fn(group)]

    report = check_group(alone, only=["split", "send_recv", "abort"])
    assert isinstance(report, Report)
    assert (report.size, report.ran, report.skipped) == (1, ("split",), ("send_recv", "abort"))
    assert "1 check passed on 1 rank in" in str(report)
    assert "send_recv" in str(report)


def test_the_error_shows_a_few_of_many_and_holds_all() -> None:
    failures = [Failure("split", rank, "wrong") for rank in range(20)]
    error = ConformanceError(failures, ["close"])
    assert "split: and 15 more" in str(error)
    assert error.failures == tuple(failures)
    assert isinstance(error, AssertionError)


def test_names_are_unique_and_every_check_has_a_description() -> None:
    from gradwire.testing.conformance.suite import CHECKS

    assert check_names() == tuple(CHECKS)
    assert len(CHECKS) > 50
    assert all(check.run.__doc__ for check in CHECKS.values())


def test_what_ranks_run_can_be_pickled() -> None:
    import pickle

    from gradwire.testing.conformance.suite import Visit

    visit = pickle.loads(pickle.dumps(Visit(("split",))))
    with ThreadGroup.world(1)[0] as group:
        outcome = visit(group)
    assert pickle.loads(pickle.dumps(outcome)) == outcome
    assert outcome.ran == ("split",)


@dataclass
class _Count:
    """Counts the worlds that were made."""

    worlds: int = 0


def test_destructive_checks_get_a_world_each_and_the_others_share_one() -> None:
    count, lock = _Count(), threading.Lock()

    def make_world(fn: Callable[[Group], object]) -> list[object]:
        with lock:
            count.worlds += 1
        return run_ranks(fn, 2)

    check_group(make_world, only=["split", "gaps", "barrier", "close", "abort"])
    assert count.worlds == 3


def test_without_subgroups_only_the_checks_that_need_them_fail() -> None:
    class Whole(Faulty):
        split, subgroup = Group.split, Group.subgroup

    with pytest.raises(ConformanceError, match="Whole does not make subgroups") as caught:
        check_group(lambda fn: run_ranks(fn, 2, wrap=Whole))
    assert {failure.problem.partition(" at ")[0] for failure in caught.value.failures} == {"it raised NoSubgroups"}
    assert caught.value.unreached == ()


def test_a_check_goes_on_after_a_wrong_value() -> None:
    """All wrong values of a check are found, not only the first, and later checks in the same world still run."""

    class Wrong(Faulty):
        def submit(self, op: Collective) -> Work:
            work = super().submit(op)
            if op.kind is OpKind.BROADCAST and self.rank == 1 and op.outputs[0].numel():
                work.wait()
                op.outputs[0].detach().fill_(0)
            return work

    with pytest.raises(ConformanceError) as caught:
        check_group(lambda fn: run_ranks(fn, 3, wrap=Wrong), only=["broadcast", "gaps", "scatter"])
    assert {failure.check for failure in caught.value.failures} == {"broadcast"}
    assert len(caught.value.failures) > 10
    assert {failure.rank for failure in caught.value.failures} == {1}
    assert caught.value.unreached == ()
