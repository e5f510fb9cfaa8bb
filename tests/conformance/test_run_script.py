"""A script under `gradwire run` behaves as under `python`, and what ends it reaches the launcher as data, never as text.

Every program runs both ways; its output, its standard error and its exit status must be equal. The class of defect behind it: an
exception that quotes a traceback, as those of torch's data loaders do, must not be taken for its own quotation.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.observe.rings.run_outcome import load
from gradwire.runtime.rank_error import MAIN, THREAD, RankError
from helpers.warm_python import GRADWIRE_RUN, WarmPython

LIMIT = 300
STARTS = {"script": ["script.py"], "module": ["-m", "script"], "in a package": ["-m", "package.script"]}

PROGRAMS = {
    "ends": "print(sys.argv[1:], __name__, __file__, sys.path[0], sys.argv[0], __spec__ and __spec__.name, __package__)\n"
    "import __main__; print(__main__.__dict__ is globals(), sys.modules['__main__'].__file__)\n"
    "import atexit, pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)\n"
    "atexit.register(lambda: print(pickle.dumps(A())))\n"
    "x: int = 3\nprint(__annotations__)",
    "raises": "def f():\n    raise ValueError('a teapot')\nf()",
    "raises from": "try:\n    {}[1]\nexcept KeyError as error:\n    raise RuntimeError('no') from error",
    "raises with notes": "error = ValueError('x')\nerror.add_note('a note')\nraise error",
    "raises what cannot be shown": "class E(Exception):\n    def __str__(self):\n        raise TypeError\nraise E",
    "does not compile": "def f(:",
    "exits": "sys.exit(7)",
    "exits with text": "sys.exit('no luck')",
    "exits with nothing": "sys.exit()",
    "exits at once": "os._exit(5)",
    "kills itself": "import signal; os.kill(os.getpid(), signal.SIGKILL)",
    "is interrupted": "raise KeyboardInterrupt",
    "replaces the hook": "def hook(kind, error, tb):\n    print(kind, error, tb.tb_frame.f_code.co_filename)\n"
    "sys.excepthook = hook\nraise ValueError('x')",
    "reads the last exception": "import atexit, traceback\n"
    "atexit.register(lambda: traceback.print_exception(sys.last_value, file=sys.stdout))\nraise ValueError('x')",
    "forks": "pid = os.fork()\nif pid: os.waitpid(pid, 0)\nelse: raise ValueError('in the child')",
    "spawns": "import multiprocessing\ndef f(x): return x + 1\nif __name__ == '__main__':\n"
    "    with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(f, [1]))",
    "a thread raises": "import threading\nt = threading.Thread(target=lambda: {}[1], name='loader')\nt.start(); t.join()",
    "starts as a process does": "import faulthandler, gc, signal, threading\nfrom pathlib import Path\n"
    "fds = {n: os.readlink(f'/proc/self/fd/{n}').partition(':')[0] for n in os.listdir('/proc/self/fd') if int(n) < 3}\n"
    "task, stdin = Path('/proc/self'), sys.stdin\n"
    "print(fds, len(os.listdir('/proc/self/fd')), os.listdir(task / 'task') == [str(os.getpid())], (task / 'comm').read_text())\n"
    "print(stdin is sys.__stdin__, stdin.name, stdin.mode, stdin.encoding, stdin.errors, stdin.seekable(), stdin.read())\n"
    "print([(s.name, s.mode, s.seekable(), s.line_buffering, s.write_through) for s in (sys.stdout, sys.stderr)])\n"
    "print({n: signal.getsignal(n) for n in signal.valid_signals()}, signal.pthread_sigmask(0, []), os.umask(0))\n"
    "print(gc.isenabled(), gc.get_threshold(), faulthandler.is_enabled(), sys.flags, sys.path, sys.warnoptions, os.getcwd())\n"
    "print(threading.main_thread().native_id == os.getpid())\n"
    "print(sys.executable, sys.gettrace(), threading.active_count(), [n for n in os.environ if 'PRELOAD' in n])",
    "uses a fork server": "import multiprocessing\ndef f(x): return x + 1\nif __name__ == '__main__':\n"
    "    child = multiprocessing.get_context('forkserver').Process(target=f, args=[1])\n"
    "    child.start(); child.join(); print(child.exitcode)",
    "a thread goes on": "import threading\ndef f():\n    threading.main_thread().join()\n    import __main__\n"
    "    print(__main__.x)\nx = 3\nthreading.Thread(target=f).start()",
}


FORKED = """
import sys
from gradwire.cli import main, run
run.preloaded_modules = lambda source: ["decimal"]
run.why_not_preload = lambda source: ""
sys.exit(main())
"""
"""`gradwire run` with ranks that are forks, of a process that has not imported torch, which takes seconds."""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run a program by `python`, or by `gradwire run`: exit status, output, standard error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").touch()

    def run(program: str, way: str, *options: str, ranks: int = 0, forked: bool = True) -> tuple[int, str, str]:
        for path in (tmp_path / "script.py", tmp_path / "package/script.py"):
            path.write_text("import os, sys\n" + program)
        gradwire = ["-c", FORKED] if forked else ["-m", "gradwire"]
        launcher = [*gradwire, "run", "-n", str(ranks), "--no-prefix", *options] if ranks else []
        if ranks and "--no-record" not in options:
            launcher += ["--run-dir", "run"]
        command = [sys.executable, *launcher, *STARTS[way], "--x", "-m", ""]
        environ = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT, env=environ, stdin=subprocess.DEVNULL, check=False
        )
        return done.returncode, done.stdout, done.stderr

    return run


AS_MODULES = [
    "ends", "raises", "raises what cannot be shown", "does not compile",
    "exits with text", "reads the last exception", "spawns", "a thread goes on",
]  # fmt: skip
"""What depends on how `__main__` was started. In a package, some of it is the same again."""
COLD = [
    "ends", "raises", "does not compile", "exits", "kills itself", "is interrupted", "forks", "spawns", "starts as a process does",
]  # fmt: skip
"""What depends on how a rank is started and ends; the others differ by code that both ways have in common."""
CASES = [
    *((name, "script") for name in PROGRAMS),
    *((name, "module") for name in AS_MODULES),
    *((name, "in a package") for name in ("ends", "raises", "does not compile")),
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_script_runs_as_under_python(name: str, way: str, start) -> None:
    status, out, err = start(PROGRAMS[name], way)
    for forked in (True, False)[: 2 if way == "script" and name in COLD else 1]:
        code, our_out, our_err = start(PROGRAMS[name], way, *["--no-preload"][forked:], ranks=1, forked=forked)
        assert code == (status if status >= 0 else 128 - status)
        assert our_out == out
        assert re.sub(r"gradwire run: .*\n", "", our_err) == err
        assert "gradwire/launch" not in our_err
        outcome = load(Path("run"))
        assert outcome is not None
        assert (outcome.cold == "") == forked, outcome.cold


QUOTING = '''
QUOTED = """Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "worker.py", line 3, in _worker_loop
    data = fetcher.fetch(index)
