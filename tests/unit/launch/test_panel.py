"""A picture below the output: what a terminal shows in the end."""

from __future__ import annotations

import os
import pty
import re

import pytest

from gradwire.launch.panel import Panel, find_terminal
from gradwire.launch.screen import RankStream, Screen


def shown(data: bytes) -> list[str]:
    """What a terminal of unlimited height shows: it knows line feeds, carriage returns, "up" and "erase below"."""
    lines, row = [""], 0
    for up, erase, feed, text in re.findall(rb"\x1b\[(\d+)A|(\x1b\[J)|(\r?\n)|([^\r\n\x1b]+)", data):
        if up:
            row -= int(up)
        elif erase:
            del lines[row + 1 :]
            lines[row] = ""
        elif feed:
            row += 1
            lines += [""] * (row + 1 - len(lines))
        else:
            lines[row] += text.decode()
    return lines


def written(terminal: tuple[int, int]) -> bytes:
    """What has been written to the terminal since the last time."""
    ours, theirs = terminal
    os.write(theirs, b"\0")  # a pty passes data on later
    data = b""
    while not data.endswith(b"\0"):
        data += os.read(ours, 10_000)
    return data[:-1]


@pytest.fixture
def terminal():
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def test_output_scrolls_above_the_picture(terminal):
    theirs = terminal[1]
    out, err = Screen(theirs, {}), Screen(theirs, {})
    out.panel = err.panel = Panel(theirs)
    out.write(b"before\n")
    err.draw([b"picture 1", b"line 2"])
    RankStream(out, b"[0] ").feed(b"hello\n", now=0.0)
    err.draw([b"picture 2"])
    err.write(b"a warning\n")
    assert shown(written(terminal)) == ["before", "[0] hello", "a warning", "picture 2", ""]
    err.draw([])
    out.write(b"more\n")
    err.draw([b"picture 3"])
    err.panel.leave()
    out.write(b"the end\n")
    data = written(terminal)
    assert shown(b"picture 2\n" + data) == ["more", "picture 3", "the end", ""]
    assert b"\x1b[?25l" not in data  # the cursor is never hidden, so it need not be shown again


def test_after_something_else_has_written_the_picture_is_drawn_below_that(terminal):
    theirs = terminal[1]
    screen = Screen(theirs, {})
    screen.panel = Panel(theirs)
    screen.draw([b"old"])
    os.write(theirs, b"[1]+ Stopped\n")
    screen.panel.forget()
    screen.draw([b"new"])
    assert shown(written(terminal)) == ["old", "[1]+ Stopped", "new", ""]


def test_nothing_is_written_for_nothing(terminal):
    screen = Screen(terminal[1], {})
    screen.panel = Panel(terminal[1])
    screen.draw([b"x"])
    assert written(terminal) == b"x\r\n"
    screen.write(b"")
    assert written(terminal) == b""


def test_the_size_of_the_picture(terminal, monkeypatch):
    size = os.terminal_size((120, 31))
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: size)
    assert Panel(1).size == (119, 30)
    assert Panel(1, share=0.5).size == (119, 15)
    size = os.terminal_size((0, 0))  # a terminal that does not know
    assert Panel(1).size == (79, 23)


def test_without_a_terminal_there_is_no_picture(monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda fd: fd == 1)
    assert find_terminal({"TERM": "xterm"}) == 1
    assert find_terminal({"TERM": "dumb"}) is None
    assert find_terminal({}) is None
    monkeypatch.setattr(os, "isatty", lambda fd: False)
    assert find_terminal({"TERM": "xterm"}) is None
