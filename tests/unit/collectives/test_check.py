"""The rules of a well-formed collective: one row for each way to break one."""

from collections.abc import Callable

import pytest
import torch

from gradwire.collectives import Collective, OpKind, ReduceOp, build
from gradwire.errors import UsageError, UsageTypeError


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def sparse() -> torch.Tensor:
    return torch.sparse_coo_tensor([[0]], [1.0], (4,), check_invariants=False)


def quantized() -> torch.Tensor:
    return torch.empty(2, dtype=torch.quint8)


two, three, integers = zeros(2), zeros(3), zeros(2, dtype=torch.int64)


def twos(count: int) -> list[torch.Tensor]:
    """Several tensors with 2 elements each."""
    return [zeros(2) for _ in range(count)]


Make = Callable[[], Collective]

ALONE: list[tuple[str, Make]] = [
    ("no tensors were given", lambda: build.all_reduce([])),
    ("no tensors were given", lambda: Collective(OpKind.SEND, peer=1)),
    ("has no root", lambda: Collective(OpKind.BROADCAST, (two,), (two,))),
    ("has no root", lambda: Collective(OpKind.SCATTER, (), (two,))),
    ("root is -1", lambda: build.broadcast(two, src=-1)),
    ("peer is -2", lambda: build.send(two, dst=-2)),
    ("tag is -1", lambda: build.recv(two, tag=-1)),
    ("no destination", lambda: Collective(OpKind.SEND, (two,))),
    ("timeout is 0", lambda: build.barrier().within(0)),
    ("timeout is -1", lambda: build.barrier().within(-1)),
    ("different devices", lambda: build.all_reduce([two, zeros(2, device="meta")])),
    ("different layouts", lambda: build.all_reduce([zeros(4), sparse()])),
    ("different dtypes", lambda: build.all_gather([two, integers], two)),
    ("different dtypes", lambda: build.all_to_all([two, two], [integers, integers])),
    ("torch.sparse_csr is not supported", lambda: build.all_reduce(torch.eye(2).to_sparse_csr())),
    ("torch.sparse_coo is not supported", lambda: build.broadcast(sparse(), src=0)),
    ("elements at one address", lambda: build.all_reduce(zeros(1).expand(3))),
    ("elements at one address", lambda: build.recv(zeros(2, 1).expand(2, 3))),
    ("BAND of float32", lambda: build.all_reduce(two, op=ReduceOp.BAND)),
    ("BXOR of complex64", lambda: build.all_reduce(zeros(2, dtype=torch.complex64), op=ReduceOp.BXOR)),
    ("AVG of int64", lambda: build.all_reduce(integers, op=ReduceOp.AVG)),
    ("AVG of bool", lambda: build.reduce(zeros(2, dtype=torch.bool), dst=0, op=ReduceOp.AVG)),
    ("PREMUL_SUM of int64", lambda: build.all_reduce(integers, op=ReduceOp.PREMUL_SUM, factor=2)),
    ("MAX of complex64.* is not defined", lambda: build.all_reduce(zeros(2, dtype=torch.complex64), op=ReduceOp.MAX)),
    ("MAX of a sparse tensor", lambda: build.all_reduce(sparse(), op=ReduceOp.MAX)),
    ("op is PREMUL_SUM and factor is None", lambda: build.all_reduce(two, op=ReduceOp.PREMUL_SUM)),
    ("op is SUM and factor is 2", lambda: build.all_reduce(two, factor=2.0)),
    (r"factor has shape \[2\]", lambda: build.all_reduce(two, op=ReduceOp.PREMUL_SUM, factor=two)),
    ("factor is complex", lambda: build.all_reduce(two, op=ReduceOp.PREMUL_SUM, factor=torch.tensor(1j))),
    ("factor is complex", lambda: build.all_reduce(two, op=ReduceOp.PREMUL_SUM, factor=1j)),  # type: ignore[arg-type]
    ("does not reduce", lambda: Collective(OpKind.BROADCAST, (two,), (two,), root=0, reduce_op=ReduceOp.SUM)),
    ("does not reduce", lambda: Collective(OpKind.BARRIER, factor=2.0)),
    ("do not pair up", lambda: Collective(OpKind.ALL_REDUCE, (two,), (three,), reduce_op=ReduceOp.SUM)),
    ("do not pair up", lambda: Collective(OpKind.BROADCAST, (two, two), (two,), root=0)),
    ("do not pair up", lambda: Collective(OpKind.ALL_REDUCE, (two,), (integers,), reduce_op=ReduceOp.SUM)),
    ("2 inputs were given", lambda: Collective(OpKind.REDUCE, (two, two), (two, two), reduce_op=ReduceOp.SUM, root=0)),
    ("2 inputs were given", lambda: Collective(OpKind.ALL_GATHER, (two, two), (two, two))),
    ("2 inputs were given", lambda: Collective(OpKind.GATHER, (two, two), root=0)),
    ("2 inputs were given", lambda: Collective(OpKind.SEND, (two, two), peer=0)),
    ("share memory", lambda: build.all_reduce([two, two])),
    ("has no data", lambda: build.all_reduce(zeros(2, device="meta"))),
    ("has no data", lambda: build.send(zeros(2, device="meta"), dst=1)),
    ("nested", lambda: build.all_reduce(torch.nested.nested_tensor([zeros(2), zeros(3)]))),
    (r"Pass t\.int_repr\(\)", lambda: build.all_reduce(quantized())),
    (r"Pass t\.int_repr\(\)", lambda: build.broadcast(quantized(), src=0)),
    (r"Pass t\.view\(torch\.uint8\)", lambda: build.all_reduce(torch.empty(2, dtype=torch.int4))),
    (r"Pass t\.view\(torch\.uint8\)", lambda: build.broadcast(torch.empty(2, dtype=torch.uint2), src=0)),
    ("SUM of float8_e8m0fnu.* is not defined", lambda: build.all_reduce(torch.empty(2, dtype=torch.float8_e8m0fnu))),
    (
        "SUM of float8_e8m0fnu",
        lambda: build.reduce_scatter(two.to(torch.float8_e8m0fnu), [two.to(torch.float8_e8m0fnu)]),
    ),
    ("SUM of a sparse tensor, bool", lambda: build.all_reduce(sparse().to(torch.bool))),
    ("2 outputs were given", lambda: Collective(OpKind.RECV, outputs=(two, two))),
    ("2 outputs were given", lambda: Collective(OpKind.SCATTER, outputs=(two, two), root=0)),
    ("2 outputs were given", lambda: Collective(OpKind.REDUCE_SCATTER, (two,), (two, two), reduce_op=ReduceOp.SUM)),
    ("1 inputs but 2 outputs", lambda: build.all_gather_into_tensor(twos(2), [two])),
    ("differ in dtype", lambda: build.all_gather_into_tensor(zeros(4), integers)),
    ("differ in dtype", lambda: build.reduce_scatter_tensor(integers, zeros(4))),
    ("is not made of parts like", lambda: build.all_gather_into_tensor(zeros(5), two)),
    ("is not made of parts like", lambda: build.reduce_scatter_tensor(zeros(0), two)),
    ("the input is float32.*the output", lambda: build.all_to_all_single(zeros(4, 2), zeros(4, 3))),
    (r"output_split_sizes are \[-1, 3\]", lambda: build.all_to_all_single(two, two, output_split_sizes=[-1, 3])),
    (r"input_split_sizes are \[1.0", lambda: build.all_to_all_single(two, two, input_split_sizes=[1.0, 1.0])),  # type: ignore[list-item]
    ("add up to 3, but dimension 0", lambda: build.all_to_all_single(two, two, input_split_sizes=[1, 2])),
    ("rows differ", lambda: build.all_to_all_single(zeros(2, 3), zeros(2, 4), output_split_sizes=[1, 1])),
]


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*nested tensors is", "ignore:torch.quantize_per")
@pytest.mark.parametrize(
    ("problem", "make"), ALONE, ids=[f"{i}-{problem[:30]}" for i, (problem, _) in enumerate(ALONE)]
)
def test_a_record_that_makes_no_sense_is_refused(problem: str, make: Make) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        make()
    message = str(caught.value)
    assert message.endswith((".", "?")), "a message ends with advice"
    assert message.count(". ") >= 1, "a message says what is wrong and then what to do"


