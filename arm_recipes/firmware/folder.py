"""A folder that belongs to us: written anew with each export, as long as nobody changed a file in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arm_recipes._internal.files import check_writable, write

#: What tells of the files that the folder had from us, with their SHA-256.
MANIFEST = "firmware.json"


def check_folder(folder: str | Path, what: str = "folder") -> Path:
    """The folder, absolute, after finding out that our files can be put there.

    Raises:
        ValueError: it is a file, there is none to make it in, it holds files that are not ours, or one of ours has
            been changed.
    """
    target = Path(folder).expanduser().absolute()
    if not target.exists():
        if not target.parent.is_dir():
            raise ValueError(f"{what}: cannot make '{folder}': there is no directory '{target.parent}'")
        return check_writable(target)
    if not target.is_dir():
        raise ValueError(f"{what}: '{folder}' is a file; give the folder that the files go to")
    check_writable(target / MANIFEST)
    known = _read_manifest(target)
    for path in _files(target):
        name = path.relative_to(target).as_posix()
        if name not in known and name != MANIFEST:
            raise ValueError(
                f"{what}: '{folder}' has '{name}', which save_firmware did not write: give a new or empty folder, or "
                "move that file away"
            )
        if name in known and _digest(path.read_bytes()) != known[name]:
            raise ValueError(
                f"{what}: '{folder}' has '{name}', which has been changed since save_firmware wrote it: move it away, "
                "or give another folder"
            )
    return target


def write_folder(target: Path, contents: Mapping[str, bytes], told: Mapping[str, Any]) -> None:
    """Write the files and the manifest, and remove those that an earlier call wrote and this one does not.

    Args:
        target: as ``check_folder`` returned it.
        told: what the manifest tells beside the files.
    """
    target.mkdir(exist_ok=True)
    before = _read_manifest(target)
    # First, with the old files and the new: what is broken off here can be done again.
    _write_manifest(target, {**before, **_digests(contents)}, told)
    for name, content in contents.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != content:
            write(path, content)
    for name in before.keys() - contents.keys():
        (target / name).unlink(missing_ok=True)
        for parent in (target / name).relative_to(target).parents[:-1]:
            if not any((target / parent).iterdir()):
                (target / parent).rmdir()
    _write_manifest(target, _digests(contents), told)


def _write_manifest(target: Path, digests: Mapping[str, str], told: Mapping[str, Any]) -> None:
    write(target / MANIFEST, (json.dumps({**told, "sha256": dict(sorted(digests.items()))}, indent=1) + "\n").encode())


def _digests(contents: Mapping[str, bytes]) -> dict[str, str]:
    return {name: _digest(content) for name, content in contents.items()}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read_manifest(target: Path) -> dict[str, str]:
    try:
        known = json.loads((target / MANIFEST).read_bytes())["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if not isinstance(known, dict):
        return {}
    # Names of files in the folder alone: what another hand wrote there shall not have others removed.
    inside = {path.relative_to(target).as_posix() for path in _files(target)}
    return {str(name): str(digest) for name, digest in known.items() if name in inside}


def _files(target: Path) -> list[Path]:
    return sorted(path for path in target.rglob("*") if not path.is_dir())
