"""Directories of runs: where `gradwire run` records, and which run a command means. Without torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from gradwire.errors import UsageError
from gradwire.observe.rings.ring import RingFile, state_of_writer
from gradwire.observe.rings.run_outcome import FILE
from gradwire.runtime.fault_record import FILE as FAULTS
from gradwire.runtime.host import ProcessState, clock_identity, process_start
from gradwire.runtime.private_file import write_private

KEPT = 20
_WEEK = 7 * 24 * 3600
LATEST = "latest"
_LAUNCHER = "launcher.json"
_NAME = re.compile(r"\d{8}-\d{6}-.+-\d+")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.]+")


def runs_directory(environ: Mapping[str, str]) -> Path:
    """Where runs are kept that were given no directory: under the user's state directory.

    >>> str(runs_directory({"XDG_STATE_HOME": "/var/me"}))
    '/var/me/gradwire/runs'
    """
    state = environ.get("XDG_STATE_HOME", "")
    base = Path(state) if os.path.isabs(state) else Path(environ.get("HOME") or os.path.expanduser("~"), ".local/state")
    return base / "gradwire" / "runs"


def new_run(runs: Path, script: str) -> Path:
    """A directory for a run of `script`, which is `latest` from now on. Of the earlier runs, all but the last 20 are removed,
    except those that still run."""
    name = _UNSAFE.sub("_", Path(script).stem) or "run"
    path = runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{os.getpid()}"
    path.mkdir(parents=True, mode=0o700)
    launcher = {"pid": os.getpid(), "process_start": process_start(os.getpid()) or "", "clock": clock_identity()}
    write_private(path / _LAUNCHER, json.dumps(launcher).encode())  # before its ranks write, it is in use already
    link = runs / f".{LATEST}.{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(path.name)
    os.replace(link, runs / LATEST)
    known = [one for one in runs.iterdir() if _NAME.fullmatch(one.name) and one.is_dir() and not one.is_symlink()]
    for old in sorted(known)[:-KEPT]:  # nothing else in there is touched
        if not _is_in_use(old):
            shutil.rmtree(old, ignore_errors=True)
    return path


def find_run(given: str | None, environ: Mapping[str, str]) -> Path:
    """The directory of the run that a command is about: `given`, or the latest."""
    if given is not None:
        if not Path(given).is_dir():
            what = f"{given} is not a directory" if Path(given).exists() else f"there is no directory {given}"
            raise UsageError(f"{what}. Name that of a run, or none for the latest.")
        return Path(given)
    latest = runs_directory(environ) / LATEST
    if not latest.is_dir():
        raise UsageError(f"there is no run in {latest.parent} yet. `gradwire run` records one; or name a directory.")
    return latest.resolve()


def start_time(run: Path) -> str:
    """When a run was started for which `new_run` has made the directory, in local time; empty for other directories.

    >>> start_time(Path("runs/20261116-074801-train-9793")), start_time(Path("mine"))
    ('2026-11-16 07:48:01', '')
    """
    if not _NAME.fullmatch(run.name):
        return ""
    date, clock = run.name[:8], run.name[9:15]
    return f"{date[:4]}-{date[4:6]}-{date[6:]} {clock[:2]}:{clock[2:4]}:{clock[4:]}"


def clear_run(run: Path) -> None:
    """Remove what an earlier run has recorded in `run`, which would be taken for ranks of the next one; unless it still runs."""
    (run / FILE).unlink(missing_ok=True)  # in any case, as the next run has yet to end
    if _is_in_use(run):
        return
    ours = [f"rank-*{suffix}" for suffix in (".ring", ".names", ".stacks", ".awaited", "error")]
    for kind in (*ours, "hang-*.json", FAULTS):
        for path in run.glob(kind):
            path.unlink(missing_ok=True)


def _is_in_use(run: Path) -> bool:
    """Whether the launcher or a rank of the run may be alive: for a week, if it is on another host that shares the directory."""
    try:
        if state_of_writer(json.loads((run / _LAUNCHER).read_text())) not in (ProcessState.GONE, ProcessState.UNKNOWN):
            return True
    except (OSError, KeyError, TypeError, ValueError):  # ranks record there without a launcher
        pass
    for path in run.glob("rank-*.ring"):
        try:
            with RingFile(path) as ring:
                state = state_of_writer(ring.header)
            recent = time.time() - path.stat().st_mtime < _WEEK
            if recent if state is ProcessState.UNKNOWN else state is not ProcessState.GONE:
                return True
        except (OSError, UsageError):  # not a ring that this version reads
            continue
    return False
