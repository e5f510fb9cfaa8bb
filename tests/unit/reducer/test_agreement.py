"""Parameters that differ between ranks are found when a model is replicated, on every rank, by name."""

from dataclasses import replace

import pytest
import torch

from gradwire.errors import LayoutError
from gradwire.groups import Group, Recording
from gradwire.reducer import ParameterSpec
from gradwire.reducer.rank_agreement import compare_parameters
from gradwire.testing import run_ranks

CPU = torch.device("cpu")
A = ParameterSpec("a", (2, 3), (3, 1), torch.float32, CPU)
B = ParameterSpec("b", (4,), (1,), torch.float32, CPU)
C = ParameterSpec("c", (5, 2), (2, 1), torch.float64, CPU)

DIFFERENCES = {
    "shape": ([A, replace(B, shape=(5,)), C], r"number 1: 'b: float32\[5\] .* against 'b: float32\[4\]"),
    "dtype": ([A, B, replace(C, dtype=torch.float32)], r"number 2: 'c: float32\[5, 2\].* against 'c: float64"),
    "stride": ([replace(A, stride=(1, 2)), B, C], r"number 0: 'a: .*stride \[1, 2\].* against .*stride \[3, 1\]"),
    "name": ([A, replace(B, name="bias"), C], r"number 1: 'bias: .* against 'b: "),
    "sparse": ([A, B, replace(C, sparse=True)], r"number 2: 'c: .*sparse' against 'c: "),
    "one less": ([A, B], r"different numbers of parameters: rank \d 2, rank \d 3.* number 2: 'c: "),
    "one more": (
        [A, B, C, replace(C, name="d")],
        r"different numbers of parameters: rank \d 4, rank \d 3.*number 3: 'd: ",
    ),
    "none": ([], r"different numbers of parameters: rank \d 0, rank \d 3.*number 0: 'a: "),
    "another order": ([B, A, C], r"number 0: 'b: .* against 'a: "),
}


def messages(group: Group, mine: list[ParameterSpec]) -> str:
    with pytest.raises(LayoutError) as caught:
        compare_parameters(group, mine, device=torch.device("cpu"))
    return str(caught.value)


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_the_first_difference_and_the_odd_rank_are_named_on_every_rank(difference: str) -> None:
    other, words = DIFFERENCES[difference]
    said = run_ranks(lambda group: messages(group, other if group.rank == 1 else [A, B, C]), 3)
    assert said == [said[0]] * 3
    assert "rank 1 " in said[0]
    assert said[0].endswith("Build the same model on every rank before you replicate it.")
    with pytest.raises(LayoutError, match=words):
        raise LayoutError(said[0])


def test_two_ranks_that_differ_are_both_named() -> None:
    said = run_ranks(lambda group: messages(group, [A] if group.rank else [B]), 2)
    assert said == [said[0]] * 2
    assert "rank 1 and rank 0 disagree" in said[0]


def test_several_odd_ranks_are_named_together() -> None:
    said = run_ranks(lambda group: messages(group, [B] if group.rank in (1, 3) else [A]), 5)
    assert "ranks [1, 3] and rank 0 disagree" in said[0]


def test_equal_parameters_cost_one_small_collective() -> None:
    def rank_main(group: Group) -> list[tuple[str, int]]:
        assert isinstance(group, Recording)
        compare_parameters(group, [A, B, C], device=torch.device("cpu"))
        return [(info.kind, info.bytes) for info in group.finished]

    assert run_ranks(rank_main, 3, wrap=Recording) == [[("all_gather_into_tensor", 32)]] * 3
