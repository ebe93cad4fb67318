"""Access checker of the emulator: Vela's streams pass; without one of their waits or operations they are refused."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from arm_backend_core.backends import ethosu
from arm_backend_core.backends.ethosu import compile_ethosu
from arm_backend_core.backends.ethosu_commands import decode_commands
from arm_backend_core.backends.ethosu_waits import insert_waits
from arm_backend_core.backends.payload import Payload as Compiled
from arm_backend_core.dtype import DType
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value
from arm_backend_core.workers.vela import installed_release
from arm_recipes.runtime.errors import RunError
from arm_recipes.runtime.ethosu_abi import HAZARD, UNINITIALIZED
from arm_recipes.runtime.ethosu_payload import read_payload_content
from arm_recipes.runtime.ethosu_stream import StreamError
from arm_recipes.runtime.vela_program import VelaProgram
from tests.accelerators import ACCELERATORS
from tests.runtime.ethosu_emulator import Emulator, Payload, read_payload
from tests.runtime.tflite_writer import depthwise
from tests.runtime.vela_bugs import STARTS_TOO_EARLY, Reproducer
from tests.tflite.vela import compile_tflite
from tests.tosa_graphs import Body, build_flatbuffer

_CONV, _DMA_START, _DMA_WAIT, _KERNEL_WAIT, _NOTHING, _BLOCKDEP = 2, 16, 17, 18, 19, 0x12F
_WORD_FOLLOWS = 0x4000


def _convolutions(b: Builder, x: Value) -> Value:
    """Emit four convolutions, whose weights are copied by DMA. A TABLE follows the second and the last."""
    generator = np.random.default_rng(0)
    for index in range(4):
        weight = b.const(generator.integers(-127, 128, (32, 3, 3, x.shape[3])), DType.INT8)
        x = b.conv2d(x, weight, b.const([0] * 32, DType.INT32), pad=(1, 1, 1, 1))
        x = b.rescale(x, DType.INT8, 0.001)
        if index % 2:
            x = b.table(x, generator.integers(-128, 128, 256))
    return x


@cache
def _compiled(accelerator: str) -> Compiled:
    flatbuffer = build_flatbuffer(_convolutions, ((1, 12, 12, 16), DType.INT8))
    return compile_ethosu(flatbuffer, EthosUCompileSpec(accelerator), delegate="", find_operator=lambda _: None)


def _payload(accelerator: str) -> Payload:
    return read_payload(_compiled(accelerator).data)


def _run(emulator: Emulator, payload: Payload, **options: Any) -> np.ndarray[Any, Any]:
    inputs = [np.random.default_rng(0).integers(-128, 128, (1, 12, 12, 16)).astype(np.int8)]
    outputs = [("int8", (1, 12, 12, 32))]
    return emulator.run(payload, inputs[: len(payload.inputs)], outputs[: len(payload.outputs)], **options)[0]


def _commands(payload: Payload, opcode: int | None = None) -> Iterator[int]:
    """Word offsets of all commands, or of those with ``opcode``."""
    words = struct.unpack(f"<{len(payload.commands) // 4}I", payload.commands)
    place = 8
    while place < len(words):
        if opcode is None or words[place] & 0xFFFF == opcode:
            yield place
        place += 2 if words[place] & _WORD_FOLLOWS else 1


def _replace_word(payload: Payload, place: int, word: int) -> Payload:
    commands = bytearray(payload.commands)
    commands[4 * place : 4 * place + 4] = struct.pack("<I", word)
    return replace(payload, commands=bytes(commands))


def _error_message(emulator: Emulator, payload: Payload) -> str:
    with pytest.raises(StreamError) as caught:
        _run(emulator, payload)
    return str(caught.value)


@pytest.mark.parametrize("accelerator", ACCELERATORS)
@pytest.mark.parametrize("opcode", [_DMA_WAIT, _KERNEL_WAIT], ids=["DMA_WAIT", "KERNEL_WAIT"])
def test_each_removed_wait_is_reported(accelerator: str, opcode: int, emulator: Emulator) -> None:
    """Without the wait, the next operation may start before the awaited one has ended."""
    payload = _payload(accelerator)
    places = list(_commands(payload, opcode))
    assert places or (accelerator, opcode) == ("ethos-u85-256", _KERNEL_WAIT)
    name, waiting, does = {
        _DMA_WAIT: ("CONV", _CONV, "read"),
        _KERNEL_WAIT: ("DMA_START", _DMA_START, "write"),
    }[opcode]
    for place in places:
        # NPU_SET_BLOCKDEP may be between them
        after = next(at for at in _commands(payload, waiting) if at > place)
        assert after - place <= 2
        message = _error_message(emulator, _replace_word(payload, place, _NOTHING))
        assert re.fullmatch(
            rf"NPU_OP_{name} at byte {4 * after}: it may {does} byte \d+ of region [128] before the operation at "
            r"byte \d+ has (read|written) it: a wait is missing",
            message,
        )


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_too_large_blockdep_is_reported(accelerator: str, emulator: Emulator) -> None:
    """Vela's BLOCKDEP is 0 or 1 if an operation reads the result of the previous one."""
    payload = _payload(accelerator)
    for place in _commands(payload, _BLOCKDEP):
        payload = _replace_word(payload, place, _BLOCKDEP | 7 << 16)
    message = _error_message(emulator, payload)
    assert re.fullmatch(
        r"NPU_OP_CONV at byte \d+: it may read byte \d+ of region [12] before the operation at byte \d+ has written "
        "it: BLOCKDEP is too large",
        message,
    )
    _run(emulator, payload, fatal_findings=UNINITIALIZED)
    assert emulator.statistics.hazards == 3


