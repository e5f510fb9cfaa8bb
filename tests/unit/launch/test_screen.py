"""The launcher's own output: prefixes, colors, logs, readers that are slow or gone."""

import io
import os
import pty
import threading
from collections.abc import Iterator

import pytest

from gradwire.launch.screen import RankStream, Screen


@pytest.fixture
def pipe() -> Iterator[list[int]]:
    ends = list(os.pipe())
    yield ends
    for end in ends:
        os.close(end)


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def test_lines_are_preceded_by_their_rank(pipe):
    screen, log = Screen(pipe[1], {}), io.BytesIO()
    stream = RankStream(screen, screen.prefix(3), log=log)
    stream.feed(b"one\ntwo\nthr\xff", now=0)
    stream.end()
    assert os.read(pipe[0], 1000) == b"[3] one\n[3] two\n[3] thr\xff\n"
    assert log.getvalue() == b"one\ntwo\nthr\xff"
    assert list(stream.tail) == [b"one", b"two", b"thr\xff"]


def test_a_terminal_gets_colors_that_end_with_the_line(terminal):
    ours, theirs = terminal
    screen = Screen(theirs, {"TERM": "xterm"})
    RankStream(screen, screen.prefix(0)).feed(b"\x1b[31mred\nplain\n", now=0)
    shown = os.read(ours, 1000).replace(b"\r\n", b"\n")
    assert shown == b"\x1b[36m[0]\x1b[0m \x1b[31mred\x1b[0m\n\x1b[36m[0]\x1b[0m plain\n"
    assert screen.prefix(1) != screen.prefix(0).replace(b"0]", b"1]")


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_may_want_none(terminal, environ):
    assert Screen(terminal[1], environ).prefix(5) == b"[5] "


def test_no_color_counts_only_if_it_says_something(terminal):
    assert Screen(terminal[1], {"NO_COLOR": ""}).color


def test_a_slow_reader_gets_everything(pipe):
    os.set_blocking(pipe[1], False)
    screen, data = Screen(pipe[1], {}), os.urandom(1 << 20)
    read = []

    def reader() -> None:
        while sum(map(len, read)) < len(data):
            read.append(os.read(pipe[0], 1000_000))

    thread = threading.Thread(target=reader)
    thread.start()
    screen.write(data)
    thread.join(100)
    assert b"".join(read) == data
    assert screen.error is None


def test_a_reader_that_is_gone_is_noticed():
    read, write = os.pipe()
    os.close(read)
    screen = Screen(write, {})
    screen.write(b"hello?\n")
    screen.write(b"anybody?\n")
    os.close(write)
    assert screen.reader_is_gone


def test_the_tail_holds_the_last_lines_and_not_too_many_bytes(pipe):
    stream = RankStream(Screen(pipe[1], {}), b"")
    stream.feed(b"".join(b"%d\n" % i for i in range(1000)), now=0)
    assert list(stream.tail) == [b"%d" % i for i in range(980, 1000)]
    stream.feed(b"x" * 5000 + b"z\n", now=0)
    assert (len(stream.tail[-1]), stream.tail[-1][-2:]) == (4096, b"xz")


def test_a_full_disk_is_named():
    with open("/dev/full", "wb", buffering=0) as full:
        screen = Screen(full.fileno(), {})
        screen.write(b"hello\n")
        assert not screen.reader_is_gone
        assert screen.error is not None
        assert screen.error.strerror == "No space left on device"


def test_a_log_on_a_full_disk_ends_and_the_run_goes_on(pipe):
    with open("/dev/full", "wb", buffering=0) as full:
        stream = RankStream(Screen(pipe[1], {}), b"[0] ", log=full)
        stream.feed(b"one\ntwo\n", now=0)
        stream.feed(b"three\n", now=0)
    shown = os.read(pipe[0], 1000)
    assert shown == b"gradwire run: this log is incomplete: No space left on device\n[0] one\n[0] two\n[0] three\n"
