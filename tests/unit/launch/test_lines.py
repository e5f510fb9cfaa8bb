"""Whole lines out of bytes that arrive in any pieces."""

from hypothesis import given, strategies as st

from gradwire.launch import screen as lines
from gradwire.launch.screen import LineBuffer


def through(*pieces: bytes, now: float = 0.0) -> tuple[list[bytes], bytes]:
    """The lines that are shown, and the bytes that go to a log."""
    buffer = LineBuffer()
    out = [*(buffer.feed(piece, now=now) for piece in pieces), buffer.end()]
    return [line for piece in out for line in piece.lines], b"".join(piece.raw for piece in out)


def test_lines_come_when_they_are_complete():
    buffer = LineBuffer()
    assert buffer.feed(b"al", now=0).lines == ()
    assert buffer.feed(b"l\nof", now=0).lines == (b"all",)
    assert buffer.end().lines == (b"of",)
    assert buffer.end().lines == ()


def test_empty_lines_and_windows_lines():
    assert through(b"\n\na\r\n\r", b"\nb\r\n")[0] == [b"", b"", b"a", b"", b"b"]


@given(st.binary().filter(lambda data: b"\r" not in data), st.data())
def test_any_bytes_in_any_pieces_give_the_same_lines(data, draw):
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=5)))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    shown, raw = through(*pieces)
    assert raw == data
    assert shown == (data[:-1] if data.endswith(b"\n") else data).split(b"\n") if data else shown == []


@given(st.lists(st.text("a\r\n", max_size=4).map(str.encode), max_size=8))
def test_logs_get_every_byte(pieces):
    assert through(*pieces)[1] == b"".join(pieces)


def test_a_progress_bar_shows_one_state_a_second_and_its_last():
    buffer = LineBuffer()
    shown = []
    for percent in range(101):
        shown += buffer.feed(b"\r%d%%" % percent, now=percent / 20).lines  # 20 states a second
    shown += buffer.feed(b"\n", now=6).lines
    assert shown[-1] == b"100%"
    assert len(shown) in (6, 7)
    assert b"" not in shown


def test_a_bar_with_the_return_at_the_end():
    buffer = LineBuffer()
    for state in range(5):
        buffer.feed(b"%d\r" % state, now=state)
    assert buffer.end().lines == (b"4",)


def test_a_bar_that_never_ends_its_line_takes_no_memory():
    buffer = LineBuffer()
    for _ in range(1000):
        buffer.feed(b"\r" + b"x" * 1000, now=0)
    assert len(buffer._rest) <= 2000


def test_a_line_without_end_is_cut():
    shown, raw = through(b"x" * lines.LONGEST, b"y", b"z\n")
    assert shown == [b"x" * lines.LONGEST + b"y", b"z"]
    assert len(raw) == lines.LONGEST + 3
