"""Golden tests (``python -m tests.golden``): the report on equal, different and unusable programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.golden import main
from tests.runtime.command_stream_builder import CommandStreamBuilder
from tests.runtime.copy_programs import make_copy_program
from tests.runtime.ethosu_emulator import Payload
from tests.runtime.tflite_writer import TfliteOperator, TfliteTensor, wrap_command_stream

X = np.arange(-8, 8, dtype=np.int8)


def _model(**options: Any) -> bytes:
    """A program that copies 16 bytes within the arena."""
    return wrap_command_stream(make_copy_program("ethos-u65-256", region=1), *_tensors(), **options)


def _tensors() -> tuple[list[TfliteTensor], list[TfliteTensor]]:
    return [TfliteTensor("x", "int8", (16,), 1.0)], [TfliteTensor("y", "int8", (16,), 1.0)]


def _write(folder: Path, name: str, model: bytes, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
    np.savez(folder / name, model=np.frombuffer(model, np.uint8), input=x.view(np.uint8), expected=y)


def _run(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    code = main([str(folder)])
    return code, capsys.readouterr().out.splitlines()


def test_equal_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path, "first.npz", _model(), X, X)
    (tmp_path / "second.tflite").write_bytes(_model())
    np.savez(tmp_path / "second.npz", input0=X, expected0=X)
    assert _run(tmp_path, capsys) == (0, ["first.npz      equal", "second.tflite  equal", "2 of 2 equal"])


def test_different_and_refused_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path, "a.npz", _model(), X, X)
    _write(tmp_path, "b.npz", _model(), X, np.where(X < -5, 0, X).astype(np.int8))
    _write(tmp_path, "c.npz", _model(operators=[TfliteOperator("mine", (3,), (4,))]), X, X)
    _write(tmp_path, "d.npz", _model(), X[1:], X)
    _write(tmp_path, "e.npz", _model(), X, X[1:])
    np.savez(tmp_path / "f.npz", model=np.frombuffer(_model(), np.uint8), input=X)
    _write(
        tmp_path,
        "g.npz",
        wrap_command_stream(Payload(CommandStreamBuilder("ethos-u65-256").stream, bytes(16), 16, (), ()), [], []),
        X,
        X,
    )
    code, lines = _run(tmp_path, capsys)
    assert code == 1
    assert lines == [
        "a.npz  equal",
        "b.npz  3 of 16 bytes differ",
        "c.npz  refused: Vela left these TFLite operators on the CPU, but this runtime executes "
        "only operators for the NPU: mine",
        "d.npz  refused: 'x' must be int8[16] scale=1 zero_point=0; the file has 15 bytes",
        "e.npz  16 of 16 bytes differ",
        "f.npz  refused: the program takes 1 arrays 'expected', the file has: input",
        "g.npz  refused: the program takes 0 arrays 'input', the file has: input, expected",
        "1 of 7 equal",
    ]


def test_missing_waits_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal bytes do not suffice: on a device the accesses may occur in another order."""
    _write(
        tmp_path,
        "a.npz",
        wrap_command_stream(make_copy_program("ethos-u65-256", region=1, waits=False), *_tensors()),
        X,
        X,
    )
    code, (line, _) = _run(tmp_path, capsys)
    assert code == 1
    assert line.startswith(
        "a.npz  refused: a program for Ethos-U65-256 failed. In its command stream, NPU_OP_DMA_START"
    )
    assert line.endswith("a wait is missing")


def test_folders_without_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "has no .npz and no .tflite file" in capsys.readouterr().err
    (tmp_path / "a.tflite").write_bytes(_model())
    assert main([str(tmp_path)]) == 2
    assert "has no 'a.npz' beside it" in capsys.readouterr().err
