"""``ModelMethod``, which loads and runs a method in memory of the caller."""

from __future__ import annotations

from pathlib import Path

from tests.firmware.programs import program
from tests.runtime.cpp_build import (
    RUNTIME,
    SANITIZERS,
    compile_cpp,
    executorch_include_flags,
    executorch_link_flags,
    run,
)


def test_without_a_method_it_returns_errors(tmp_path: Path) -> None:
    source = RUNTIME / "tests/firmware/model_method_test.cpp"
    flags = [*executorch_include_flags(), *SANITIZERS]
    test = compile_cpp(tmp_path / "model_method_test", [source], flags, link=executorch_link_flags())
    (tmp_path / "model.pte").write_bytes(program("quantized_u55").buffer)
    run([str(test), str(tmp_path / "model.pte")])
