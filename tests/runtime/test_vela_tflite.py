"""TFLite models that Vela compiled: read, run and told what is wrong with them."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arm_backend_core.backends.ethosu import compile_ethosu
from arm_backend_core.dtype import DType
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_backend_core.tosa import reference
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value
from arm_recipes.runtime.errors import PayloadError, RunError
from arm_recipes.runtime.vela_program import VelaProgram
from arm_recipes.runtime.vela_tflite import read_vela_tflite
from tests.graphs import program
from tests.runtime.ethosu_emulator import Payload, read_payload
from tests.runtime.tflite_models import (
    TfliteTensor,
    around,
    convolution_constants,
    convolutions,
)

ACCELERATORS = ("ethos-u55-128", "ethos-u65-256", "ethos-u65-512", "ethos-u85-256", "ethos-u85-2048")
_SHAPES = ((1, 5, 6, 2), (1, 5, 6, 3))


def _convolution(b: Builder, x: Value, y: Value) -> Value:
    weight = b.const(np.arange(-27, 27).reshape(3, 3, 3, 2), DType.INT8)
    sums = b.conv2d(x, weight, b.const([5, -5, 9], DType.INT32), pad=(1, 1, 1, 1))
    return b.rescale(b.add(sums, b.rescale(y, DType.INT32, 100.0)), DType.INT8, 0.01)


@cache
def _flatbuffer() -> bytes:
    return program(_convolution, (_SHAPES[0], DType.INT8), (_SHAPES[1], DType.INT8))


@cache
def _payload(accelerator: str) -> Payload:
    spec = EthosUCompileSpec(accelerator)
    return read_payload(compile_ethosu(_flatbuffer(), spec, delegate="", locate=lambda _: None).data)


def _inputs() -> tuple[TfliteTensor, ...]:
    return TfliteTensor("image", "int8", _SHAPES[0], 0.5, 3), TfliteTensor("offset", "int8", _SHAPES[1], 0.25, -7)


def _outputs() -> tuple[TfliteTensor, ...]:
    return (TfliteTensor("result", "int8", _SHAPES[1], 0.125, -128),)


def _model(accelerator: str = "ethos-u55-128", **options: Any) -> bytes:
    if "u65" in accelerator:  # its default memory mode has fast scratch
        options = {"fast_scratch": 1 << 20} | options
    return around(_payload(accelerator), _inputs(), _outputs(), **options)


def _arrays(seed: int = 0) -> list[np.ndarray[Any, Any]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(-128, 128, shape).astype(np.int8) for shape in _SHAPES]


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_it_runs_as_its_graph_does(accelerator: str) -> None:
    loaded = VelaProgram(_model(accelerator))
    for seed in range(2):
        arrays = _arrays(seed)
        (expected,) = reference.run(_flatbuffer(), arrays)
        (result,) = loaded.run_arrays(arrays)
        assert np.array_equal(result, expected)
        assert loaded.watched(arrays).operations > 1
        tensors = list(map(torch.from_numpy, arrays))
        assert torch.equal(loaded.run(*tensors)[0], torch.from_numpy(expected))
        assert torch.equal(loaded.run(tensors[0], offset=tensors[1])[0], torch.from_numpy(expected))
        *_, last = loaded.trace(*tensors)
        assert torch.equal(last.integers.reshape(expected.shape), torch.from_numpy(expected))


def test_what_is_told_of_it() -> None:
    data, payload = _model(), _payload("ethos-u55-128")
    model = read_vela_tflite(data)
    assert (model.description, model.operators, model.arena_bytes) == ("made for a test", (), payload.scratch)
    assert [str(info) for info in (*model.inputs, *model.outputs)] == [
        "int8[1, 5, 6, 2] scale=0.5 zero_point=3",
        "int8[1, 5, 6, 3] scale=0.25 zero_point=-7",
        "int8[1, 5, 6, 3] scale=0.125 zero_point=-128",
    ]
    assert [info.name for info in model.inputs] == ["image", "offset"]
    (operator,) = model.npu
    told = operator.parts.payload
    assert (told.product, told.macs, told.stream) == (55, 128, "COP1")
    assert (told.command_bytes, told.weight_bytes) == (len(payload.commands), len(payload.weights))
    assert [place.offset for place in model.input_places] == [place.offset for place in payload.inputs]


def test_runs_leave_no_traces() -> None:
    loaded = VelaProgram(_model())
    first = loaded.run_arrays(_arrays(0))
    second = loaded.run_arrays(_arrays(1))
    assert not np.array_equal(first[0], second[0])
    assert np.array_equal(loaded.run_arrays(_arrays(0))[0], first[0])


def test_samples_one_after_the_other() -> None:
    loaded = VelaProgram(_model())
    samples = [tuple(map(torch.from_numpy, _arrays(seed))) for seed in range(3)]
    found = list(loaded.run_batch([*samples[:2], {"image": samples[2][0], "offset": samples[2][1]}]))
    assert all(torch.equal(output[0], loaded.run(*sample)[0]) for output, sample in zip(found, samples, strict=True))
    with pytest.raises(ValueError, match=r"^sample 1: .*'offset' is missing"):
        list(loaded.run_batch([samples[0], {"image": samples[0][0]}]))


def test_inputs_that_it_does_not_take() -> None:
    loaded = VelaProgram(_model())
    image, offset = map(torch.from_numpy, _arrays())
    with pytest.raises(ValueError, match=r"takes 2 inputs \(image: int8\[1, 5, 6, 2\] .*got 1"):
        loaded.run(image)
    with pytest.raises(ValueError, match=r"input 0 \('image'\) must be .*; quantize real numbers with inputs\[0\]"):
        loaded.run(image.float(), offset)
    with pytest.raises(ValueError, match="no method 'other'; a TFLite model has: forward"):
        loaded.run(image, offset, method="other")
    with pytest.raises(ValueError, match=r"input 1 \('offset'\) must be .*got int8\[1, 5, 6, 2\]"):
        loaded.run_arrays([image.numpy(), image.numpy()])
    with pytest.raises(ValueError, match="takes 2 inputs, got 1"):
        loaded.run_arrays([image.numpy()])


# Memory.


def test_fast_scratch_is_a_memory_of_its_own() -> None:
    """Where it is a tensor of its own. As large as the stream reaches; less of it is an error."""
    payload = _wide("ethos-u65-256")
    inputs, outputs = [TfliteTensor("x", "int8", _WIDE, 1.0)], [TfliteTensor("y", "int8", _WIDE, 1.0)]
    x = np.random.default_rng(0).integers(-128, 128, _WIDE).astype(np.int8)
    (expected,) = reference.run(_wide_flatbuffer(), [x])
    loaded = VelaProgram(around(payload, inputs, outputs, fast_scratch=1 << 20))
    assert np.array_equal(loaded.run_arrays([x])[0], expected)
    assert loaded.watched([x]).peak[2] > 0
    with pytest.raises(PayloadError, match="for Ethos-U65-256 is damaged, or does what the emulator does not know"):
        VelaProgram(around(payload, inputs, outputs, fast_scratch=16))


def test_fast_scratch_that_is_scratch() -> None:
    """One tensor for both is one memory: what is written by one name is read by the other."""
    payload = _copied_by_region_2()
    tensors = [TfliteTensor(name, "int8", (16,), 1.0) for name in "xy"]
    x = np.arange(16, dtype=np.int8)
    one = VelaProgram(around(payload, tensors[:1], tensors[1:]))
    assert np.array_equal(one.run_arrays([x])[0], x)
    two = VelaProgram(around(payload, tensors[:1], tensors[1:], fast_scratch=64))
    assert not two.run_arrays([x])[0].any()
    with pytest.raises(RunError, match="regions 1 and 2, which are the same memory: it cannot be watched"):
        one.watched([x])


_WIDE = (1, 48, 48, 16)


def _wide_body(b: Builder, x: Value) -> Value:
    generator = np.random.default_rng(0)
    for _ in range(2):
        weight = b.const(generator.integers(-127, 128, (16, 3, 3, 16)), DType.INT8)
        x = b.rescale(b.conv2d(x, weight, b.const([0] * 16, DType.INT32), pad=(1, 1, 1, 1)), DType.INT8, 0.001)
    return x


@cache
def _wide_flatbuffer() -> bytes:
    return program(_wide_body, (_WIDE, DType.INT8))


@cache
def _wide(accelerator: str) -> Payload:
    spec = EthosUCompileSpec(accelerator)
    return read_payload(compile_ethosu(_wide_flatbuffer(), spec, delegate="", locate=lambda _: None).data)


def _copied_by_region_2() -> Payload:
    """16 bytes from region 2 to another place of region 1."""
    from arm_recipes.runtime.ethosu_payload import EthosUTensor
    from tests.runtime.npu_streams import Commands

    commands = Commands("ethos-u65-256")
    commands.copy((2, 0), (1, 16), 16)
    places = [EthosUTensor((16,), 1, offset, 1) for offset in (0, 16)]
    return Payload(commands.stream, bytes(16), 32, (places[0],), (places[1],))


# What Vela itself writes of a TFLite model.


def _vela(folder: Path, accelerator: str, *options: str) -> bytes:
    source = folder / "network.tflite"
    source.write_bytes(convolutions(2))
    command = [sys.executable, "-m", "ethosu.vela", str(source), "--accelerator-config", accelerator]
    subprocess.run([*command, "--output-dir", str(folder), *options], check=True, capture_output=True)
    return (folder / "network_vela.tflite").read_bytes()


@pytest.mark.parametrize(
    ("accelerator", "options"),
    [
        ("ethos-u55-128", ()),
        ("ethos-u55-128", ("--debug-force-legacy-core",)),
        (
            "ethos-u65-256",
            ("--config=Arm/vela.ini", "--system-config=Ethos_U65_High_End", "--memory-mode=Dedicated_Sram"),
        ),
        ("ethos-u85-256", ()),
    ],
    ids=["U55", "U55, legacy core", "U65, fast scratch", "U85"],
)
def test_models_of_velas_own(accelerator: str, options: tuple[str, ...], tmp_path: Path) -> None:
    loaded = VelaProgram(_vela(tmp_path, accelerator, *options))
    assert [str(info) for info in loaded.inputs] == ["int8[1, 12, 12, 16] scale=0.05 zero_point=3"]
    assert [str(info) for info in loaded.outputs] == ["int8[1, 12, 12, 16] scale=0.2 zero_point=-1"]
    x = np.random.default_rng(1).integers(-128, 128, (1, 12, 12, 16)).astype(np.int8)
    (result,) = loaded.run_arrays([x])
    assert len(np.unique(result)) > 100
    difference = np.abs(result - _convolved(x))
    assert difference.max() <= 1
    assert difference.mean() < 0.001
    loaded.watched([x])


def _convolved(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What ``convolutions(2)`` computes, in real numbers that are rounded behind each layer."""
    scale, zero_point = 0.05, 3
    rows_and_columns: Any = (1, 2)
    for weights, bias in convolution_constants(2):
        padded = np.pad(x.astype(np.int64) - zero_point, ((0, 0), (1, 1), (1, 1), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), rows_and_columns)
        sums = np.einsum("nyxchw,ohwc->nyxo", windows, weights.astype(np.int64)) + bias
        x = np.clip(np.round(sums * (scale * 0.01 / 0.2)) - 1, -128, 127)
        scale, zero_point = 0.2, -1
    return x
