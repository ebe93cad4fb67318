"""Files about a delegate: those that the user asked for, and those that a failure leaves behind."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from arm_backend_core.backends.payload import VelaFigures
from arm_backend_core.errors import ArmBackendError, CompileError

#: Finds what a tool's message is about: text -> (ATen operator, line of the user's model).
Locate = Callable[[str], "tuple[str, str] | None"]


@dataclass(frozen=True)
class Origin:
    """Where a TOSA operator comes from.

    Attributes:
        tosa: TOSA operator, for example ``CONV2D``.
        output: name of its result in the flatbuffer.
        aten: ATen operator.
        node: node of the exported program.
        source: line of the user's model.
    """

    tosa: str
    output: str
    aten: str
    node: str
    source: str


def write(directory: str | Path, delegate: str, files: Mapping[str, bytes]) -> list[Path]:
    """Write ``<delegate><suffix>`` for each of ``files`` (suffix -> content); makes the directory.

    Raises:
        ArmBackendError: the directory or a file cannot be written.
    """
    stem = re.sub(r"[^\w.-]", "_", delegate)
    written = []
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        for suffix, content in files.items():
            path = Path(directory) / f"{stem}{suffix}"
            path.write_bytes(content)
            written.append(path)
    except OSError as error:
        raise ArmBackendError(f"cannot write intermediate artifacts to '{directory}': {error.strerror}") from error
    return written


def debug_json(delegate: str, backend: str, origins: Sequence[Origin], vela: VelaFigures | None) -> bytes:
    """Which ATen node each TOSA operator comes from, with Vela's figures, as JSON."""
    content = {
        "delegate": delegate,
        "backend": backend,
        "operators": [{"index": index, **asdict(origin)} for index, origin in enumerate(origins)],
        "vela": asdict(vela) if vela else None,
    }
    return json.dumps(content, indent=2).encode()


def failure(
    reason: str, flatbuffer: bytes, *, delegate: str, directory: str | None, locate: Locate, log: str = ""
) -> CompileError:
    """The error for a delegate that a native compiler refused or died on; keeps the flatbuffer.

    It goes to ``directory``, or to a new folder for temporary files, which is left there.
    """
    files = {".tosa": flatbuffer}
    try:
        kept = write(directory or tempfile.mkdtemp(prefix="arm_backend_"), delegate, files)
    except ArmBackendError:
        kept = write(tempfile.mkdtemp(prefix="arm_backend_"), delegate, files)
    text = "\n".join(part for part in (reason.strip(), log.strip()) if part)
    operator, source = locate(text) or (None, None)
    return CompileError(text, delegate=delegate, operator=operator, source=source, artifact=str(kept[0]))
