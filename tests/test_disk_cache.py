"""Disk cache: its folder, and files that are replaced atomically."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from arm_backend_core.disk_cache import cache_folder, write_atomically


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == tmp_path / ".cache/arm-recipes"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache/arm-recipes"


def test_a_user_without_a_home_directory_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers ignore an OSError. ``Path.home`` raises a RuntimeError, for example in a container with any user id."""
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(FileNotFoundError, match="Set XDG_CACHE_HOME to a folder"):
        cache_folder()


def test_a_file_is_replaced_and_has_the_mode_of_any_new_file(tmp_path: Path) -> None:
    target, other = tmp_path / "target", tmp_path / "other"
    other.touch()
    target.write_bytes(b"before")
    write_atomically(target, b"af", memoryview(b"ter"))
    assert target.read_bytes() == b"after"
    assert target.stat().st_mode == other.stat().st_mode
    assert sorted(os.listdir(tmp_path)) == ["other", "target"]


def test_a_failure_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"before")

    def fail(source: str, target: Path) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_atomically(target, b"after")
    assert target.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["target"]
