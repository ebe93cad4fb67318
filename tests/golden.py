"""Golden tests: ``python -m tests.golden FOLDER`` runs others' Ethos-U programs and compares with their results.

A golden program is a TFLite model that Vela compiled, with inputs and expected outputs. It is either one ``.npz`` file
with the arrays ``model`` (the bytes), ``input`` and ``expected``, or a ``.tflite`` file with an ``.npz`` file of the
same name, which has the other two arrays. Several inputs or outputs are ``input0``, ``input1``, ``expected0`` and so
on. Each program runs twice; the access checker observes the second run. The report has a line for each program. The
exit code is 1 if a program differs or cannot run.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arm_recipes.runtime.errors import RunError
from arm_recipes.runtime.vela_program import VelaProgram

Array = np.ndarray[Any, Any]
EQUAL = "equal"


def read_programs(folder: Path) -> Iterator[tuple[str, bytes, Mapping[str, Array]]]:
    """Read the golden programs of a folder: file name, model and arrays by name; sorted by path.

    Raises:
        ValueError: the folder has no program, or a model has no arrays.
    """
    models = {path.stem for path in folder.glob("*.tflite")}
    paths = sorted([*folder.glob("*.tflite"), *(p for p in folder.glob("*.npz") if p.stem not in models)])
    if not paths:
        raise ValueError(f"'{folder}' has no .npz and no .tflite file")
    for path in paths:
        array_file = path.with_suffix(".npz")
        if not array_file.exists():
            raise ValueError(f"'{path}' has no '{array_file.name}' beside it with its inputs and expected outputs")
        with np.load(array_file, allow_pickle=False) as file:
            arrays = dict(file)
        model = arrays.pop("model").tobytes() if path == array_file and "model" in arrays else path.read_bytes()
        yield path.name, model, arrays


def compare_program(model: bytes, arrays: Mapping[str, Array]) -> str:
    """Run a program; return ``equal``, the number of bytes that differ, or the error."""
    try:
        program = VelaProgram(model)
        input_arrays = _select_arrays(arrays, "input", len(program.inputs))
        expected = _select_arrays(arrays, "expected", len(program.outputs))
        inputs = [_view_as(info, array) for info, array in zip(program.inputs, input_arrays, strict=True)]
        outputs = program.run_arrays(inputs)
        different_bytes = sum(_count_different_bytes(*pair) for pair in zip(outputs, expected, strict=True))
        program.run_checked(inputs)
    except (RunError, ValueError) as error:
        return f"refused: {error}"
    return f"{different_bytes:,} of {sum(x.nbytes for x in outputs):,} bytes differ" if different_bytes else EQUAL


def _select_arrays(arrays: Mapping[str, Array], name: str, count: int) -> Sequence[Array]:
    """Return the array of this name, or the numbered ones in order.

    Raises:
        ValueError: there are not ``count`` of them.
    """
    numbers = {int(match[1]): array for key, array in arrays.items() if (match := re.fullmatch(rf"{name}(\d+)", key))}
    selected = [arrays[name]] if name in arrays else [numbers[index] for index in sorted(numbers)]
    if len(selected) != count:
        raise ValueError(f"the program takes {count} arrays '{name}', the file has: {', '.join(arrays)}")
    return selected


def _view_as(info: Any, array: Array) -> Array:
    """View the bytes of an array in an input's dtype and shape.

    Raises:
        ValueError: the number of bytes differs.
    """
    if array.nbytes != np.empty(info.shape, info.dtype).nbytes:
        raise ValueError(f"'{info.name}' must be {info}; the file has {array.nbytes:,} bytes")
    return np.frombuffer(array.tobytes(), info.dtype).reshape(info.shape)


def _count_different_bytes(output: Array, expected: Array) -> int:
    """Count the bytes that differ; all of the longer array if the lengths differ."""
    left, right = (np.frombuffer(array.tobytes(), np.uint8) for array in (output, expected))
    return int((left != right).sum()) if len(left) == len(right) else max(len(left), len(right))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all programs of a folder and print a line for each. Returns 1 if one differs, 2 if the folder is unusable."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    try:
        outcomes = {name: compare_program(model, arrays) for name, model, arrays in read_programs(folder)}
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    width = max(map(len, outcomes))
    for name, outcome in outcomes.items():
        print(f"{name:<{width}}  {outcome}")
    equal = sum(outcome == EQUAL for outcome in outcomes.values())
    print(f"{equal} of {len(outcomes)} equal")
    return int(equal < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
