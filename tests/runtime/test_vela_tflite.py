"""TFLite models that Vela compiled: reading, execution and errors."""

from __future__ import annotations

import re
import struct
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ethosu.vela.tflite.BuiltinOperator import BuiltinOperator

from arm_backend_core.backends.ethosu import compile_ethosu
from arm_backend_core.dtype import DType
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value
from arm_recipes import VelaProgram, compare, inspect_program, load, save_firmware
from arm_recipes.cli.main import main
from arm_recipes.runtime.errors import PayloadError, RunError
from arm_recipes.runtime.ethosu_payload import EthosUPayload
from arm_recipes.runtime.pte import ProgramError
from arm_recipes.runtime.tensor_info import TensorInfo
from arm_recipes.runtime.vela_tflite import read_vela_tflite
from tests.accelerators import ACCELERATORS
from tests.runtime.command_stream_builder import CommandStreamBuilder
from tests.runtime.copy_programs import make_copy_program
from tests.runtime.ethosu_emulator import Payload, read_payload
from tests.runtime.tflite_writer import (
    ETHOS_U_OPTIONS,
    TfliteOperator,
    TfliteTensor,
    convolution_constants,
    convolutions,
    tflite_model,
    wrap_command_stream,
)
from tests.tflite.vela import compile_tflite
from tests.tosa_graphs import build_flatbuffer

_SHAPES = ((1, 5, 6, 2), (1, 5, 6, 3))


def _convolution(b: Builder, x: Value, y: Value) -> Value:
    weight = b.const(np.arange(-27, 27).reshape(3, 3, 3, 2), DType.INT8)
    sums = b.conv2d(x, weight, b.const([5, -5, 9], DType.INT32), pad=(1, 1, 1, 1))
    return b.rescale(b.add(sums, b.rescale(y, DType.INT32, 100.0)), DType.INT8, 0.01)


@cache
def _flatbuffer() -> bytes:
    return build_flatbuffer(_convolution, (_SHAPES[0], DType.INT8), (_SHAPES[1], DType.INT8))


@cache
def _payload(accelerator: str) -> Payload:
    spec = EthosUCompileSpec(accelerator)
    return read_payload(compile_ethosu(_flatbuffer(), spec, delegate="", find_operator=lambda _: None).data)


def _inputs() -> tuple[TfliteTensor, ...]:
    return TfliteTensor("image", "int8", _SHAPES[0], 0.5, 3), TfliteTensor("offset", "int8", _SHAPES[1], 0.25, -7)


def _outputs() -> tuple[TfliteTensor, ...]:
    return (TfliteTensor("result", "int8", _SHAPES[1], 0.125, -128),)


def _model(accelerator: str = "ethos-u55-128", **options: Any) -> bytes:
    if "u65" in accelerator:  # its default memory mode has fast scratch
        options = {"fast_scratch": 1 << 20} | options
    return wrap_command_stream(_payload(accelerator), _inputs(), _outputs(), **options)


def _arrays(seed: int = 0) -> list[np.ndarray[Any, Any]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(-128, 128, shape).astype(np.int8) for shape in _SHAPES]


@pytest.mark.parametrize("accelerator", [*ACCELERATORS, "ethos-u65-512", "ethos-u85-2048"])
def test_vela_program_gives_the_results_of_its_graph(accelerator: str) -> None:
    loaded = VelaProgram(_model(accelerator))
    for seed in range(2):
        arrays = _arrays(seed)
        (expected,) = reference_model.run(_flatbuffer(), arrays)
        (result,) = loaded.run_arrays(arrays)
        assert np.array_equal(result, expected)
        assert loaded.run_checked(arrays).operations > 1
        tensors = list(map(torch.from_numpy, arrays))
        assert torch.equal(loaded.execute(*tensors)[0], torch.from_numpy(expected))
        assert torch.equal(loaded.execute(tensors[0], offset=tensors[1])[0], torch.from_numpy(expected))
        *_, last = loaded.trace(*tensors)
        assert torch.equal(last.integers.reshape(expected.shape), torch.from_numpy(expected))


