"""Process groups written in Python by users: few collectives, every form of Work, torch's own test doubles.

What a group lacks is composed of what its class overrides; `gw.DistributedDataParallel` over it gives what torch's gives.
"""

import copy
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, _create_work_from_future
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire as gw
from gradwire.collectives import OpKind, build
from gradwire.collectives.timeouts import wait_seconds
from gradwire.errors import GroupError, UsageError
from gradwire.groups import C10dGroup, Group, GroupWrapper
from gradwire.groups.c10d.capabilities import METHODS, find_engine, own_methods
from gradwire.testing import check_group, check_names, run_ranks
from helpers.futures import done
from helpers.warm_python import WarmPython


class FinishedWork(dist.Work):
    """The two methods that torch calls, as in torch's own test of Python groups: `wait` needs its argument."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.future = done(result)

    def wait(self, timeout: timedelta) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        return self.future


class WaitOnly(dist.Work):
    """No future: enough for everything in torch but DDP's reducer."""

    def __init__(self, result: Any) -> None:
        super().__init__()

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class FutureOnly(dist.Work):
    """No wait: enough for DDP's reducer."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.future: Future[Any] = Future()
        threading.Timer(0.01, self.future.set_result, (result,)).start()

    def get_future(self) -> Future[Any]:
        return self.future


class Duck:
    """Not a Work at all, and `wait` takes no time-out."""

    def __init__(self, result: Any) -> None:
        self.future = done(result)

    def wait(self) -> None:
        pass

    def get_future(self) -> Future[Any]:
        return self.future


def from_future(result: Any) -> dist.Work:
    """What torch offers to groups without a Work of their own."""
    return _create_work_from_future(done(result))


def from_later_future(result: Any) -> dist.Work:
    """The same, over after a while."""
    future: Future[Any] = Future()
    threading.Timer(0.01, future.set_result, (result,)).start()
    return _create_work_from_future(future)


MakeWork = Callable[[Any], Any]
WORKS: list[MakeWork] = [FinishedWork, WaitOnly, FutureOnly, Duck, from_future, from_later_future]


class Base(dist.ProcessGroup):
    """Keeps a log of what was called. Sums, and nothing else; bytes of any kind are moved."""

    def __init__(self, group: Group, work: MakeWork = FinishedWork) -> None:
        super().__init__(group.rank, group.size)
        self.inner = group
        self.work = work
        self.calls: list[str] = []

    def getBackendName(self) -> str:
        return "minimal"


class Reduces(Base):
    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        self.calls.append("allreduce")
        if opts.reduceOp != dist.ReduceOp.SUM:
            raise RuntimeError(f"only sums, not {opts.reduceOp}")
        self.inner.all_reduce(tensors)
        return self.work(tensors)


class Broadcasts(Base):
    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        self.calls.append("broadcast")
        self.inner.broadcast(tensors, src=opts.rootRank)
        return self.work(tensors)


class Gathers(Base):
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        self.calls.append("allgather")
        self.inner.all_gather(outputs[0], inputs[0])
        return self.work(outputs)


class OnlyReduces(Reduces):
    """One collective."""


class Two(Reduces, Broadcasts):
    """What DDP needs after construction."""


class Three(Reduces, Broadcasts, Gathers):
    """What DDP needs."""


class OnlyGathers(Gathers):
    """No reduction: it is made of what all have."""


class GathersIntoTensors(Reduces, Broadcasts):
    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        self.calls.append("_allgather_base")
        self.inner.all_gather_into_tensor(output, input)
        return self.work([output])


class NewNames(Reduces, Broadcasts):
    """torch 2.13's names."""

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        self.calls.append("all_gather_single")
        self.inner.all_gather_into_tensor(output, input)
        return self.work([output])


class Stubs(Three):
    """Like torchft's base class: everything is there, and most of it raises."""

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no _allgather_base")

    def alltoall_base(self, *args: Any) -> Any:
        raise NotImplementedError("not implemented")


MINIMAL: list[type[Base]] = [OnlyReduces, Two, Three, OnlyGathers, GathersIntoTensors, NewNames, Stubs]


class OverPython(GroupWrapper):
    """A C10dGroup over a process group written in Python over the group, which it closes too."""

    cls: type[Base] = Three
    in_one_process = True  # type: ignore[assignment]

    def __init__(self, group: Group) -> None:
        super().__init__(C10dGroup(self.cls(group), timeout=group.timeout))
        self.far = group

    def split(self, color: int | None, key: int | None = None) -> Group | None:
        part = self.far.split(color, key)
        return None if part is None else type(self)(part)

    def close(self, timeout: float = 5.0) -> None:
        wait_seconds("close", timeout)  # a mistake closes nothing
        if not self.ledger.pending:
            self.far.close(timeout=0)  # what has timed out is still in a method of the process group
        super().close(timeout)
        self.far.close(timeout=0)


LACKING = frozenset(name for name in check_names() if name.startswith(("send", "recv", "split", "forked")))
"""A message between two ranks, of which a forked child is told too, cannot be made of collectives of all; and only an engine can be
split."""


