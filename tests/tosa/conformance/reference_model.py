"""The TOSA reference model for all element types.

The Python binding has no elements of 48 or 4 bits. For those this module runs the reference model's program on files.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tosa_reference_model

from arm_backend_core.dtype import DType
from arm_backend_core.errors import ArmBackendError
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.graph import Graph, Value

Array = np.ndarray[Any, Any]
_PROGRAM = Path(tosa_reference_model.__file__).parents[1] / "bin" / "tosa_reference_model"
_FILE_DTYPES = (DType.INT48, DType.INT4)
#: Element types of the binding's arrays for formats that numpy lacks, by bytes per element.
_BITS: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16)}
_FORMATS = {DType.BF16: "bfloat16", DType.FP8E4M3: "float8_e4m3fn", DType.FP8E5M2: "float8_e5m2"}
#: Elements of 4 and 6 bits take one byte each in the arrays of the binding and the generator.
_FORMATS |= {DType.FP6E2M3: "float6_e2m3fn", DType.FP6E3M2: "float6_e3m2fn", DType.FP4E2M1: "float4_e2m1fn"}
_FORMATS |= {DType.FP8UE8M0: "float8_e8m0fnu"}


def run(flatbuffer: bytes, graph: Graph, inputs: Sequence[Array]) -> list[Array]:
    """Run a flatbuffer, from which ``graph`` was deserialized, and return the results bit for bit.

    Raises:
        ArmBackendError: the reference model refused the graph or an input.
    """
    if any(value.dtype in _FILE_DTYPES for value in (*graph.inputs, *graph.outputs)):
        return _run_on_files(flatbuffer, graph, inputs)
    return reference_model.run(flatbuffer, [_bits(array) for array in inputs])


def _bits(array: Array) -> Array:
    return array if array.dtype.kind in "biuf" and array.dtype.isbuiltin == 1 else array.view(_BITS[array.itemsize])


def _run_on_files(flatbuffer: bytes, graph: Graph, inputs: Sequence[Array]) -> list[Array]:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "test.tosa").write_bytes(flatbuffer)
        input_files, output_files = (
            [f"{side}-{i}.npy" for i in range(len(x))] for side, x in _inputs_and_outputs(graph)
        )
        for name, array, value in zip(input_files, inputs, graph.inputs, strict=True):
            np.save(directory / name, array.astype(np.int8) if value.dtype is DType.INT4 else _bits(array))
        description = {
            "tosa_file": "test.tosa",
            "ifm_name": [value.name for value in graph.inputs],
            "ifm_file": input_files,
            "ofm_name": [value.name for value in graph.outputs],
            "ofm_file": output_files,
            "expected_failure": False,
        }
        (directory / "desc.json").write_text(json.dumps(description))
        command = [str(_PROGRAM), "--test_desc", str(directory / "desc.json")]
        environment = {"PATH": ""}  # if an operator fails, the program would start gdb for a backtrace
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            raise ArmBackendError(f"the TOSA reference model ended with {done.returncode}: {done.stdout[-500:]}")
        return [np.load(directory / name) for name in output_files]


def _inputs_and_outputs(graph: Graph) -> list[tuple[str, list[Value]]]:
    return [("input", graph.inputs), ("output", graph.outputs)]


def to_constant_array(array: Array, dtype: DType) -> Array:
    """Convert an input or a result of the reference model to the array type that a graph's constants have."""
    if dtype in _FORMATS and array.dtype.kind != "f":
        import ml_dtypes

        array = np.ascontiguousarray(array).view(getattr(ml_dtypes, _FORMATS[dtype])).reshape(array.shape)
    return array.astype(dtype.numpy)
