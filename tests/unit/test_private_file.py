"""Whole files that only this user can read: planted links are replaced, never followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gradwire.runtime.private_file import read_private, write_private


def test_a_file_is_private_whole_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for data in (b"one", b"two" * 100_000):
        write_private(path, data)
        assert read_private(path) == data
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["x.json"]
    assert read_private(path, limit=3) == b"two"


def test_a_planted_link_is_replaced_and_not_read(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "x.json"
    victim.write_bytes(b"precious")
    path.symlink_to(victim)
    with pytest.raises(OSError):
        read_private(path)
    write_private(path, b"ours")
    assert (victim.read_bytes(), read_private(path), path.is_symlink()) == (b"precious", b"ours", False)


def test_directories_and_files_of_other_users_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_private(tmp_path / "x.json", b"ours")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="another user"):
        write_private(tmp_path / "y.json", b"")
    with pytest.raises(PermissionError, match="not a regular file of this user"):
        read_private(tmp_path / "x.json")
    assert os.listdir(tmp_path) == ["x.json"]


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.json")
    with pytest.raises(PermissionError):
        read_private(tmp_path / "x.json")
