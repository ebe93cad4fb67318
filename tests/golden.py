"""``python -m tests.golden FOLDER``: runs programs that others made for an Ethos-U, and compares with their results.

A folder holds ``.npz`` files with ``model`` (the bytes of a TFLite model that Vela compiled), ``input``, ``expected``;
or ``.tflite`` files, each with one of the same name that ends in ``.npz`` and has the other two. Of several inputs or
outputs the arrays are ``input0``, ``input1``, ``expected0`` and so on. Each program runs twice, once with its accesses
watched. What differs is told, and so is what nobody here can run; the exit code is then 1.
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


def cases(folder: Path) -> Iterator[tuple[str, bytes, Mapping[str, Array]]]:
    """Names, models and arrays, by name.

    Raises:
        ValueError: there are none, or a model has no arrays.
    """
    models = {path.stem for path in folder.glob("*.tflite")}
    paths = sorted([*folder.glob("*.tflite"), *(p for p in folder.glob("*.npz") if p.stem not in models)])
    if not paths:
        raise ValueError(f"'{folder}' has no .npz and no .tflite file")
    for path in paths:
        beside = path.with_suffix(".npz")
        if not beside.exists():
            raise ValueError(f"'{path}' has no '{beside.name}' beside it, with what it is given and what it gives")
        with np.load(beside, allow_pickle=False) as file:
            arrays = dict(file)
        model = arrays.pop("model").tobytes() if path == beside and "model" in arrays else path.read_bytes()
        yield path.name, model, arrays


def outcome(model: bytes, arrays: Mapping[str, Array]) -> str:
    """``equal``, or what is not."""
    try:
        program = VelaProgram(model)
        given = _side(arrays, "input", len(program.inputs))
        expected = _side(arrays, "expected", len(program.outputs))
        inputs = [_as(info, array) for info, array in zip(program.inputs, given, strict=True)]
        outputs = program.run_arrays(inputs)
        different = [_different(*pair) for pair in zip(outputs, expected, strict=True)]
        program.run_checked(inputs)
    except (RunError, ValueError) as error:
        return f"refused: {error}"
    return EQUAL if not any(different) else f"{sum(different):,} of {sum(x.nbytes for x in outputs):,} bytes differ"


def _side(arrays: Mapping[str, Array], name: str, count: int) -> Sequence[Array]:
    """One array, or those that are numbered."""
    numbered = {int(found[1]): array for key, array in arrays.items() if (found := re.fullmatch(rf"{name}(\d+)", key))}
    given = [arrays[name]] if name in arrays else [numbered[index] for index in sorted(numbered)]
    if len(given) != count:
        raise ValueError(f"the program takes {count} arrays '{name}', the file has: {', '.join(arrays)}")
    return given


def _as(info: Any, array: Array) -> Array:
    """The bytes as an input."""
    wanted = np.empty(info.shape, info.dtype)
    if array.nbytes != wanted.nbytes:
        raise ValueError(f"'{info.name}' must be {info}; the file has {array.nbytes:,} bytes")
    return np.frombuffer(array.tobytes(), info.dtype).reshape(info.shape)


def _different(ours: Array, theirs: Array) -> int:
    """How many bytes differ."""
    left, right = (np.frombuffer(array.tobytes(), np.uint8) for array in (ours, theirs))
    return int((left != right).sum()) if len(left) == len(right) else max(len(left), len(right))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all of a folder, prints a line for each; 1 if one is not equal."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    try:
        found = {name: outcome(model, arrays) for name, model, arrays in cases(folder)}
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    width = max(map(len, found))
    for name, told in found.items():
        print(f"{name:<{width}}  {told}")
    equal = sum(told == EQUAL for told in found.values())
    print(f"{equal} of {len(found)} equal")
    return int(equal < len(found))


if __name__ == "__main__":
    sys.exit(main())
