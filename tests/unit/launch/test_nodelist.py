"""SLURM's lists of hosts, there and back."""

from __future__ import annotations

import itertools
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import UsageError
from gradwire.launch.nodelist import hosts

names = st.text("abcxyz-.", min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1", ["node1"]),
        ("node[01-03,07],gpu5", ["node01", "node02", "node03", "node07", "gpu5"]),
        ("a[9-11]", ["a9", "a10", "a11"]),
        ("a[008-010]b", ["a008b", "a009b", "a010b"]),
        ("r[0-1]n[1,3]", ["r0n1", "r0n3", "r1n1", "r1n3"]),
        ("[1-2]", ["1", "2"]),
        ("a[1],a[1]", ["a1", "a1"]),
        ("node-1.example.org,b", ["node-1.example.org", "b"]),
    ],
)
def test_lists_are_written_out(text, expected):
    assert list(hosts(text)) == expected


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no name at character 1"),
        ("a,,b", "no name at character 3"),
        ("a,", "no name at character 3"),
        ("a[1-2", "a bracket at character 2 is unmatched"),
        ("a]1", "a bracket at character 2 is unmatched"),
        ("a[[1]]", "a bracket at character 2 is unmatched"),
        ("a[]", r"\[\] is not a list of numbers"),
        ("a[1-]", r"\[1-\] is not a list of numbers"),
        ("a[1-2-3]", "is not a list of numbers"),
        ("a[x]", "is not a list of numbers"),
        ("a[3-1]", "the range 3-1 is descending"),
    ],
)
def test_what_is_no_list_is_an_error_that_says_where(text, what):
    with pytest.raises(UsageError, match=what):
        list(hosts(text))


def test_the_first_of_very_many_comes_at_once():
    assert next(hosts("node[0-9999999999]x[0-9999999999]")) == "node0x0"


@given(
    st.lists(
        st.tuples(
            names, st.integers(1, 5), st.lists(st.tuples(st.integers(0, 99), st.integers(0, 12)), max_size=3), names
        ),
        min_size=1,
        max_size=4,
    )
)
def test_every_compressed_list_stands_for_the_names_it_was_made_of(groups):
    pieces, expected = [], []
    for prefix, width, ranges, suffix in groups:
        if not ranges:
            pieces.append(prefix)
            expected.append(prefix)
            continue
        inside = ",".join(f"{a:0{width}d}-{a + n:0{width}d}" if n else f"{a:0{width}d}" for a, n in ranges)
        pieces.append(f"{prefix}[{inside}]{suffix}")
        expected += [f"{prefix}{i:0{width}d}{suffix}" for a, n in ranges for i in range(a, a + n + 1)]
    assert list(hosts(",".join(pieces))) == expected


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=3), min_size=1, max_size=3))
def test_several_brackets_are_combined(numbers):
    text = "".join(f"n[{','.join(map(str, part))}]" for part in numbers)
    assert list(hosts(text)) == ["".join(f"n{i}" for i in row) for row in itertools.product(*numbers)]


@given(st.text("ab0-9[],-", max_size=12))
def test_any_text_is_a_list_of_names_or_a_usage_error(text):
    with suppress(UsageError):
        assert all(itertools.islice(hosts(text), 1000))
