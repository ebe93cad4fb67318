"""Output folder of ``save_firmware``: every export rewrites its files, unless a user has changed one of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arm_recipes._internal.files import check_writable, write

#: Manifest file: names and SHA-256 of the files that ``save_firmware`` wrote to the folder.
MANIFEST = "firmware.json"


def check_output_folder(folder: str | Path, what: str = "folder") -> Path:
    """Check that firmware files can be written to a folder, and return its absolute path.

    Raises:
        ValueError: the path is a file, its parent does not exist, or the folder contains a file that ``save_firmware``
            did not write, or that has changed since.
    """
    target = Path(folder).expanduser().absolute()
    if not target.exists():
        if not target.parent.is_dir():
            raise ValueError(f"{what}: cannot create '{folder}': there is no directory '{target.parent}'")
        return check_writable(target)
    if not target.is_dir():
        raise ValueError(f"{what}: '{folder}' is a file; give a folder for the files")
    check_writable(target / MANIFEST)
    known = _read_manifest(target)
    for path in _list_files(target):
        name = path.relative_to(target).as_posix()
        if name not in known and name != MANIFEST:
            raise ValueError(
                f"{what}: '{folder}' has '{name}', which save_firmware did not write: give a new or empty folder, or "
                "move that file away"
            )
        if name in known and _sha256(path.read_bytes()) != known[name]:
            raise ValueError(
                f"{what}: '{folder}' has '{name}', which has been changed since save_firmware wrote it: move it away, "
                "or give another folder"
            )
    return target


def write_output_folder(target: Path, contents: Mapping[str, bytes], summary: Mapping[str, Any]) -> None:
    """Write files and manifest, and remove files of an earlier call that are not among ``contents``.

    Args:
        target: folder, a result of ``check_output_folder``.
        contents: path in the folder -> content of the file.
        summary: additional content of the manifest.
    """
    target.mkdir(exist_ok=True)
    previous = _read_manifest(target)
    # Write a manifest with old and new files first, so that an interrupted call can be repeated.
    _write_manifest(target, {**previous, **_sha256_by_name(contents)}, summary)
    for name, content in contents.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != content:
            write(path, content)
    for name in previous.keys() - contents.keys():
        (target / name).unlink(missing_ok=True)
        for parent in (target / name).relative_to(target).parents[:-1]:
            if not any((target / parent).iterdir()):
                (target / parent).rmdir()
    _write_manifest(target, _sha256_by_name(contents), summary)


def _write_manifest(target: Path, digests: Mapping[str, str], summary: Mapping[str, Any]) -> None:
    write(
        target / MANIFEST, (json.dumps({**summary, "sha256": dict(sorted(digests.items()))}, indent=1) + "\n").encode()
    )


def _sha256_by_name(contents: Mapping[str, bytes]) -> dict[str, str]:
    return {name: _sha256(content) for name, content in contents.items()}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read_manifest(target: Path) -> dict[str, str]:
    try:
        known = json.loads((target / MANIFEST).read_bytes())["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if not isinstance(known, dict):
        return {}
    # Accept only files inside of the folder, so that a forged manifest cannot delete other files.
    inside = {path.relative_to(target).as_posix() for path in _list_files(target)}
    return {str(name): str(digest) for name, digest in known.items() if name in inside}


def _list_files(target: Path) -> list[Path]:
    return sorted(path for path in target.rglob("*") if not path.is_dir())
