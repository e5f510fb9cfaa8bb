"""Whether ranks' collectives match, and the message of a mismatch."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from gradwire.collectives import Collective, ReduceOp, Signature, build
from gradwire.collectives.matching import comparable, disagreement, mismatch

t, longer, ints = torch.zeros(2), torch.zeros(3), torch.zeros(2, dtype=torch.int64)


def signatures(*ops: Collective) -> list[Signature]:
    return [op.signature for op in ops]


@pytest.mark.parametrize(
    ("ops", "problem"),
    [
        ((build.all_reduce(t), build.barrier()), "kind: rank 1 has barrier, the others have all_reduce"),
        ((build.all_reduce(t), build.all_reduce(t), build.barrier()), "kind: rank 2 has barrier"),
        (
            (build.barrier(), build.all_reduce(t), build.all_reduce(t)),
            "kind: rank 0 has barrier, the others have all_r",
        ),
        ((build.all_reduce(t), build.all_reduce(ints)), r"dtype: rank 1 has ['int64'], the others have ['float32']"),
        ((build.all_reduce(t), build.all_reduce(longer)), "shape: rank 1 has [[3]], the others have [[2]]"),
        ((build.all_reduce(t), build.all_reduce([t, t.clone()])), "dtype: rank 1 has ['float32', 'float32']"),
        ((build.all_reduce(t), build.all_reduce(t, op=ReduceOp.MAX)), "op: rank 1 has max, the others have sum"),
        ((build.broadcast(t, src=0), build.broadcast(t, src=1)), "root: rank 1 has 1, the others have 0"),
        ((build.barrier(label="a"), build.barrier(label="b")), "label: rank 1 has 'b', the others have 'a'"),
        (
            (build.all_gather([t, t.clone()], t), build.all_gather([ints, ints.clone()], ints)),
            "dtype: rank 1 has ['int64']",
        ),
        (
            (build.barrier(), build.all_reduce(t), build.barrier(), build.all_reduce(t), build.barrier()),
            "kind: ranks [1, 3] have all_reduce, the others have barrier",
        ),
    ],
)
def test_a_disagreement_names_who_differs_in_what(ops: tuple[Collective, ...], problem: str) -> None:
    message = disagreement(signatures(*ops))
    assert message is not None
    assert message.startswith(f"ranks differ in {problem}")


@pytest.mark.parametrize(
    "ops",
    [
        (build.all_reduce(t), build.all_reduce(torch.ones(2))),
        (build.all_gather([t, longer], t), build.all_gather([t, longer], longer)),
        (build.reduce_scatter(t, [t, longer]), build.reduce_scatter(longer, [t, longer])),
        (build.all_to_all([t, longer], [t, t]), build.all_to_all([t, longer], [longer, longer])),
        (build.all_to_all_single(t, t), build.all_to_all_single(t, t, input_split_sizes=[2, 0])),
        (build.scatter(t, [t, t], src=0), build.scatter(t, src=0)),
        (build.gather(t, [t, t.clone()], dst=0), build.gather(t, dst=0)),
        (build.barrier(), build.barrier()),
        (build.barrier(),),
        (
            build.all_reduce(t, op=ReduceOp.PREMUL_SUM, factor=1.0),
            build.all_reduce(t, op=ReduceOp.PREMUL_SUM, factor=2.0),
        ),
    ],
)
def test_what_may_differ(ops: tuple[Collective, ...]) -> None:
    assert disagreement(signatures(*ops)) is None
    assert mismatch("group", signatures(*ops)) is None


def test_a_mismatch_carries_what_each_rank_submitted() -> None:
    submitted = signatures(build.all_reduce(t, label="loss"), build.all_reduce(longer, label="loss"))
    error = mismatch("threads", submitted)
    assert error is not None
    assert error.ops == dict(enumerate(submitted))
    for part in ("threads", "rank 1 has [[3]]", "rank 0: all_reduce(float32[2], SUM, label='loss')", "same order"):
        assert part in str(error)


def test_what_is_compared_can_differ_from_what_is_shown() -> None:
    labeled = signatures(build.barrier(label="a"), build.barrier(label="b"))
    assert mismatch("g", labeled) is not None
    assert mismatch("g", labeled, compared=[replace(s, label="") for s in labeled]) is None


FIELDS = {
    "kind": build.barrier().signature.kind,
    "dtypes": ("int8",),
    "shapes": ((7,),),
    "reduce_op": ReduceOp.MIN,
    "root": 5,
    "label": "other",
}


@settings(max_examples=60)
@given(size=st.integers(2, 9), data=st.data(), field=st.sampled_from(sorted(FIELDS)))
def test_one_rank_that_differs_in_one_field_is_found(size: int, data: st.DataObject, field: str) -> None:
    odd = data.draw(st.integers(0, size - 1))
    same = build.reduce(t, dst=0).signature
    all_of_them = [same] * size
    all_of_them[odd] = replace(same, **{field: FIELDS[field]})
    message = disagreement(all_of_them)
    assert message is not None
    if size > 2:
        assert f"rank {odd} has" in message
    assert comparable(all_of_them[odd]) != comparable(same)