def test_findings_are_counted_and_do_not_change_results(emulator: Emulator) -> None:
    payload = _payload("ethos-u55-128")
    right = _run(emulator, payload, fatal_findings=None)
    assert np.array_equal(_run(emulator, payload), right)
    assert (emulator.statistics.uninitialized, emulator.statistics.hazards) == (0, 0)
    waits = [*_commands(payload, _DMA_WAIT), *_commands(payload, _KERNEL_WAIT)]
    for place in waits:
        payload = _replace_word(payload, place, _NOTHING)
    assert np.array_equal(_run(emulator, payload, fatal_findings=UNINITIALIZED), right)
    assert emulator.statistics.hazards == len(waits) == {(5, 1): 10, (5, 2): 14}[installed_release()]


def test_missing_input_is_reported(emulator: Emulator) -> None:
    payload = _payload("ethos-u55-128")
    (tensor,) = payload.inputs
    message = _error_message(emulator, replace(payload, inputs=()))
    assert re.fullmatch(
        rf"NPU_OP_CONV at byte \d+: IFM contains byte {tensor.offset} of region 1, which has not been written, and \d+ "
        "more uninitialized bytes",
        message,
    )
    _run(emulator, replace(payload, inputs=()), fatal_findings=HAZARD)
    assert emulator.statistics.uninitialized > 0


def test_removed_dma_of_a_table_is_reported(emulator: Emulator) -> None:
    payload = _payload("ethos-u85-256")
    first = next(_commands(payload, _DMA_START))
    message = _error_message(emulator, _replace_word(payload, first, _NOTHING))
    assert re.fullmatch(
        r"NPU_OP_CONV at byte \d+: the table contains byte 0 of region 8 \(lookup tables\), which has not been "
        "written, and 255 more uninitialized bytes",
        message,
    )


def test_removed_operation_is_reported(emulator: Emulator) -> None:
    payload = _payload("ethos-u85-256")
    first, second, *_ = _commands(payload, _CONV)
    message = _error_message(emulator, _replace_word(payload, first, _NOTHING))
    missing = "IFM contains byte 0 of region 1, which has not been written, and 191 more uninitialized bytes"
    assert message == f"NPU_OP_CONV at byte {4 * second}: {missing}"


def _gather(b: Builder, x: Value, indices: Value) -> Value:
    return b.gather(x, indices)