@pytest.mark.parametrize(
    ("problem", "make"),
    [
        ("expected tensors, got int", lambda: build.all_reduce([3])),  # type: ignore[list-item]
        ("root is '0', not an int", lambda: build.broadcast(two, src="0")),  # type: ignore[arg-type]
        ("peer is 1.0, not an int", lambda: build.send(two, dst=1.0)),  # type: ignore[arg-type]
        ("op is 'sum'", lambda: build.all_reduce(two, op="sum")),  # type: ignore[arg-type]
        (r"op is \[1\]", lambda: build.all_reduce(two, op=[1])),  # type: ignore[arg-type]
    ],
)
def test_a_value_of_the_wrong_type_is_a_type_error(problem: str, make: Make) -> None:
    with pytest.raises(UsageTypeError, match=problem) as caught:
        make()
    assert isinstance(caught.value, TypeError)


# Each row is submitted by rank 1 of 3.
IN_WORLD: list[tuple[str, Make]] = [
    ("root is 3, but the group has ranks 0 to 2", lambda: build.broadcast(two, src=3)),
    ("root is 9", lambda: build.reduce(two, dst=9)),
    ("peer is 3", lambda: build.send(two, dst=3)),
    ("peer is 4", lambda: build.recv(two, src=4)),
    ("sends to itself", lambda: build.send(two, dst=1)),
    ("receives from itself", lambda: build.recv(two, src=1)),
    ("2 outputs were given to a group of 3", lambda: build.all_gather(twos(2), two)),
    (r"outputs\[1\], this rank's place, is float32\[3\]", lambda: build.all_gather([*twos(1), three, two], two)),
    ("4 inputs were given to a group of 3", lambda: build.reduce_scatter(two, [two] * 4)),
    (r"inputs\[1\], this rank's part, is float32\[3\]", lambda: build.reduce_scatter(two, [two, three, two])),
    ("2 inputs were given", lambda: build.all_to_all(twos(3), twos(2))),
    ("2 outputs were given", lambda: build.all_to_all(twos(2), twos(3))),
    (
        r"outputs\[1\] is float32\[3\] on cpu, but inputs\[1\]",
        lambda: build.all_to_all([*twos(1), three, *twos(1)], twos(3)),
    ),
    ("is not 3 times", lambda: build.all_gather_into_tensor(zeros(4), two)),
    ("it must be 6 elements", lambda: build.reduce_scatter_tensor(two, zeros(4))),
    ("not a multiple of 3 ranks", lambda: build.all_to_all_single(zeros(4), zeros(4))),
    (
        "2 output_split_sizes were given to a group of 3",
        lambda: build.all_to_all_single(zeros(4), zeros(3), output_split_sizes=[2, 2]),
    ),
    (
        "dimension 0 of the input is 4, not a multiple",
        lambda: build.all_to_all_single(zeros(4), zeros(4), output_split_sizes=[2, 2, 0]),
    ),
    (r"rank 1 is not the root \(0\), yet it passes outputs", lambda: build.gather(two, twos(3), dst=0)),
    ("0 outputs were given", lambda: build.gather(two, dst=1)),
    ("one of the root's outputs is float32", lambda: build.gather(two, [*twos(2), three], dst=1)),
    (r"rank 1 is not the root \(2\), yet it passes inputs", lambda: build.scatter(two, [two] * 3, src=2)),
    ("2 inputs were given", lambda: build.scatter(two, [two] * 2, src=1)),
    ("one of the root's inputs is float32", lambda: build.scatter(two, [three, two, two], src=1)),
]


