"""Output folder of ``save_firmware``: a call replaces the files of an earlier call, or fails if a user changed one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from arm_recipes._internal.files import check_writable, write_file_atomically

#: Manifest file: a summary, and names and SHA-256 of the files that ``save_firmware`` wrote to the folder.
MANIFEST = "firmware.json"
#: Key of the manifest during a write: the SHA-256 of the files of the earlier call, by name.
_PREVIOUS = "previous_sha256"


def check_output_folder(folder: str | Path) -> Path:
    """Check that firmware files can be written to a folder, and return its absolute path.

    Raises:
        ValueError: the path is a file, its parent does not exist, the folder is not writable, or it contains a file
            that ``save_firmware`` did not write, or that was changed after ``save_firmware`` wrote it.
    """
    target = Path(folder).expanduser().absolute()
    if not target.exists():
        if not target.parent.is_dir():
            raise ValueError(f"folder: cannot create '{folder}': there is no directory '{target.parent}'")
        return check_writable(target)
    if not target.is_dir():
        raise ValueError(f"folder: '{folder}' is a file; give a folder for the files")
    check_writable(target / MANIFEST)
    known = _read_manifest(target)
    for path in _list_files(target):
        name = path.relative_to(target).as_posix()
        if name not in known and name != MANIFEST:
            raise ValueError(
                f"folder: '{folder}' has '{name}', which save_firmware did not write: give a new or empty folder, or "
                "move that file away"
            )
        if name in known and _sha256(path.read_bytes()) not in known[name]:
            raise ValueError(
                f"folder: '{folder}' has '{name}', which has been changed since save_firmware wrote it: move it away, "
                "or give another folder"
            )
    return target


def write_output_folder(target: Path, contents: Mapping[str, bytes], summary: Mapping[str, Any]) -> None:
    """Write files and manifest, and remove files of an earlier call that are not among ``contents``.

    New and changed files are first written to a temporary folder. If that fails, for example because the disk is full,
    ``target`` is not changed. If a later step fails, another call can complete the write.

    Args:
        target: folder, a result of ``check_output_folder``.
        contents: path in the folder -> content of the file.
        summary: additional content of the manifest.

    Raises:
        OSError: a file cannot be written. The message names the file.
    """
    previous = _read_manifest(target)
    with _temporary_folder(target) as folder:
        changed = [name for name in contents if not _has_content(target / name, contents[name])]
        for name in changed:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            _write_to(folder / name, target / name, contents[name])
        _write_manifest(folder, target, _sha256_by_name(contents), summary)
        if not target.exists():
            folder.rename(target)
            return
        # First write a manifest that accepts old and new contents, so that an interrupted call can be repeated.
        known = {name: sorted(digests) for name, digests in sorted(previous.items())}
        _write_manifest(target, target, _sha256_by_name(contents), {**summary, _PREVIOUS: known})
        for name in changed:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).replace(target / name)
        for name in previous.keys() - contents.keys():
            (target / name).unlink(missing_ok=True)
            for parent in (target / name).relative_to(target).parents[:-1]:
                if not any((target / parent).iterdir()):
                    (target / parent).rmdir()
        (folder / MANIFEST).replace(target / MANIFEST)


@contextmanager
def _temporary_folder(target: Path) -> Iterator[Path]:
    """Create a folder beside ``target``, or inside it if ``target`` exists, and remove it after the block."""
    name = f".{target.name}.{os.getpid()}"
    folder = target / name if target.exists() else target.with_name(name)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _has_content(path: Path, content: bytes) -> bool:
    return path.exists() and path.read_bytes() == content


def _write_to(path: Path, final: Path, content: bytes) -> None:
    """Write a file. An error names its final path."""
    try:
        write_file_atomically(path, content)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(final)) from None


def _write_manifest(folder: Path, final: Path, digests: Mapping[str, str], summary: Mapping[str, Any]) -> None:
    content = json.dumps({**summary, "sha256": dict(sorted(digests.items()))}, indent=1) + "\n"
    _write_to(folder / MANIFEST, final / MANIFEST, content.encode())


def _sha256_by_name(contents: Mapping[str, bytes]) -> dict[str, str]:
    return {name: _sha256(content) for name, content in contents.items()}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read_manifest(target: Path) -> dict[str, set[str]]:
    """Read the SHA-256 hashes of the files that the manifest lists and that exist in the folder.

    After an interrupted write, a file may have two hashes: of its old and of its new content.
    """
    try:
        manifest = json.loads((target / MANIFEST).read_bytes())
        entries = [(name, [digest]) for name, digest in manifest["sha256"].items()]
        entries += manifest.get(_PREVIOUS, {}).items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    # Accept only files inside of the folder, so that a forged manifest cannot delete other files.
    inside = {path.relative_to(target).as_posix() for path in _list_files(target)}
    known: dict[str, set[str]] = {}
    for name, digests in entries:
        if name in inside:
            known.setdefault(name, set()).update(map(str, digests))
    return known


def _list_files(target: Path) -> list[Path]:
    return sorted(path for path in target.rglob("*") if not path.is_dir())