def test_read_vela_tflite_returns_tensors_and_operators() -> None:
    data, payload = _model(), _payload("ethos-u55-128")
    model = read_vela_tflite(data)
    assert (model.description, model.cpu_operators, model.arena_bytes) == ("made for a test", (), payload.scratch)
    assert [str(info) for info in (*model.inputs, *model.outputs)] == [
        "int8[1, 5, 6, 2] scale=0.5 zero_point=3",
        "int8[1, 5, 6, 3] scale=0.25 zero_point=-7",
        "int8[1, 5, 6, 3] scale=0.125 zero_point=-128",
    ]
    assert [info.name for info in model.inputs] == ["image", "offset"]
    (operator,) = model.npu_operators
    layout = operator.content.payload
    assert (layout.product, layout.macs, layout.stream) == (55, 128, "COP1")
    assert (layout.command_bytes, layout.weight_bytes) == (len(payload.commands), len(payload.weights))
    assert [place.offset for place in model.input_locations] == [place.offset for place in payload.inputs]


def test_results_do_not_depend_on_earlier_runs() -> None:
    loaded = VelaProgram(_model())
    first = loaded.run_arrays(_arrays(0))
    second = loaded.run_arrays(_arrays(1))
    assert not np.array_equal(first[0], second[0])
    assert np.array_equal(loaded.run_arrays(_arrays(0))[0], first[0])


def test_run_batch_accepts_tuples_and_dicts() -> None:
    loaded = VelaProgram(_model())
    samples = [tuple(map(torch.from_numpy, _arrays(seed))) for seed in range(3)]
    found = list(loaded.run_batch([*samples[:2], {"image": samples[2][0], "offset": samples[2][1]}]))
    assert all(torch.equal(output, loaded.run(*sample)) for output, sample in zip(found, samples, strict=True))
    with pytest.raises(ValueError, match=r"^sample 1: .*'offset' is missing"):
        list(loaded.run_batch([samples[0], {"image": samples[0][0]}]))


def test_mismatching_inputs_are_refused() -> None:
    loaded = VelaProgram(_model())
    image, offset = map(torch.from_numpy, _arrays())
    with pytest.raises(ValueError, match=r"takes 2 inputs \(image: int8\[1, 5, 6, 2\] .*got 1"):
        loaded.execute(image)
    with pytest.raises(ValueError, match=r"input 0 \('image'\) must be .*; quantize floats with inputs\[0\]"):
        loaded.execute(image.float(), offset)
    with pytest.raises(ValueError, match="no method 'other'; the program has: forward"):
        loaded.execute(image, offset, method="other")
    with pytest.raises(ValueError, match=r"input 1 \('offset'\) must be .*got int8\[1, 5, 6, 2\]"):
        loaded.run_arrays([image.numpy(), image.numpy()])
    with pytest.raises(ValueError, match="takes 2 inputs, got 1"):
        loaded.run_arrays([image.numpy()])


# Memory.


def test_separate_fast_scratch_tensor_is_a_separate_memory() -> None:
    """A tensor that is smaller than the accesses of the stream is an error."""
    payload = _large_payload("ethos-u65-256")
    inputs, outputs = [TfliteTensor("x", "int8", _LARGE_SHAPE, 1.0)], [TfliteTensor("y", "int8", _LARGE_SHAPE, 1.0)]
    x = np.random.default_rng(0).integers(-128, 128, _LARGE_SHAPE).astype(np.int8)
    (expected,) = reference_model.run(_large_flatbuffer(), [x])
    loaded = VelaProgram(wrap_command_stream(payload, inputs, outputs, fast_scratch=1 << 20))
    assert np.array_equal(loaded.run_arrays([x])[0], expected)
    assert loaded.run_checked([x]).peak[2] > 0
    with pytest.raises(
        PayloadError, match="for Ethos-U65-256 is damaged, or uses a feature that the emulator does not support"
    ):
        VelaProgram(wrap_command_stream(payload, inputs, outputs, fast_scratch=16))


def test_one_tensor_for_scratch_and_fast_scratch_is_one_memory() -> None:
    """Data written through region 1 is read through region 2."""
    payload = make_copy_program("ethos-u65-256", region=2)
    tensors = [TfliteTensor(name, "int8", (16,), 1.0) for name in "xy"]
    x = np.arange(16, dtype=np.int8)
    one = VelaProgram(wrap_command_stream(payload, tensors[:1], tensors[1:]))
    assert np.array_equal(one.run_arrays([x])[0], x)
    two = VelaProgram(wrap_command_stream(payload, tensors[:1], tensors[1:], fast_scratch=64))
    assert not two.run_arrays([x])[0].any()
    with pytest.raises(
        RunError, match="regions 1 and 2, which are the same memory: the access checker does not support that"
    ):
        one.run_checked([x])