def over(cls: type[Base]) -> type[OverPython]:
    return type("Over" + cls.__name__, (OverPython,), {"cls": cls})


@pytest.mark.parametrize("cls", [OnlyReduces, Three], ids=lambda cls: cls.__name__)
def test_conformance(cls: type[Base]) -> None:
    names = tuple(name for name in check_names() if name not in LACKING)
    report = check_group(lambda fn: run_ranks(fn, 3, kind="threads", wrap=over(cls)), only=names)
    assert report.ran == names


KINDS = (
    "all_reduce_sizes", "reduce", "reduce_scatter_tensor", "broadcast", "all_gather", "all_gather_into_tensor", "all_to_all",
    "all_to_all_single", "gather", "scatter",
)  # fmt: skip
"""One check for each kind, with every dtype. `test_conformance` has classes with the least and with the most, on all checks;
`lower` makes the same of what the others' reductions and tensors are."""


@pytest.mark.parametrize(
    "cls", [cls for cls in MINIMAL if cls not in (OnlyReduces, Three)], ids=lambda cls: cls.__name__
)
def test_every_collective_is_composed_of_the_few(cls: type[Base]) -> None:
    only = ("all_reduce_ops", *KINDS) if cls is OnlyGathers else KINDS  # which has no reduction at all
    report = check_group(lambda fn: run_ranks(fn, 3, kind="threads", wrap=over(cls)), only=only)
    assert report.ran == only


def all_gather(group: Group, *, cls: type[Base]) -> tuple[list[str], list[int]]:
    pg = cls(group)
    outputs = [torch.empty(2, dtype=torch.int64) for _ in range(group.size)]
    with gw.from_process_group(pg) as over:
        over.all_gather(outputs, torch.tensor([group.rank, 7]))
    return pg.calls, torch.cat(outputs).tolist()