def test_missing_indices_and_results_of_gather_are_reported(emulator: Emulator) -> None:
    flatbuffer = build_flatbuffer(_gather, ((1, 6, 16), DType.INT8), ((1, 4), DType.INT32))
    compiled = compile_ethosu(flatbuffer, EthosUCompileSpec("ethos-u85-256"), delegate="", find_operator=lambda _: None)
    payload = read_payload(compiled.data)
    inputs: list[np.ndarray[Any, Any]] = [
        np.arange(96, dtype=np.int8).reshape(1, 6, 16),
        np.array([[5, 0, 3, 3]], np.int32),
    ]
    (result,) = emulator.run(payload, inputs, [("int8", (1, 4, 16))])
    assert np.array_equal(result, inputs[0][:, inputs[1][0]])
    for index, message in ((0, "NPU_OP_STOP at byte .*: an output"), (1, "NPU_OP_DMA_START at byte .*: indices")):
        kept = replace(payload, inputs=payload.inputs[1 - index : 2 - index])
        with pytest.raises(StreamError, match=f"{message} contains? byte"):
            emulator.run(kept, inputs[1 - index : 2 - index], [("int8", (1, 4, 16))])
    for place in _commands(payload, _DMA_START):
        payload = _replace_word(payload, place, _NOTHING)
    with pytest.raises(
        StreamError, match=r"NPU_OP_STOP at byte .*: an output contains byte .* and 63 more uninitialized bytes"
    ):
        emulator.run(payload, inputs, [("int8", (1, 4, 16))])


def test_an_index_above_the_maximum_is_reported_with_its_row(emulator: Emulator) -> None:
    flatbuffer = build_flatbuffer(_gather, ((1, 6, 16), DType.INT8), ((1, 4), DType.INT32))
    compiled = compile_ethosu(flatbuffer, EthosUCompileSpec("ethos-u85-256"), delegate="", find_operator=lambda _: None)
    inputs: list[np.ndarray[Any, Any]] = [np.zeros((1, 6, 16), np.int8), np.array([[5, 0, 9, 3]], np.int32)]
    with pytest.raises(StreamError, match="the index of row 2 is 9, the largest is 5"):
        emulator.run(read_payload(compiled.data), inputs, [("int8", (1, 4, 16))])


def test_dma_may_copy_unwritten_bytes_that_nothing_reads(emulator: Emulator) -> None:
    """A DMA of 4 bytes copies 16. The other 12 may be uninitialized, because no operation reads them."""

    def body(b: Builder, x: Value, y: Value) -> Value:
        return b.rescale(b.matmul(x, y), DType.INT8, 0.25)

    flatbuffer = build_flatbuffer(body, ((1, 4, 1), DType.INT8), ((1, 1, 6), DType.INT8))
    compiled = compile_ethosu(flatbuffer, EthosUCompileSpec("ethos-u55-128"), delegate="", find_operator=lambda _: None)
    payload = read_payload(compiled.data)
    assert len(list(_commands(payload, _DMA_START))) > 0
    inputs = [np.arange(4, dtype=np.int8).reshape(1, 4, 1), np.arange(6, dtype=np.int8).reshape(1, 1, 6)]
    emulator.run(payload, inputs, [("int8", (1, 4, 6))])
    with pytest.raises(StreamError, match=r"IFM2? contains byte \d+ of region 1, which has not been written"):
        emulator.run(replace(payload, inputs=payload.inputs[:1]), inputs[:1], [("int8", (1, 4, 6))])


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_statistics_agree_with_velas_report(accelerator: str, emulator: Emulator) -> None:
    """Commands and constants are those of the payload. On U55 Vela also counts peak memory and MACs in the same way."""
    payload, vela = _payload(accelerator), _compiled(accelerator).vela
    assert vela is not None
    _run(emulator, payload)
    statistics = emulator.statistics
    assert statistics.commands == len(list(_commands(payload)))
    weights, *rest = statistics.peak
    assert weights == len(payload.weights) == statistics.touched[0]
    peaks = {memory.name: memory.peak_bytes for memory in vela.memories}
    if accelerator == "ethos-u55-128":
        assert (weights, max(rest)) == (peaks["OffChipFlash"], peaks["Sram"])
        assert statistics.macs == vela.macs == 12 * 12 * 9 * 32 * (16 + 3 * 32)
    assert all(peak >= touched for peak, touched in zip(statistics.peak, statistics.touched, strict=True))
    # Each of the four convolutions writes 32 channels.
    assert sum(statistics.bytes_written) >= 4 * 12 * 12 * 32


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_pixels_skipped_by_a_stride_may_be_unwritten(accelerator: str, emulator: Emulator) -> None:
    """Only every second pixel in rows and columns is an input; no kernel reads the others."""

    def body(b: Builder, x: Value) -> Value:
        weight = b.const(np.arange(8).reshape(4, 1, 1, 2), DType.INT8)
        wide = b.conv2d(x, weight, b.const([0] * 4, DType.INT32), pad=(0, 0, 0, 0), stride=(2, 2))
        return b.rescale(wide, DType.INT8, 0.5)

    flatbuffer = build_flatbuffer(body, ((1, 5, 5, 2), DType.INT8))
    compiled = compile_ethosu(flatbuffer, EthosUCompileSpec(accelerator), delegate="", find_operator=lambda _: None)
    payload = read_payload(compiled.data)
    (place,) = payload.inputs
    rows = [replace(place, offset=place.offset + 2 * (5 * y + x)) for y in (0, 2, 4) for x in (0, 2, 4)]
    pixels = [np.array([y, -y], np.int8) for y in range(9)]
    emulator.run(replace(payload, inputs=tuple(rows)), pixels, [("int8", (1, 3, 3, 4))])
    with pytest.raises(StreamError, match="IFM contains byte"):
        emulator.run(replace(payload, inputs=tuple(rows[:-1])), pixels[:-1], [("int8", (1, 3, 3, 4))])