_LARGE_SHAPE = (1, 48, 48, 16)


def _large_body(b: Builder, x: Value) -> Value:
    generator = np.random.default_rng(0)
    for _ in range(2):
        weight = b.const(generator.integers(-127, 128, (16, 3, 3, 16)), DType.INT8)
        x = b.rescale(b.conv2d(x, weight, b.const([0] * 16, DType.INT32), pad=(1, 1, 1, 1)), DType.INT8, 0.001)
    return x


@cache
def _large_flatbuffer() -> bytes:
    return build_flatbuffer(_large_body, (_LARGE_SHAPE, DType.INT8))


@cache
def _large_payload(accelerator: str) -> Payload:
    spec = EthosUCompileSpec(accelerator)
    return read_payload(compile_ethosu(_large_flatbuffer(), spec, delegate="", find_operator=lambda _: None).data)


# Public functions.


def test_load_accepts_a_vela_tflite_model(tmp_path: Path) -> None:
    path = tmp_path / "model_vela.tflite"
    path.write_bytes(_model())
    tensors = list(map(torch.from_numpy, _arrays()))
    (expected,) = reference_model.run(_flatbuffer(), _arrays())
    for source in (path, str(path), path.read_bytes()):
        loaded = load(source)
        assert isinstance(loaded, VelaProgram)
        assert (loaded.methods, loaded.shape_variants, loaded.has_reference) == (("forward",), {}, False)
        assert np.array_equal(loaded.execute(*tensors)[0].numpy(), expected)
    assert repr(loaded).startswith("<VelaProgram (image: int8[1, 5, 6, 2] scale=0.5 zero_point=3, ")
    with pytest.raises(RunError, match="backend='tosa': a TFLite model that Vela compiled has no TOSA graphs"):
        loaded.execute(*tensors, backend="tosa")
    with pytest.raises(RunError, match=r"a TFLite model is one file, .* without a reference program: omit reference="):
        load(path, reference=path)
    with pytest.raises(ValueError, match="a delegate for ethos-u; firmware runs only Ethos-U delegates"):
        save_firmware(path, tmp_path / "firmware")


def test_inputs_dequantize_with_their_scales() -> None:
    loaded = load(_model())
    assert [info.dequantize(torch.tensor([0])).item() for info in loaded.inputs] == [-1.5, 1.75]  # type: ignore[union-attr]


def test_compare_accepts_two_vela_tflite_models() -> None:
    samples = [tuple(map(torch.from_numpy, _arrays(seed))) for seed in range(2)]
    comparison = compare(_model("ethos-u55-128"), _model("ethos-u85-256"), samples)
    (output,) = comparison.outputs
    assert output.gap is not None
    assert output.gap.max_error == 0


def test_inspect_program_describes_a_vela_tflite_model() -> None:
    described = inspect_program(_model("ethos-u65-512"))
    (method,) = described.methods
    (delegate,) = method.delegates
    assert isinstance(delegate.payload, EthosUPayload)
    assert (delegate.payload.product, delegate.payload.macs, delegate.problem) == (65, 512, None)
    tensors = [tensor for tensor in (*method.inputs, *method.outputs) if isinstance(tensor, TensorInfo)]
    assert [tensor.scale for tensor in tensors] == [0.5, 0.25, 0.125]
    shown = str(described)
    for line in ("target +Ethos-U65, 512 MACs", "compiler +made for a test", "fast scratch +1,024", "weights +"):
        assert re.search(line, shown), line
    assert "fast scratch" not in str(inspect_program(_model()))
    mixed = inspect_program(_with_cpu_operators())
    assert mixed.methods[0].operators == ("SOFTMAX", "mine", "SOFTMAX")
    assert mixed.to_dict()["methods"][0]["operators"] == ["SOFTMAX", "mine", "SOFTMAX"]


