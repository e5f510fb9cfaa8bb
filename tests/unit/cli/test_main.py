"""The command itself: help, version, errors and exit codes."""

import re

import pytest

import gradwire
from gradwire.cli import demo, main
from gradwire.errors import GroupError, UsageError
from gradwire.testing import kinds


def test_help_of_every_command_fits_a_terminal_of_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    commands: list[list[str]] = [[]]
    for words in commands:  # which grows: a command is followed by its own commands
        with pytest.raises(SystemExit) as ending:
            main([*words, "--help"])
        assert ending.value.code == 0
        out = capsys.readouterr().out
        assert len(out.splitlines()) > 10, words
        assert max(map(len, out.splitlines())) < 80, words
        assert "%%" not in out, words  # argparse formats help texts, and not descriptions
        listed = re.split(r"^  (?:COMMAND|WHAT)$", out, flags=re.MULTILINE)[1:]
        commands += [[*words, name] for text in listed for name in re.findall(r"^    (\w+)", text, re.MULTILINE)]
    assert ["demo"] in commands


def test_help_of_the_demo_names_every_kind(capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    assert ", ".join(kinds()) in " ".join(capsys.readouterr().out.split())


def test_version(capsys):
    with pytest.raises(SystemExit) as ending:
        main(["--version"])
    assert ending.value.code == 0
    assert capsys.readouterr().out == f"gradwire {gradwire.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["demo", "--ranks", "0"], "argument --ranks: '0' is not a whole number of 1 or more"),
        (["demo", "--steps", "many"], "argument --steps: 'many' is not a whole number of 1 or more"),
        (["demo", "--seed", "-1"], "argument --seed: '-1' is not a whole number of 0 or more"),
        (["run", "--log_dir"], "argument --log-dir: expected one argument"),
        (["demo", "--size", "huge"], "argument --size: invalid choice: 'huge'"),
    ],
)
def test_a_wrong_argument_is_named(argv, message, capsys):
    with pytest.raises(SystemExit) as ending:
        main(argv)
    assert ending.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert re.search(r"\. See gradwire( \w+)? --help\.$", line)


def _fail(args):
    error = UsageError("reading the text: there is none. Write some.")
    error.add_note("raised on rank 1 of 2")
    raise error


def test_an_error_of_the_world_is_exit_code_1(capsys, monkeypatch):
    def fail(args):
        raise GroupError("the network is down. Wait.")

    monkeypatch.setattr(demo, "run", fail)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err.startswith("gradwire: GroupError: the network is down. Wait.\n(--debug")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--fast"], "gradwire: error: the following arguments are required: COMMAND. See gradwire --help.\n"),
        (["demo", "--fast"], "gradwire demo: error: unrecognized arguments: --fast. See gradwire demo --help.\n"),
    ],
)
def test_an_unknown_option_is_one_line_of_its_command(argv, message, capsys):
    with pytest.raises(SystemExit) as ending:
        main(argv)
    assert ending.value.code == 2
    assert capsys.readouterr().err == message


def test_a_wrong_use_is_one_message_and_exit_code_2(capsys, monkeypatch):
    monkeypatch.setattr(demo, "run", _fail)
    assert main(["demo"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "gradwire: UsageError: reading the text: there is none. Write some."
    assert lines[1] == "  raised on rank 1 of 2"
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize("argv", [["--debug", "demo"], ["demo", "--debug"]])
def test_debug_lets_the_error_through(argv, monkeypatch):
    monkeypatch.setattr(demo, "run", _fail)
    with pytest.raises(UsageError, match="there is none"):
        main(argv)


def test_an_interrupt_is_exit_code_130(capsys, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert main(["demo"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_closed_pipe_that_rich_notices_is_exit_code_141(monkeypatch):
    def show(args):
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            raise SystemExit(1)  # noqa: B904 -- as rich does

    monkeypatch.setattr(demo, "run", show)
    assert main(["demo"]) == 141


def test_an_error_of_the_system_is_one_line_unless_debugged(capsys, monkeypatch):
    def fail(args):
        raise FileNotFoundError(2, "No such file or directory", "/gone")

    monkeypatch.setattr(demo, "run", fail)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == (
        "gradwire: FileNotFoundError: [Errno 2] No such file or directory: '/gone'\n(--debug shows the traceback)\n"
    )
    with pytest.raises(FileNotFoundError):
        main(["--debug", "demo"])
