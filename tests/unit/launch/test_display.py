"""A picture below the output: what a terminal shows in the end."""

import os
import pty
import re

import pytest
from rich.console import Group

from gradwire.launch.display import Panel, find_terminal
from gradwire.launch.screen import RankStream, Screen


def shown(data: bytes) -> list[str]:
    """What a terminal of unlimited height shows: it knows line feeds, carriage returns, "up" and "erase the line"."""
    lines, row = [""], 0
    for up, erase, feed, text in re.findall(rb"\x1b\[(\d+)A|(\x1b\[2K)|(\r?\n)|([^\r\n\x1b]+)", data):
        if up:
            row -= int(up)
        elif erase:
            lines[row] = ""
        elif feed:
            row += 1
            lines += [""] * (row + 1 - len(lines))
        else:
            lines[row] += text.decode()
    while lines and not lines[-1]:
        lines.pop()
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


@pytest.fixture
def screen(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    return Screen(terminal[1], {})


def draw(panel, *lines):
    panel.draw(lambda columns, height: Group(*lines))


def test_output_scrolls_above_the_picture(terminal, screen):
    out, panel = Screen(terminal[1], {}), Panel(screen)
    out.above = screen.above = panel.above
    out.write(b"before\n")
    draw(panel, "picture 1", "line 2")
    RankStream(out, b"[0] ").feed(b"hello \x1b[31mred\x1b[0m " + b"long " * 40 + b"\n", now=0.0)
    draw(panel, "picture 2")
    screen.write(b"a warning\n")
    long = "[0] hello [31mred[0m " + "long " * 40 + "[0m"
    data = written(terminal)
    assert shown(re.sub(rb"\x1b(\[\d+m)", rb"\1", data)) == ["before", long, "a warning", "picture 2"]
    draw(panel)
    out.write(b"more\n")
    draw(panel, "picture 3")
    panel.leave()
    out.write(b"the end\n")
    data += written(terminal)
    assert shown(data)[-4:] == ["a warning", "more", "picture 3", "the end"]
    assert b"\x1b[?" not in data  # the cursor is never hidden, so it need not be shown again


def test_what_is_not_utf_8_is_written_as_it_is(terminal, screen):
    panel = Panel(screen)
    draw(panel, "x")
    panel.above(b"\xff\xfe\n")
    assert b"\xff\xfe\r\n" in written(terminal)


def test_after_something_else_has_written_the_picture_is_drawn_below_that(terminal, screen):
    panel = Panel(screen)
    draw(panel, "old")
    os.write(terminal[1], b"[1]+ Stopped\n")
    panel.leave()
    draw(panel, "new")
    assert shown(written(terminal)) == ["old", "[1]+ Stopped", "new"]


def test_the_size_of_the_picture(screen, monkeypatch):
    found = []

    def picture(*size):
        found.append(size)
        return ""

    for name, value in (("COLUMNS", "120"), ("LINES", "31")):
        monkeypatch.setenv(name, value)
    Panel(screen).draw(picture)
    Panel(screen, share=0.5).draw(picture)
    assert found == [(119, 30), (119, 15)]


def test_without_a_terminal_there_is_no_picture(monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda fd: fd == 1)
    assert find_terminal({"TERM": "xterm"}) == 1
    assert find_terminal({"TERM": "dumb"}) is None
    assert find_terminal({}) is None
    monkeypatch.setattr(os, "isatty", lambda fd: False)
    assert find_terminal({"TERM": "xterm"}) is None