@pytest.mark.parametrize(
    ("cls", "calls"),
    [
        (OnlyReduces, ["allreduce"]),
        (Two, ["broadcast", "broadcast"]),
        (Three, ["allgather"]),
        (GathersIntoTensors, ["_allgather_base"]),
        (NewNames, ["all_gather_single"]),
        (Stubs, ["allgather"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_nothing_is_called_that_the_class_does_not_have(cls: type[Base], calls: list[str]) -> None:
    assert run_ranks(partial(all_gather, cls=cls), 2) == [(calls, [0, 7, 1, 7])] * 2


def add_up(group: Group, *, work: MakeWork) -> float:
    with gw.from_process_group(Three(group, work)) as over:
        value = torch.ones(3)
        over.all_reduce(value, async_op=True).wait()
        over.broadcast(value, src=1)
        return float(value.sum())


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__)
def test_every_form_of_work(work: MakeWork) -> None:
    assert run_ranks(partial(add_up, work=work), 2) == [6.0, 6.0]


class NotInPlace(Three):
    """Its results are in the future alone, which is where DDP's reducer looks for them."""

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        copies = [t.clone() for t in tensors]
        self.inner.all_reduce(copies)
        return FinishedWork(copies)


def add_up_elsewhere(group: Group) -> list[float]:
    with gw.from_process_group(NotInPlace(group)) as over:
        value = torch.ones(3)
        over.all_reduce(value)
        return value.tolist()


def test_the_result_of_an_all_reduce_is_what_its_future_holds() -> None:
    assert run_ranks(add_up_elsewhere, 2) == [[2.0, 2.0, 2.0]] * 2


class FailsWaiting(dist.Work):
    def wait(self, timeout: timedelta | None = None) -> bool:
        raise ValueError("the wire is wet")


class FailedFuture(dist.Work):
    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(ValueError("the wire is wet"))
        return future


class ExitsWaiting(dist.Work):
    def wait(self, timeout: timedelta | None = None) -> bool:
        raise SystemExit("the wire is wet")


def exits() -> dist.Work:
    raise KeyboardInterrupt("the wire is wet")


def failed_future() -> dist.Work:
    return _create_work_from_future(FailedFuture().get_future())


class Returns(Base):
    def __init__(self, group: Group, result: Any) -> None:
        super().__init__(group)
        self.result = result

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        return self.result()


def submit_to(group: Group, *, result: Callable[[], Any]) -> tuple[type[BaseException], str]:
    with gw.from_process_group(Returns(group, result), timeout=5.0) as over:
        try:
            over.all_reduce(torch.ones(3), label="mine")
        except GroupError as error:
            return GroupError, str(error)
        except UsageError as error:
            return UsageError, str(error)
    raise AssertionError("no error")


@pytest.mark.parametrize(
    "result", [FailsWaiting, FailedFuture, failed_future, ExitsWaiting, exits], ids=lambda r: r.__name__
)
def test_a_work_that_failed_raises(result: Callable[[], Any]) -> None:
    for kind, text in run_ranks(partial(submit_to, result=result), 2):
        assert kind is GroupError
        assert "the wire is wet" in text
        assert "mine" in text


@pytest.mark.parametrize("result", [lambda: None, lambda: True, lambda: torch.ones(3)], ids=["None", "bool", "tensor"])
def test_what_is_not_a_work_is_an_error_that_names_method_and_operation(result: Callable[[], Any]) -> None:
    for kind, text in run_ranks(partial(submit_to, result=result), 2):
        assert kind is UsageError
        assert "Returns.allreduce" in text
        assert "label='mine'" in text
        assert "torch.distributed.Work" in text


def ask_for_the_impossible(group: Group) -> str:
    with gw.from_process_group(Three(group)) as over:
        try:
            over.send(torch.ones(3), dst=1 - group.rank)
        except UsageError as error:
            return str(error)
    raise AssertionError("no error")


def test_a_message_cannot_be_composed() -> None:
    for text in run_ranks(ask_for_the_impossible, 2):
        assert text.startswith("send(float32[3]")  # as the caller wrote it, not the bytes that would travel
        assert "nothing simpler" in text


def test_methods_of_its_own_are_found_wherever_they_are_defined() -> None:
    class Later(Three):
        pass

    class Abstract(Later):
        def allgather(self, *args: Any) -> Any:
            raise NotImplementedError

    (group,) = gw.groups.ThreadGroup.world(1)
    later, abstract, instance = Later(group), Abstract(group), Broadcasts(group)
    instance.allreduce = later.allreduce  # type: ignore[method-assign]
    assert set(own_methods(later)) == {"allreduce", "broadcast", "allgather"}
    assert set(own_methods(abstract)) == {"allreduce", "broadcast"}
    assert set(own_methods(instance)) == {"allreduce", "broadcast"}
    assert not own_methods(dist.ProcessGroup(0, 1))
    group.close()


def test_every_kind_has_its_methods() -> None:
    assert set(METHODS) == set(OpKind) - {OpKind.REDUCE}
    for names in METHODS.values():
        assert any(hasattr(dist.ProcessGroup, name) for name in names)


def test_a_back_end_beneath_serves_what_is_not_overridden() -> None:
    """A group that counts all-reduces, and leaves the rest to gloo."""

    class Counting(dist.ProcessGroup):
        calls = 0

        def allreduce(self, tensors: Any, opts: Any) -> Any:
            Counting.calls += 1
            return super().allreduce(tensors, opts)

    pg = Counting(0, 1)
    gloo = ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    pg._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    backend, engine = find_engine(pg, torch.device("cpu"))
    assert backend is pg
    assert engine.takes(build.all_gather_into_tensor(torch.ones(2), torch.ones(2)))
    with gw.from_process_group(pg) as group:
        whole = torch.empty(2)
        group.all_gather_into_tensor(whole, torch.ones(2))
        group.all_reduce(torch.ones(2), op=gw.ReduceOp.MAX)
        assert whole.tolist() == [1, 1]
    pg.shutdown()


def train(group: Group, *, cls: type[Base], work: MakeWork = FinishedWork) -> None:
    torch.manual_seed(group.rank)
    ours = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
    theirs = copy.deepcopy(ours)
    pg, other = cls(group, work), Three(group)
    models = (gw.DistributedDataParallel(ours, process_group=pg), TorchDDP(theirs, process_group=other))
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + group.rank)
            optimizer.zero_grad()
            model(torch.randn(4, 5, generator=generator)).pow(2).sum().backward()
            optimizer.step()
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("cls", MINIMAL, ids=lambda cls: cls.__name__)
def test_ddp_gives_what_torchs_gives(cls: type[Base]) -> None:
    run_ranks(partial(train, cls=cls), 2)


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__)
def test_ddp_with_every_form_of_work(work: MakeWork) -> None:
    run_ranks(partial(train, cls=Three, work=work), 2)


# -- torch's own test doubles, in a process of their own because they change torch.distributed's state ---------------------

TORCHS_DOUBLES = """
import threading, torch, torch.distributed as dist, gradwire as gw
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg, ProcessLocalGroup


def train(rank):
    torch.manual_seed(rank)
    module = torch.nn.Linear(3, 2)
    model = gw.DistributedDataParallel(module)
    model(torch.ones(4, 3) * (rank + 1)).sum().backward()
    found[rank] = (module.weight.grad.unique().tolist(), module.weight.detach().clone())


found = {}
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
train(0)
assert found[0][0] == [4.0], found
dist.destroy_process_group()


def thread(rank):
    try:
        dist.init_process_group("threaded", rank=rank, world_size=2, store=store)
        train(rank)
        dist.destroy_process_group()
    except BaseException as error:
        ProcessLocalGroup.exception_handle(error)
        raise


_install_threaded_pg()
torch._C._distributed_c10d._set_thread_isolation_mode(True)
store = dist.HashStore()
threads = [threading.Thread(target=thread, args=(rank,)) for rank in range(2)]
for t in threads: t.start()
for t in threads: t.join()
assert [found[rank][0] for rank in range(2)] == [[6.0], [6.0]], found
assert torch.equal(found[0][1], found[1][1])
print("both")
"""


def test_ddp_on_torchs_doubles(warm_python: WarmPython) -> None:
    done = warm_python.run(TORCHS_DOUBLES, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "both\n"