@pytest.mark.parametrize(
    ("problem", "make"), IN_WORLD, ids=[f"{i}-{problem[:30]}" for i, (problem, _) in enumerate(IN_WORLD)]
)
def test_what_rank_1_of_3_cannot_submit(problem: str, make: Make) -> None:
    op = make()
    with pytest.raises(UsageError, match=problem):
        op.check(1, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: build.all_reduce([two, integers], op=ReduceOp.MAX),
        lambda: build.all_reduce(sparse(), op=ReduceOp.AVG),
        lambda: build.all_reduce(zeros(1).expand(1)),
        lambda: build.all_reduce(zeros(1, 0).expand(3, 0)),
        lambda: build.all_reduce(two, op=ReduceOp.PREMUL_SUM, factor=torch.tensor([2.0])),
        lambda: build.broadcast([two, integers], src=2),
        lambda: build.all_gather([zeros(0), two, three], two),
        lambda: build.reduce_scatter(two, [zeros(0), two, three]),
        lambda: build.all_gather_into_tensor(zeros(0), zeros(0)),
        lambda: build.all_gather_into_tensor([zeros(6), zeros(3, dtype=torch.int8)], [two, zeros(1, dtype=torch.int8)]),
        lambda: build.all_to_all_single(zeros(3), zeros(6), output_split_sizes=[1, 2, 0]),
        lambda: build.all_to_all_single(zeros(6), zeros(3, 2)),
        lambda: build.gather(two, dst=0),
        lambda: build.scatter(two, src=2),
        lambda: build.recv(two),
        lambda: build.barrier(),
        lambda: Collective(OpKind.ALL_REDUCE, (two,), (zeros(2),), reduce_op=ReduceOp.SUM),
    ],
)
def test_what_rank_1_of_3_can_submit(make: Make) -> None:
    make().check(1, 3)


def test_the_label_is_in_the_refusal() -> None:
    with pytest.raises(UsageError, match="all_gather labeled 'stats'"):
        build.all_gather([two, integers], two, label="stats")
