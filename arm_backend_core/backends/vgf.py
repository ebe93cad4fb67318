"""VGF backend: convert a TOSA flatbuffer to a VGF file with the ML SDK model converter."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from arm_backend_core.backends.artifacts import FindOperator, make_compile_error
from arm_backend_core.backends.payload import Payload
from arm_backend_core.workers.model_converter import check_converter, find_converter, run_converter
from arm_backend_core.workers.worker import describe_exit

if TYPE_CHECKING:
    from arm_backend_core.targets.compile_spec import VgfCompileSpec

#: Prefixes of lines that the converter prints for every TOSA 1.0 flatbuffer; an error message omits them.
_ROUTINE_WARNINGS = ("WARNING: Different TOSA spec", "INFO: TOSA file created with older", "Warning: will overwrite")


def compile_vgf(
    flatbuffer: bytes,
    spec: VgfCompileSpec,
    *,
    delegate: str,
    find_operator: FindOperator,
    timeout: float | None = 1800.0,
) -> Payload:
    """Convert a TOSA 1.0 flatbuffer to a VGF file.

    Args:
        flatbuffer: the TOSA graph.
        spec: the compile spec, with the converter's flags.
        delegate: name of the delegate, for errors.
        find_operator: finds the ATen operator and source line that the converter's message is about.
        timeout: seconds after which the converter is stopped; None disables it.

    Raises:
        CompileError: the converter refused the flatbuffer, crashed on it, or took too long.
        ArmBackendError: there is no usable converter.
    """
    flags = tuple(spec.compiler_flags)
    check_converter(flags)
    with tempfile.TemporaryDirectory(prefix="arm_backend_") as folder:
        source, result_file = Path(folder) / "delegate.tosa", Path(folder) / "delegate.vgf"
        source.write_bytes(flatbuffer)
        log = ""
        try:
            result = run_converter([find_converter(), *flags, "-i", str(source), "-o", str(result_file)], timeout)
        except subprocess.TimeoutExpired:
            reason = f"the model converter did not finish within {timeout:g} s"
        else:
            if result.returncode == 0 and result_file.exists():
                data = result_file.read_bytes()
                return Payload(data, artifacts={".vgf": data} if spec.get_intermediate_path() else {})
            reason = f"the model converter {describe_exit(result.returncode)}"
            lines = (result.stderr + b"\n" + result.stdout).decode(errors="replace").splitlines()
            log = "\n".join(line for line in lines if line.strip() and not line.startswith(_ROUTINE_WARNINGS))
    raise make_compile_error(
        reason,
        flatbuffer,
        delegate=delegate,
        directory=spec.get_intermediate_path(),
        find_operator=find_operator,
        log=log,
    )
