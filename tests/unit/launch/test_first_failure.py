"""Which rank failed first, and what is said of it."""

from __future__ import annotations

import pytest

from gradwire.launch.first_failure import Ending, final_output, first_failure, raised, shortened, summary

TRACE = b"Traceback (most recent call last):"


def words(name: str) -> tuple[bytes, ...]:
    return (b"noise", TRACE, b'  File "x.py", line 1, in <module>', f"{name}: why".encode())


LOST, ABORTED, OWN = (words(n) for n in ("gradwire.errors.PeerLost", "gradwire.errors.GroupAborted", "ValueError"))


@pytest.mark.parametrize(
    ("endings", "rank"),
    [
        ([], None),
        ([Ending(0, 0, 1.0)], None),
        ([Ending(0, -15, 1.0, stopped=True)], None),
        ([Ending(0, 0, 0.5), Ending(1, 1, 2.0), Ending(2, 1, 1.0)], 2),
        ([Ending(0, 1, 1.0, words=LOST), Ending(1, 1, 1.5, words=OWN)], 1),
        ([Ending(0, 1, 1.0, words=LOST), Ending(1, 1, 2.5, words=OWN)], 0),  # too late to be the cause
        ([Ending(0, 1, 1.0, words=ABORTED), Ending(1, -9, 1.2)], 1),
        ([Ending(0, 1, 1.0, words=ABORTED), Ending(1, 1, 1.2, words=LOST)], 0),
        ([Ending(0, 1, 1.0, words=OWN), Ending(1, -11, 1.2, words=LOST)], 0),
        ([Ending(0, -11, 1.0, words=LOST), Ending(1, 1, 1.2, words=OWN)], 0),  # a signal is no consequence
        ([Ending(1, 1, 1.0), Ending(0, 1, 1.0)], 0),
    ],
)
def test_the_first_failure_is_the_earliest_that_is_no_consequence(endings, rank):
    first = first_failure(endings)
    assert (None if first is None else first.rank) == rank


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
            Ending(
                1,
                1,
                2.0,
                words=(TRACE, b"gradwire.errors.PeerLost: barrier on rank 1 of 2: rank 0 is lost: it has ..."),
            ),
            [Ending(0, 0, 1.0)],
            "rank 0 was lost (PeerLost on rank 1, exit code 1, after 2.0 s); rank 0 had finished",
        ),
        (
            Ending(1, 1, 2.0, words=(TRACE, b"ValueError: no")),
            [
                Ending(0, 1, 2.1, stopped=True, words=(TRACE, b"ValueError: not here")),
                Ending(2, -15, 2.1, stopped=True, words=(TRACE, b"ValueError: no")),
                Ending(3, 1, 2.1, stopped=True, words=(TRACE, b"KeyError: 'x'")),
                Ending(4, -15, 2.1, stopped=True),
                Ending(5, 0, 2.1, stopped=True, words=(TRACE, b"ValueError: handled")),
                Ending(6, -15, 2.1, stopped=True, words=(TRACE, b"ValueError: handled", b"epoch 3")),
            ],
            "rank 1 failed first (exit code 1, after 2.0 s); ranks 3, 4, 5, 6 were stopped; ranks 0, 2 failed too",
        ),
        *(
            (
                Ending(2, 1, 2.0, words=(TRACE, b"gradwire.errors." + text)),
                [],
                line + " on rank 2, exit code 1, after 2.0 s)",
            )
            for text, line in [
                (
                    b"NonFiniteGradient: averaging gradients in step 3: on rank 1 the gradient of 2.bias is NaN at [0], as in 3",
                    "on rank 1 the gradient of 2.bias is NaN (NonFiniteGradient",
                ),
                (
                    b"NonFiniteGradient: averaging gradients in step 3: on rank 0 the gradient of b is too large for the dtype",
                    "on rank 0 the gradient of b is too large (NonFiniteGradient",
                ),
                (
                    b"ReplicasDiverged: comparing replicas after 20 steps: rank 1 differs from the majority in 0.weight. Load",
                    "rank 1 differs from the majority in 0.weight (ReplicasDiverged",
                ),
                (
                    b"ReplicasDiverged: comparing replicas after 20 steps: ranks 0, 1 differ in a.b, 0.weight, and no value has",
                    "ranks 0, 1 differ in a.b (ReplicasDiverged",
                ),
            ]
        ),
    ],
)
def test_one_line_says_what_became_of_all(first, others, line):
    assert summary(first, [first, *others]) == line


def test_exit_codes_are_those_of_shells():
    assert [Ending(0, status, 0.0).exit_code for status in (0, 7, -9, -15)] == [0, 7, 137, 143]


def test_the_final_output_is_the_last_traceback_with_its_causes():
    chained = [
        b"old news",
        TRACE,
        b"KeyError: 1",
        b"went on",
        TRACE,
        b"ValueError: 2",
        b"",
        b"During handling of the above exception, another exception occurred:",
        b"",
        TRACE,
        b"RuntimeError: 3",
        b"after",
    ]
    assert final_output(chained) == chained[4:]
    assert final_output(chained[:4]) == chained[1:4]


def test_without_a_traceback_the_last_lines_are_shown():
    lines = [b"%d" % i for i in range(50)]
    assert final_output(lines) == lines[30:]
    assert final_output([]) == []


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (LOST, "PeerLost"),
        ((*LOST, b"a note", b"ValueError: in a note"), "PeerLost"),
        ((TRACE, b"KeyboardInterrupt"), "KeyboardInterrupt"),
        ((b"87%" + TRACE, b"KeyError: 1"), "KeyError"),
        ((TRACE, b"  File"), None),
        ((b"PeerLost: said, not raised",), None),
        ((TRACE, b"!"), None),
        ((), None),
    ],
)
def test_the_name_of_what_was_raised(lines, name):
    assert raised(lines) == name


def by_torch(lines):
    """As torch writes a traceback after init_process_group."""
    return [b"[rank0]: " + line for line in lines]


def test_the_prefix_of_torchs_tracebacks_is_seen_through():
    first = (TRACE, b'  File "x.py", line 1, in <module>', b"ValueError: one", b"more of it")
    assert raised(by_torch(first)) == "ValueError"
    assert shortened(by_torch(first)) == [b"ValueError: one"]
    assert shortened(by_torch((TRACE, b"KeyboardInterrupt", b"bye"))) == [b"bye"]
    link = b"During handling of the above exception, another exception occurred:"
    chained = by_torch([*first, b"", link, b"", TRACE, b"KeyError: two"])
    assert final_output(chained) == chained
    lost = Ending(0, 1, 1.0, words=tuple(by_torch(LOST[1:])))
    assert lost.is_consequence
