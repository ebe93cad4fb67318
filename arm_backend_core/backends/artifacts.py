"""Intermediate artifacts: files of a delegate for the user, written on request or for a bug report after a failure."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from arm_backend_core.backends.payload import Payload
from arm_backend_core.backends.vela_estimates import VelaEstimates
from arm_backend_core.errors import ArmBackendError, CompileError
from arm_backend_core.targets.compile_spec import ArmCompileSpec
from arm_backend_core.tosa.graph import Graph

#: Finds the operator that a tool's message (the argument) names. Returns (ATen operator, source line of the user's
#: model), or None.
FindOperator = Callable[[str], "tuple[str, str] | None"]


def write_files(directory: str | Path, delegate: str, files: Mapping[str, bytes]) -> list[Path]:
    """Write each of ``files``, {suffix: content}, to ``<directory>/<delegate><suffix>``. Create the directory.

    Raises:
        ArmBackendError: the directory or a file cannot be written.
    """
    stem = re.sub(r"[^\w.-]", "_", delegate)
    paths = []
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        for suffix, content in files.items():
            path = Path(directory) / f"{stem}{suffix}"
            path.write_bytes(content)
            paths.append(path)
    except OSError as error:
        raise ArmBackendError(f"cannot write intermediate artifacts to '{directory}': {error.strerror}") from error
    return paths


def dump_artifacts(spec: ArmCompileSpec, delegate: str, flatbuffer: bytes, payload: Payload, graph: Graph) -> list[str]:
    """Write a delegate's artifacts, if ``spec`` names a folder; returns their paths.

    The files are ``<delegate>.tosa`` and the compiler's outputs: ``.vgf``, or ``_vela.npz``, ``_per-layer.csv`` and
    ``_vela.log`` (only if Vela printed something). Debug mode JSON adds ``<delegate>_debug.json``.

    Args:
        spec: the compile spec, with the folder and the debug mode.
        delegate: name of the delegate.
        flatbuffer: the TOSA flatbuffer.
        payload: the compiled delegate.
        graph: the graph that the flatbuffer was serialized from.

    Raises:
        ArmBackendError: a file cannot be written.
    """
    folder = spec.get_intermediate_path()
    if folder is None:
        return []
    files = {".tosa": flatbuffer, **payload.artifacts}
    if spec.debug_mode is spec.DebugMode.JSON:
        files["_debug.json"] = _debug_json(delegate, spec.backend_id, graph, payload.vela)
    return [str(path) for path in write_files(folder, delegate, files)]


def _debug_json(delegate: str, backend: str, graph: Graph, vela: VelaEstimates | None) -> bytes:
    """Origins of the TOSA operators and Vela's estimates, as JSON."""
    operators = [
        {"index": i, "tosa": op.kind, "output": op.output.name, **asdict(origin)}
        for i, op in enumerate(graph.ops)
        if (origin := op.origin)
    ]
    content = {"delegate": delegate, "backend": backend, "operators": operators, "vela": asdict(vela) if vela else None}
    return json.dumps(content, indent=2).encode()


def make_compile_error(
    reason: str, flatbuffer: bytes, *, delegate: str, directory: str | None, find_operator: FindOperator, log: str = ""
) -> CompileError:
    """Make the error for a delegate that a native compiler did not compile correctly, and save its flatbuffer.

    The flatbuffer goes to ``directory``. If that is None or cannot be written, the flatbuffer goes to a new temporary
    folder, which is not deleted.
    """
    files = {".tosa": flatbuffer}
    try:
        paths = write_files(directory or tempfile.mkdtemp(prefix="arm_backend_"), delegate, files)
    except ArmBackendError:
        paths = write_files(tempfile.mkdtemp(prefix="arm_backend_"), delegate, files)
    text = "\n".join(part for part in (reason.strip(), log.strip()) if part)
    operator, source = find_operator(text) or (None, None)
    return CompileError(text, delegate=delegate, operator=operator, source=source, artifact=str(paths[0]))
