"""Which rank failed first, and what the last line states about it."""

import pytest

from gradwire.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    LayoutError,
    NonFiniteGradient,
    PeerLost,
    ReplicasDiverged,
)
from gradwire.launch.shutdown import Ending, first_failure, summary
from gradwire.runtime.rank_error import RankError


def ended(rank: int, after: float, error: BaseException | None = None, *, status: int = 1, **how) -> Ending:
    """A rank that raised `error` and ended at once."""
    saved = None
    if error is not None:
        saved = RankError.of(error, rank)
        saved = RankError(**{name: getattr(saved, name) for name in saved.__slots__} | {"time": after})
    return Ending(rank, status, after, error=saved, **how)


OWN, ABORTED = ValueError("no"), GroupAborted("aborted")


def lost(rank: int | None = None) -> PeerLost:
    return PeerLost("why", rank=rank)


@pytest.mark.parametrize(
    ("endings", "rank"),
    [
        ([], None),
        ([Ending(0, 0, 1.0)], None),
        ([Ending(0, -15, 1.0, stopped=True)], None),
        ([Ending(0, 0, 0.5), Ending(1, 1, 2.0), Ending(2, 1, 1.0)], 2),
        ([ended(0, 1.0, lost()), ended(1, 1.5, OWN)], 1),
        ([ended(0, 1.0, lost()), ended(1, 2.5, OWN)], 0),  # too late to be the cause
        ([ended(0, 1.0, lost(1)), ended(1, 2.5, OWN)], 1),  # but the error names it
        ([ended(0, 1.0, lost(2)), ended(1, 1.1, lost(0)), ended(2, 9.0, lost(3)), ended(3, 12.0, OWN)], 3),
        ([ended(0, 1.0, lost(1)), ended(1, 1.1, lost(0))], 0),  # they blame each other
        ([ended(0, 1.0, lost(1)), Ending(1, 0, 0.5)], 0),
        ([ended(0, 1.0, CollectiveTimeout("", missing=[1])), ended(1, 1.1, lost(0))], 0),
        ([ended(0, 1.0, ABORTED), Ending(1, -9, 1.2)], 1),
        ([ended(0, 1.0, ABORTED), ended(1, 1.2, lost())], 0),
        ([ended(0, 1.0, NonFiniteGradient("", rank=1)), ended(1, 1.2, NonFiniteGradient("", rank=1))], 1),
        ([ended(0, 1.0, OWN), ended(1, 1.2, lost(), status=-11)], 0),
        ([Ending(1, 1, 1.0), Ending(0, 1, 1.0)], 0),
    ],
)
def test_the_first_failure_is_the_earliest_that_no_other_explains(endings, rank):
    first = first_failure(endings)
    assert (None if first is None else first.rank) == rank


def test_a_rank_fails_when_it_raises_not_when_it_has_exited():
    slow = ended(0, 1.0, OWN)
    slow = Ending(0, 1, 5.0, error=slow.error)
    assert first_failure([slow, ended(1, 1.5, OWN)]) is slow


def test_a_wrapped_error_is_a_consequence_too():
    try:
        raise RuntimeError("my own words") from lost(1)
    except RuntimeError as error:
        ending = ended(0, 1.0, error)
    assert (ending.consequence, ending.error.culprits) == (2, (1,))


@pytest.mark.parametrize(
    ("first", "others", "line"),
    [
        (Ending(0, 3, 1.26), [], "rank 0 failed (exit code 3, after 1.3 s)"),
        (
            Ending(1, -9, 2.0),
            [Ending(0, -15, 2.1, stopped=True)],
            "rank 1 failed first (killed by SIGKILL, after 2.0 s); rank 0 was stopped",
        ),
        (
            Ending(1, 1, 2.0),
            [Ending(0, 0, 1.0), Ending(2, 1, 2.0), Ending(4, 1, 2.1), Ending(3, 0, 3.0, stopped=True)],
            "rank 1 failed first (exit code 1, after 2.0 s); rank 3 was stopped; ranks 2, 4 failed too; rank 0 had finished",
        ),
        (Ending(0, -63, 0.0), [], "rank 0 failed (killed by signal 63, after 0.0 s)"),
        (
            ended(1, 2.0, lost(0)),
            [Ending(0, 0, 1.0), Ending(2, 0, 1.0)],
            "rank 0 finished early with exit code 0 (PeerLost on rank 1, exit code 1, after 2.0 s); rank 2 had finished",
        ),
        (
            ended(1, 2.0, lost(0)),
            [Ending(2, 0, 1.0)],
            "rank 0 was lost (PeerLost on rank 1, exit code 1, after 2.0 s); rank 2 had finished",
        ),
        (
            ended(1, 2.0, OWN),
            [
                ended(0, 2.1, ValueError("not here"), stopped=True),
                ended(2, 2.1, OWN, status=-15, stopped=True),
                ended(3, 2.1, KeyError("x"), stopped=True),
                Ending(4, -15, 2.1, stopped=True),
                ended(5, 2.1, OWN, status=0, stopped=True),
            ],
            "rank 1 failed first (exit code 1, after 2.0 s); ranks 3, 4, 5 were stopped; ranks 0, 2 failed too",
        ),
        *(
            (ended(2, 2.0, error), [], line + " on rank 2, exit code 1, after 2.0 s)")
            for error, line in [
                (CollectiveTimeout("", missing=[1, 0]), "ranks 0, 1 were missing (CollectiveTimeout"),
                (LayoutError("", ranks=[1]), "rank 1 has other parameters (LayoutError"),
                (
                    CollectiveMismatch("", ops={0: "a", 1: "b", 2: "a"}),  # type: ignore[dict-item]
                    "rank 1 submitted another operation than the others (CollectiveMismatch",
                ),
                (
                    NonFiniteGradient("", rank=1, parameter="2.bias"),
                    "on rank 1 the gradient of 2.bias is not finite (NonFiniteGradient",
                ),
                (ReplicasDiverged("", ranks=[1], parameters=["0.weight", "a"]), "rank 1 differs in 0.weight (Replicas"),
                (ReplicasDiverged("", ranks=[0, 1], parameters=["a.b"]), "ranks 0, 1 differ in a.b (ReplicasDiverged"),
            ]
        ),
    ],
)
def test_one_line_says_what_became_of_all(first, others, line):
    assert summary(first, [first, *others]) == line.replace("(Replicas on", "(ReplicasDiverged on")


def test_exit_codes_are_those_of_shells():
    assert [Ending(0, status, 0.0).exit_code for status in (0, 7, -9, -15)] == [0, 7, 137, 143]
    assert ended(0, 1.0, OWN, status=-15).exit_code == 1  # the launcher killed it while it exited