def test_run_and_inspect_commands_accept_a_vela_tflite_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, inputs, outputs = tmp_path / "model_vela.tflite", tmp_path / "x.npz", tmp_path / "y.npz"
    path.write_bytes(_model())
    image, offset = _arrays()
    np.savez(inputs, image=image, offset=offset)
    assert main(["run", str(path), "--input", str(inputs), "-o", str(outputs)]) == 0
    assert re.match(r"sample 0  result  int8\[1, 5, 6, 3\]", capsys.readouterr().out)
    assert np.array_equal(np.load(outputs)["result"][0], reference_model.run(_flatbuffer(), [image, offset])[0])
    assert main(["inspect", str(path), "--json"]) == 0
    assert '"backend": "ethos-u"' in capsys.readouterr().out
    path.write_bytes(_with_cpu_operators())
    assert main(["run", str(path), "--input", str(inputs)]) == 2
    assert "Vela left these TFLite operators on the CPU" in capsys.readouterr().err


# Invalid files.


def _with_cpu_operators() -> bytes:
    operators = [
        TfliteOperator(code, (3,), (5,)) for code in (BuiltinOperator.SOFTMAX, "mine", BuiltinOperator.SOFTMAX)
    ]
    return _model(operators=operators)


def _error_message(data: bytes) -> str:
    with pytest.raises(ProgramError) as caught:
        load(data)
    return str(caught.value)


def test_operators_on_the_cpu_are_refused() -> None:
    assert _error_message(_with_cpu_operators()).endswith("executes only operators for the NPU: SOFTMAX (2), mine")


def test_several_operators_for_the_npu_are_refused() -> None:
    tensors = [TfliteTensor("x", "int8", (1,), 1.0)]
    tensors += [TfliteTensor("stream", "uint8", (32,), data=CommandStreamBuilder("ethos-u55-128").stream)]
    tensors += [TfliteTensor(name, "uint8", (16,)) for name in ("constants", "scratch")]
    operator = TfliteOperator("ethos-u", (1, 2, 3, 3, 0), (0,), ETHOS_U_OPTIONS)
    offsets = struct.pack("<7i", 0, 1, 4, 0, -1, -1, 0)
    data = tflite_model(tensors, [operator, operator], [0], [0], allocation=offsets)
    assert _error_message(data) == "the model has 2 operators for the NPU; this runtime supports one"


def test_uncompiled_model_is_refused() -> None:
    message = _error_message(convolutions(1))
    assert re.fullmatch(r"it has no operator 'ethos-u': Vela has not compiled it, .* Compile it with: vela .*", message)


@pytest.mark.parametrize(
    ("options", "expected_text"),
    [
        (b"", "none"),
        (b"\x01\x04", "01 04"),
        (b"\x02\x04\x01", "02 04 01"),
        (b"\x01\x0c\x01", "01 0c 01"),
        (b"\x01\x04\x02", "01 04 02"),
    ],
)
def test_unknown_custom_options_are_refused(options: bytes, expected_text: str) -> None:
    assert f"has unknown custom options ({expected_text}), which" in _error_message(_model(options=options))


@pytest.mark.parametrize("options", [b"\x01\x04\x01", b"\x01\x00\x05\x02", b"\x01\x08\x01"])
def test_custom_options_of_each_integer_width_are_accepted(options: bytes) -> None:
    assert load(_model(options=options)).methods == ("forward",)


def test_missing_metadata_is_refused() -> None:
    tensors = [TfliteTensor("x", "int8", (1,), 1.0)]
    operator = TfliteOperator("ethos-u", (0,), (0,), ETHOS_U_OPTIONS)
    assert "no metadata 'OfflineMemoryAllocation'" in _error_message(tflite_model(tensors, [operator], [0], [0]))
    allocation = struct.pack("<4i", 0, 1, 1, 0)
    message = _error_message(tflite_model(tensors, [operator], [0], [0], allocation=allocation))
    assert message == "damaged: an operator 'ethos-u' has 1 inputs, not 4 or more"