gradwire.errors.PeerLost: rank 1 is lost, quoted

Traceback (most recent call last):
  File "other.py", line 1, in <module>
KeyboardInterrupt
"""
import time
rank = int(os.environ["RANK"])
if rank == 0:
    raise RuntimeError(QUOTED)
time.sleep(100)
'''


@pytest.mark.parametrize("options", [[], ["--no-record"], ["--observe", "--replace-ddp"]], ids=" ".join)
def test_a_quoted_traceback_is_part_of_a_message(options: list[str], start, warm_python: WarmPython) -> None:
    if "--replace-ddp" in options:  # imports torch
        Path("script.py").write_text("import os\n" + QUOTING)
        done = warm_python.run(GRADWIRE_RUN, "-n", "2", "--run-dir", "run", *options, "script.py", timeout=LIMIT)
        code, err = done.returncode, done.stderr
    else:
        code, _, err = start(QUOTING, "script", *options, ranks=2)
    assert code == 1
    shown = err.partition("gradwire run: traceback of rank 0:\n")[2]
    assert shown.startswith("Traceback (most recent call last):\n")
    assert "    raise RuntimeError(QUOTED)\n" in shown  # the user's own line
    assert "RuntimeError: Caught ValueError in DataLoader worker process 0.\n" in shown
    assert "rank 0 failed first (exit code 1" in shown.splitlines()[-1]
    assert "rank 1 was stopped" in shown.splitlines()[-1]


CAUSED = """
import time
from gradwire.errors import CollectiveTimeout, NonFiniteGradient, PeerLost
rank = int(os.environ["RANK"])
if rank == 2:
    open("cause", "w").close()
    {cause}
