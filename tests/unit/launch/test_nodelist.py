"""The first host of SLURM's lists of hosts."""

import re
from contextlib import suppress

import pytest
from hypothesis import given, strategies as st

from gradwire.errors import UsageError
from gradwire.launch.world import first_host

names = st.text("abcxyz-.", min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1", "node1"),
        ("node[01-03,07],gpu5", "node01"),
        ("a[9-11]", "a9"),
        ("a[008-010]b", "a008b"),
        ("r[0-1]n[3,1]", "r0n3"),
        ("[1-2]", "1"),
        ("node-1.example.org,b", "node-1.example.org"),
        ("node[0-9999999999]x[0-9999999999]", "node0x0"),
    ],
)
def test_the_first_host_of_a_list(text, expected):
    assert first_host(text) == expected


@pytest.mark.parametrize("text", ["", ",b", "a[1-2", "a]1", "a[[1]]", "a[]", "a[1-]", "a[x]"])
def test_an_invalid_list_is_an_error_that_shows_it(text):
    with pytest.raises(UsageError, match=re.escape(f"list of hosts {text!r}: it should look like")):
        first_host(text)


@given(names, st.lists(st.tuples(st.integers(0, 99), st.integers(0, 12)), min_size=1, max_size=3), st.integers(1, 5))
def test_the_first_number_keeps_its_width(prefix, ranges, width):
    inside = ",".join(f"{a:0{width}d}-{a + n:0{width}d}" if n else f"{a:0{width}d}" for a, n in ranges)
    assert first_host(f"{prefix}[{inside}]{prefix},other") == f"{prefix}{ranges[0][0]:0{width}d}{prefix}"


@given(st.text("ab0-9[],-", max_size=12))
def test_any_text_has_a_first_name_or_is_a_usage_error(text):
    with suppress(UsageError):
        assert first_host(text)