@pytest.mark.parametrize(
    ("allocation", "expected_text"),
    [
        (b"", "has 0 bytes in an unknown format"),
        (bytes(11), "has 11 bytes in an unknown format"),
        (struct.pack("<4i", 1, 1, 1, 0), "has 16 bytes in an unknown format"),
        (struct.pack("<4i", 0, 1, 1, 0), "announces 1 tensors and has 1 offsets, and the model has 6"),
        (struct.pack("<9i", 0, 1, 9, *range(6)), "announces 9 tensors and has 6 offsets, and the model has 6"),
        (struct.pack("<9i", 0, 1, 6, -1, -1, 16, 0, 0, 0), "scratch (tensor 2) is at byte 16 of the arena"),
        (struct.pack("<9i", 0, 1, 6, -1, -1, -1, 0, 0, 0), "scratch (tensor 2) is at byte -1 of the arena"),
        (struct.pack("<9i", 0, 1, 6, -1, -1, 0, -2, 0, 0), "'image' (tensor 3) has the shape [1, 5, 6, 2] at byte -2"),
    ],
)
def test_invalid_metadata_is_refused(allocation: bytes, expected_text: str) -> None:
    assert expected_text in _error_message(_model(allocation=allocation))


def test_damaged_command_stream_is_refused() -> None:
    data = _model()
    assert _error_message(data.replace(b"COP1", b"COP9")).startswith("damaged: block 'command stream' at byte ")
    first = data.index(b"COP1") + 32
    with pytest.raises(
        PayloadError, match=r"is damaged, or uses a feature that the emulator does not support\. In its command stream"
    ):
        load(data[:first] + b"\xff" * 4 + data[first + 4 :])


def test_truncated_file_is_refused() -> None:
    data = _model()
    for length in (0, 3, 4, 7):
        assert _error_message(data[:length]).startswith(("truncated: ", "not an ExecuTorch program"))
    generator = np.random.default_rng(0)
    for length in (8, 9, 40, *generator.integers(8, len(data) - 8, 50)):
        message = _error_message(data[:length])
        assert message.startswith(("truncated or damaged: ", "damaged: ", "it has no")), (length, message)


def test_damaged_tables_are_read_or_refused() -> None:
    """Damage in tables and offsets, outside the command stream and the constants."""
    data, payload = _model(), _payload("ethos-u55-128")
    kept = [data.index(part) for part in (payload.commands, payload.weights)]
    outside = [
        at
        for at in range(len(data))
        if not any(
            start <= at < start + len(part)
            for start, part in zip(kept, (payload.commands, payload.weights), strict=True)
        )
    ]
    generator, refused = np.random.default_rng(0), 0
    for _ in range(300):
        changed = bytearray(data)
        changed[outside[int(generator.integers(len(outside)))]] = int(generator.integers(256))
        try:
            read_vela_tflite(bytes(changed))
        except ProgramError:
            refused += 1
    assert refused > 50


# Models that Vela's TFLite front end compiled.


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
def test_models_of_velas_tflite_front_end(accelerator: str, options: tuple[str, ...]) -> None:
    loaded = VelaProgram(compile_tflite(convolutions(2), accelerator, *options))
    assert [str(info) for info in loaded.inputs] == ["int8[1, 12, 12, 16] scale=0.05 zero_point=3"]
    assert [str(info) for info in loaded.outputs] == ["int8[1, 12, 12, 16] scale=0.2 zero_point=-1"]
    x = np.random.default_rng(1).integers(-128, 128, (1, 12, 12, 16)).astype(np.int8)
    (result,) = loaded.run_arrays([x])
    assert len(np.unique(result)) > 100
    difference = np.abs(result - _compute_convolutions(x))
    assert difference.max() <= 1
    assert difference.mean() < 0.001
    loaded.run_checked([x])


def _compute_convolutions(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Compute ``convolutions(2)`` with exact integer sums, scaled in floating point, rounded and clipped."""
    scale, zero_point = 0.05, 3
    rows_and_columns: Any = (1, 2)
    for weights, bias in convolution_constants(2):
        padded = np.pad(x.astype(np.int64) - zero_point, ((0, 0), (1, 1), (1, 1), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), rows_and_columns)
        sums = np.einsum("nyxchw,ohwc->nyxo", windows, weights.astype(np.int64)) + bias
        x = np.clip(np.round(sums * (scale * 0.01 / 0.2)) - 1, -128, 127)
        scale, zero_point = 0.2, -1
    return x