def _two_images(b: Builder, x: Value) -> Value:
    """A DMA of the second convolution's weights writes where the first convolution still reads its second image."""
    generator = np.random.default_rng(0)
    wide = b.conv2d(
        b.transpose(x, (0, 2, 3, 1)),
        b.const(generator.integers(-50, 50, (4, 3, 3, 3)), DType.INT8),
        b.const([1, 2, 3, 4], DType.INT32),
        pad=(0, 0, 0, 0),
    )
    rows = b.reshape(b.rescale(wide, DType.INT8, 0.01), (28, 14, 4))
    images = b.reshape(b.clamp(rows, -121, 127), (2, 14, 14, 4))
    weight, bias = b.const(generator.integers(-50, 50, (1, 1, 1, 4)), DType.INT8), b.const([5], DType.INT32)
    return b.rescale(b.conv2d(images, weight, bias, pad=(2, 2, 2, 2)), DType.INT8, 0.01)


@pytest.mark.parametrize("accelerator", ["ethos-u55-128", "ethos-u65-256"])
def test_wait_that_vela_omits_is_inserted(
    accelerator: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other commands, and the offsets of the layers' commands apart from the shift, are Vela's."""
    flatbuffer = build_flatbuffer(_two_images, ((2, 3, 16, 16), DType.INT8))
    inputs = [np.random.default_rng(0).integers(-128, 128, (2, 3, 16, 16)).astype(np.int8)]
    (expected,) = reference_model.run(flatbuffer, inputs)

    def compiled() -> tuple[Payload, Compiled]:
        result = compile_ethosu(flatbuffer, EthosUCompileSpec(accelerator), delegate="", find_operator=lambda _: None)
        assert read_payload_content(result.data).header_bytes == 32
        return read_payload(result.data), result

    payload, ours = compiled()
    (result,) = emulator.run(payload, inputs, [("int8", expected.shape)])
    assert np.array_equal(result, expected)
    monkeypatch.setattr(ethosu, "insert_waits", lambda stream: (stream, []))
    original, velas = compiled()
    with pytest.raises(StreamError, match=r"it may write byte .* before the operation at byte .* has read it: a wait"):
        emulator.run(original, inputs, [("int8", expected.shape)])

    changed, (place,) = insert_waits(original.commands)
    assert changed == payload.commands
    words, before = (np.frombuffer(stream, np.uint32)[8:].tolist() for stream in (changed, original.commands))
    assert words.pop(place // 4) == _KERNEL_WAIT
    assert words == before
    assert before[place // 4] & 0xFFFF == _DMA_START
    assert ours.vela is not None
    assert velas.vela is not None
    starts = [[at for layer in figures.layers for at in layer.commands] for figures in (ours.vela, velas.vela)]
    assert starts[0] == [at + 4 * (at >= place) for at in starts[1]]
    assert any(at >= place for at in starts[1])
    assert any(at < place for at in starts[1])


@pytest.mark.parametrize(
    ("bug", "accelerator"),
    [(x, name) for x in STARTS_TOO_EARLY for name in x.wrong],
    ids=lambda x: getattr(x, "name", x),
)
def test_blockdep_of_an_operation_that_starts_too_early_becomes_0(
    bug: Reproducer, accelerator: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BLOCKDEP of the other operations, and all other commands, are Vela's."""
    flatbuffer = build_flatbuffer(bug.body, *bug.inputs)
    generator = np.random.default_rng(0)
    inputs = [generator.integers(-128, 128, shape).astype(dtype.numpy) for shape, dtype in bug.inputs]
    expected = reference_model.run(flatbuffer, inputs)
    results = [(x.dtype.name, x.shape) for x in expected]

    def payload() -> Payload:
        compiled = compile_ethosu(flatbuffer, EthosUCompileSpec(accelerator), delegate="", find_operator=lambda _: None)
        return read_payload(compiled.data)

    def kernels(payload: Payload) -> list[tuple[int, ...]]:
        """Operations: BLOCKDEP, opcode, and a hash of the registers set since the previous operation."""
        blockdep, found, other = 0, list[tuple[int, ...]](), list[tuple[int, int]]()
        for _, number, value in decode_commands(payload.commands):
            if number == _BLOCKDEP:
                blockdep = value >> 32
            elif number < 16 and number:
                found.append((blockdep, number, hash(tuple(other))))
                other = []
            else:
                other.append((number, value))
        return found

    ours = payload()
    for result, wanted in zip(emulator.run(ours, inputs, results), expected, strict=True):
        assert np.array_equal(result, wanted)
    monkeypatch.setattr(ethosu, "insert_waits", lambda stream: (stream, []))
    velas = payload()
    with pytest.raises(StreamError, match="BLOCKDEP is too large"):
        emulator.run(velas, inputs, results)
    pairs = list(zip(kernels(ours), kernels(velas), strict=True))
    assert [mine[1:] for mine, _ in pairs] == [other[1:] for _, other in pairs]
    assert all(mine[0] in (0, other[0]) for mine, other in pairs)
    assert any(mine[0] < other[0] for mine, other in pairs)


def _repeated_table(b: Builder, x: Value) -> Value:
    """The same TABLE before and after a MATMUL, beside which the smallest NPUs have no internal memory for a table."""
    table = np.arange(127, -129, -1)
    return b.table(b.rescale(b.matmul(b.table(x, table), x), DType.INT8, 0.01), table)


@pytest.mark.parametrize("accelerator", ["ethos-u55-32", "ethos-u55-64", "ethos-u55-128"])
def test_table_lost_during_a_matmul_is_copied_again(
    accelerator: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    flatbuffer = build_flatbuffer(_repeated_table, ((1, 8, 8), DType.INT8))
    inputs = [np.random.default_rng(0).integers(-128, 128, (1, 8, 8)).astype(np.int8)]
    (expected,) = reference_model.run(flatbuffer, inputs)

    def payload() -> Payload:
        compiled = compile_ethosu(flatbuffer, EthosUCompileSpec(accelerator), delegate="", find_operator=lambda _: None)
        return read_payload(compiled.data)

    ours = payload()
    (result,) = emulator.run(ours, inputs, [("int8", expected.shape)])
    assert np.array_equal(result, expected)
    monkeypatch.setattr(ethosu, "insert_waits", lambda stream: (stream, []))
    velas = payload()
    assert (ours.commands == velas.commands) == (accelerator == "ethos-u55-128")
    if ours.commands != velas.commands:
        with pytest.raises(StreamError, match="the table contains byte 0 of region 8"):
            emulator.run(velas, inputs, [("int8", expected.shape)])
        assert len(list(_commands(ours, _DMA_START))) == len(list(_commands(velas, _DMA_START))) + 1


def test_overwriting_a_table_in_use_is_reported(emulator: Emulator) -> None:
    """Vela's BLOCKDEP is 0 if an operation would overwrite a table in use on the smallest NPUs."""

    def body(b: Builder, x: Value) -> Value:
        return b.max_pool2d(b.table(x, np.arange(127, -129, -1)), (3, 3), (1, 1), (0, 0, 0, 0))

    flatbuffer = build_flatbuffer(body, ((1, 8, 8, 8), DType.INT8))
    compiled = compile_ethosu(flatbuffer, EthosUCompileSpec("ethos-u55-32"), delegate="", find_operator=lambda _: None)
    payload = read_payload(compiled.data)
    inputs, outputs = [np.zeros((1, 8, 8, 8), np.int8)], [("int8", (1, 6, 6, 8))]
    emulator.run(payload, inputs, outputs)
    for place in _commands(payload, _BLOCKDEP):
        payload = _replace_word(payload, place, _BLOCKDEP | 3 << 16)
    message = r"it may write over the table of the operation at byte \d+ before that operation has ended: BLOCKDEP"
    with pytest.raises(StreamError, match=message):
        emulator.run(payload, inputs, outputs)


def _resize_after_pool(b: Builder, x: Value) -> Value:
    """RESIZE to a quarter of the columns, after an operation of two blocks with half of the columns each."""
    pooled = b.max_pool2d(x, (3, 3), (1, 1), (1, 1, 1, 1))
    return b.resize(pooled, (3, 1, 4, 16), (0, 0), (0, -12), "NEAREST")


def _strided_pool_after_pool(b: Builder, x: Value) -> Value:
    """Read every second row and column of the result of an operation with several blocks."""
    pooled = b.max_pool2d(x, (3, 3), (1, 1), (1, 1, 1, 1))
    rows, columns = ((length + 1) // 2 * 2 - 1 for length in x.shape[1:3])
    return b.max_pool2d(b.slice(pooled, (0, 0, 0, 0), (1, rows, columns, 8)), (1, 1), (2, 2), (0, 0, 0, 0))


@pytest.mark.parametrize(
    ("body", "shape", "accelerator", "flags"),
    [
        (_resize_after_pool, (1, 40, 64, 8), "ethos-u85-2048", []),
        (_resize_after_pool, (1, 40, 64, 8), "ethos-u85-2048", ["--cop-format=COP2"]),
        (_strided_pool_after_pool, (1, 40, 64, 8), "ethos-u85-256", []),
        (_strided_pool_after_pool, (1, 16, 30, 8), "ethos-u55-128", []),
    ],
)
def test_blockdep_that_vela_omits_is_inserted(
    body: Body,
    shape: tuple[int, ...],
    accelerator: str,
    flags: list[str],
    emulator: Emulator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flatbuffer = build_flatbuffer(body, (shape, DType.INT8))
    inputs = [np.random.default_rng(0).integers(-128, 128, shape).astype(np.int8)]
    (expected,) = reference_model.run(flatbuffer, inputs)
    spec = EthosUCompileSpec(accelerator, extra_flags=flags)

    def payload() -> Payload:
        return read_payload(compile_ethosu(flatbuffer, spec, delegate="", find_operator=lambda _: None).data)

    ours = payload()
    (result,) = emulator.run(ours, inputs, [("int8", expected.shape)])
    assert np.array_equal(result, expected)
    monkeypatch.setattr(ethosu, "insert_waits", lambda stream: (stream, []))
    velas = payload()
    with pytest.raises(StreamError, match=r"NPU_OP_\w+ at byte .* has written it: BLOCKDEP is too large"):
        emulator.run(velas, inputs, [("int8", expected.shape)])
    assert len(ours.commands) == len(velas.commands) + 4


_POOL, _AT_BYTE_64 = 5, [0x4000, 64, 0x4010, 64]
_DMA = [0x4032, 16, _DMA_START]
_ORDERS = {
    "adjacent": ([_POOL, *_DMA, 0], [12]),
    "one kernel between": ([_POOL, *_AT_BYTE_64, _POOL, *_DMA, 0], [32]),
    "two kernels between": ([_POOL, *_AT_BYTE_64, _POOL, _POOL, *_DMA, 0], []),
    "a wait": ([_POOL, _KERNEL_WAIT, *_DMA, 0], []),
    "a wait that is too small": ([_POOL, *_AT_BYTE_64, _POOL, _KERNEL_WAIT | 2 << 16, *_DMA, 0], [36]),
    "a wait that is large enough": ([_POOL, *_AT_BYTE_64, _POOL, _KERNEL_WAIT | 1 << 16, *_DMA, 0], []),
    "disjoint memory": ([*_AT_BYTE_64, _POOL, *_DMA, 0], []),
    "2D DMA": ([*_AT_BYTE_64, _POOL, 0x131 | 1 << 25, *_DMA, 0], [32]),
    "DMA of a table": ([_POOL, 0x130 | 1 << 16, 0x131 | 1 << 24, *_DMA, 0], []),
    "a rolling buffer": ([*_AT_BYTE_64, 0x4012, 8, _POOL, *_DMA, 0], [36]),
    "two DMAs": ([_POOL, *_DMA, _POOL, *_DMA, 0], [12, 28]),
    "long stream": ([_POOL, *_DMA, *[_NOTHING] * 0x1FFFF, 0], [12]),
}
"""Name -> commands, byte offsets of inserted waits. Kernels access byte 0 or 64, the DMA bytes 0 to 15."""


@pytest.mark.parametrize("order", _ORDERS)
def test_where_waits_are_put(order: str) -> None:
    def stream(words: list[int]) -> bytes:
        length = 2 | len(words) >> 16 << 8 | (len(words) & 0xFFFF) << 16
        return b"COP1" + struct.pack(f"<{7 + len(words)}I", 1, 7, 0, 5, 5, 5, length, *words)

    words, places = _ORDERS[order]
    expected = [[_KERNEL_WAIT, word] if 4 * at in places else [word] for at, word in enumerate(words)]
    assert insert_waits(stream(words)) == (stream([word for part in expected for word in part]), places)


def _dmas(commands: bytes) -> list[dict[int, int]]:
    """The DMA registers at each NPU_OP_DMA_START."""
    registers: dict[int, int] = {}
    found = []
    words = iter(struct.unpack(f"<{len(commands) // 4}I", commands)[8:])
    for word in words:
        key, value = word & 0x43FF, word >> 16
        if word & _WORD_FOLLOWS:
            value = value << 32 | next(words)
        if key in (0x130, 0x131, 0x4030, 0x4031, 0x4032):
            registers[key] = value
        elif key == _DMA_START:
            found.append(dict(registers))
    return found


def test_repeated_dma_of_a_table_restores_the_registers_of_other_dmas() -> None:
    """On the smallest NPUs the table is copied again after an operation without a table."""
    copy_table = [0x130, 0x131 | 1 << 24, 0x4030, 256, 0x4031, 14 * 1024, 0x4032, 256, _DMA_START]
    with_table, without_table = [0x125 | 16 << 16, _POOL], [0x125, *_AT_BYTE_64, _POOL]
    words = [*copy_table, *with_table, 0x131 | 1 << 16, 0x4030, 512, 0x4031, 4096]
    words += [*without_table, *with_table, _DMA_START, *with_table, 0]

    def stream(macs: int) -> bytes:
        return b"COP1" + struct.pack(f"<{7 + len(words)}I", 1, macs, 0, 5, 5, 5, 2 | len(words) << 16, *words)

    for small in (5, 6):
        table, other = _dmas(stream(small))
        changed, places = insert_waits(stream(small))
        assert _dmas(changed) == [table, table, other]
        assert len(changed) == len(stream(small)) + 4 * len(places)
        assert set(places) == {4 * (len(words) - 5)}
    assert insert_waits(stream(7)) == (stream(7), [])


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_stream_with_all_waits_is_unchanged(accelerator: str) -> None:
    stream = _payload(accelerator).commands
    assert insert_waits(stream) == (stream, [])


@pytest.mark.parametrize("rows", [32, 33])
def test_legacy_core_starts_kernels_of_over_32_rows_too_early(rows: int) -> None:
    """Vela's legacy core underestimates the rows of the kernel, whose last input rows are not written yet."""
    model = depthwise([(3, 3), (rows, 4)], (rows + 2, 6))
    x = np.zeros((1, rows + 2, 6, 16), np.int8)
    VelaProgram(compile_tflite(model, "ethos-u55-32")).run_checked([x])
    legacy = VelaProgram(compile_tflite(model, "ethos-u55-32", "--debug-force-legacy-core"))
    if rows == 32:
        legacy.run_checked([x])
        return
    message = r"NPU_OP_DEPTHWISE at byte \d+: it may read byte \d+ of region 1 before .* BLOCKDEP is too large"
    with pytest.raises(RunError, match=message):
        legacy.run_checked([x])
