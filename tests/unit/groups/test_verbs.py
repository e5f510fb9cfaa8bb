"""The verbs: each makes the collective its constructor makes, and waits unless async_op is set."""

from collections.abc import Callable, Iterator

import pytest
import torch

from gradwire.collectives import Collective, OpKind, ReduceOp, build
from gradwire.errors import CollectiveTimeout
from gradwire.groups import Group, Work


class Notes(Group):
    """Notes what is submitted; settles it when it is waited for, or never."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.ops: list[Collective] = []
        self.never = False

    def submit(self, op: Collective) -> Work:
        self.ops.append(op)
        work = self.begin(op, Lazy)
        work.never = self.never
        return work


class Lazy(Work):
    """Finishes when somebody waits."""

    never = False

    def wait_done(self, timeout: object = None) -> bool:
        if not self.never:
            self.finish()
        return super().wait_done()


@pytest.fixture
def group() -> Iterator[Notes]:
    group = Notes()
    yield group
    group.close(timeout=0.0)


a, b, c, d, four = torch.ones(2), torch.ones(2), torch.ones(2), torch.ones(2), torch.ones(4)

VERBS: list[tuple[Callable[..., Work], Collective]] = [
    (lambda g, **k: g.all_reduce(a, ReduceOp.MAX, **k), build.all_reduce(a, op=ReduceOp.MAX)),
    (lambda g, **k: g.all_reduce([a, b], **k), build.all_reduce([a, b])),
    (
        lambda g, **k: g.all_reduce(a, ReduceOp.PREMUL_SUM, factor=2.0, **k),
        build.all_reduce(a, op=ReduceOp.PREMUL_SUM, factor=2.0),
    ),
    (lambda g, **k: g.broadcast(a, 1, **k), build.broadcast(a, src=1)),
    (lambda g, **k: g.reduce(a, 1, ReduceOp.MIN, **k), build.reduce(a, dst=1, op=ReduceOp.MIN)),
    (lambda g, **k: g.all_gather([a, b], c, **k), build.all_gather([a, b], c)),
    (lambda g, **k: g.all_gather_into_tensor(four, c, **k), build.all_gather_into_tensor(four, c)),
    (lambda g, **k: g.reduce_scatter(a, [b, c], ReduceOp.AVG, **k), build.reduce_scatter(a, [b, c], op=ReduceOp.AVG)),
    (lambda g, **k: g.reduce_scatter_tensor(a, four, **k), build.reduce_scatter_tensor(a, four)),
    (lambda g, **k: g.all_to_all([a, b], [c, d], **k), build.all_to_all([a, b], [c, d])),
    (
        lambda g, **k: g.all_to_all_single(a, b, [1, 1], [2, 0], **k),
        build.all_to_all_single(a, b, output_split_sizes=[1, 1], input_split_sizes=[2, 0]),
    ),
    (lambda g, **k: g.gather(a, [b, c], **k), build.gather(a, [b, c], dst=0)),
    (lambda g, **k: g.gather(a, dst=1, **k), build.gather(a, dst=1)),
    (lambda g, **k: g.scatter(a, [b, c], **k), build.scatter(a, [b, c], src=0)),
    (lambda g, **k: g.scatter(a, src=1, **k), build.scatter(a, src=1)),
    (lambda g, **k: g.send(a, 1, 7, **k), build.send(a, dst=1, tag=7)),
    (lambda g, **k: g.recv(a, 1, 7, **k), build.recv(a, src=1, tag=7)),
    (lambda g, **k: g.recv(a, **k), build.recv(a)),
    (lambda g, **k: g.barrier(**k), build.barrier()),
]


@pytest.mark.parametrize(("call", "want"), VERBS, ids=[repr(op) for _, op in VERBS])
def test_a_verb_makes_its_collective_and_waits(group: Notes, call: Callable[..., Work], want: Collective) -> None:
    assert call(group).is_success()
    assert not call(group, async_op=True).is_completed()
    assert call(group, label="named").op.label == "named"
    for op in group.ops[:2]:
        assert (op.signature, op.splits, op.factor) == (want.signature, want.splits, want.factor)
        assert [id(t) for t in op.inputs] == [id(t) for t in want.inputs]
        assert [id(t) for t in op.outputs] == [id(t) for t in want.outputs]


def test_there_is_a_verb_for_every_kind() -> None:
    assert {op.kind for _, op in VERBS} == set(OpKind)


def test_a_monitored_barrier_has_its_own_deadline_and_label(group: Notes) -> None:
    group.monitored_barrier(5.0)
    assert (group.ops[0].timeout, group.ops[0].label) == (5.0, "monitored_barrier")
    group.never = True
    with pytest.raises(CollectiveTimeout, match="start of epoch"):
        group.monitored_barrier(0.02, label="start of epoch")