while not os.path.exists("cause"):
    time.sleep(0.01)
{consequence}
"""


@pytest.mark.parametrize(
    ("cause", "consequence", "line"),
    [
        ("raise KeyError('x')", "raise PeerLost('who cares', rank=2)", "rank 2 failed first (exit code 1"),
        ("os._exit(9)", "raise PeerLost('who cares', rank=2)", "rank 2 failed first (exit code 9"),
        (
            "time.sleep(100)",
            "raise CollectiveTimeout('', missing=[2])",
            "rank 2 was missing (CollectiveTimeout on rank ",
        ),
        (
            "raise NonFiniteGradient('', rank=2, parameter='w', step=3)",
            "raise NonFiniteGradient('', rank=2, parameter='w', step=3)",
            "on rank 2 the gradient of w is not finite (NonFiniteGradient on rank 2",
        ),
        (
            "raise KeyError('x')",
            "try:\n    raise PeerLost('', rank=2)\nexcept PeerLost as error:\n    raise RuntimeError('my own') from error",
            "rank 2 failed first (exit code 1",
        ),
    ],
    ids=["lost", "exited", "missing", "NaN", "wrapped"],
)
def test_the_rank_that_errors_name_has_failed_first(cause: str, consequence: str, line: str, start) -> None:
    code, _, err = start(CAUSED.format(cause=cause, consequence=consequence), "script", ranks=3)
    assert code in (1, 9)
    assert err.splitlines()[-1].startswith(f"gradwire run: {line}"), err


def test_what_is_saved_of_an_exception(start, tmp_path: Path) -> None:
    start("from gradwire.errors import PeerLost\nraise PeerLost('gone', rank=1)", "script", ranks=1)
    error = RankError.load(tmp_path / "run", 0)
    assert error is not None
    assert (error.rank, error.name, error.module, error.text) == (0, "PeerLost", "gradwire.errors", "gone")
    assert (error.culprits, error.summary, error.consequence, error.starting) == ((1,), "rank 1 was lost", 2, False)
    assert error.traceback.endswith("gradwire.errors.PeerLost: gone\n")
    path = tmp_path / "run" / f"rank-0{MAIN}"
    assert path.stat().st_mode & 0o777 == 0o600
    start("", "script", ranks=1)
    assert not path.exists()  # an earlier run's


def test_the_first_exception_that_ends_a_thread_is_saved(start, tmp_path: Path) -> None:
    program = """
import threading
for key in (1, 2):
    thread = threading.Thread(target=lambda: {}[key], name=f"loader {key}")
    thread.start(); thread.join()
sys.exit(3)
"""
    code, _, err = start(program, "script", ranks=1)
    error = RankError.load(tmp_path / "run", 0, THREAD)
    assert error is not None
    assert (code, error.thread, error.name, error.text) == (3, "loader 1", "KeyError", "1")
    assert "gradwire run: on rank 0 the thread 'loader 1' ended with KeyError: 1\n" in err
    assert RankError.load(tmp_path / "run", 0) is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"rank": 0}', "\xff", json.dumps({"rank": 1, "culprits": 3})])
def test_what_cannot_be_read_is_no_error(text: str, tmp_path: Path) -> None:
    (tmp_path / f"rank-0{MAIN}").write_text(text)
    assert RankError.load(tmp_path, 0) is None
