"""Register semantics that no compiled program tests, or that compiler and emulator could misinterpret alike.

The expected results are those of Arm's NPU; see the comments in ``runtime/emulator``. Tests of inferred behaviour say
so.
"""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from arm_recipes.runtime.ethosu_stream import StreamError
from tests.runtime.command_stream_builder import (
    ADD,
    AVERAGE,
    LRELU,
    MAX,
    MUL,
    SHR,
    SUB,
    TABLE_ADDRESS,
    TABLES,
    CommandStreamBuilder,
    copy_by_dma,
    elementwise,
    execute,
    pool,
)
from tests.runtime.ethosu_emulator import Emulator

OLDER = ("ethos-u55-128", "ethos-u65-256")
U55, U85 = "ethos-u55-128", "ethos-u85-256"
ALL = (*OLDER, U85)
#: ACTIVATION of each NPU: functions TANH and SIGMOID.
TANH, SIGMOID = {U55: 3, U85: 10}, {U55: 4, U85: 11}


def _row(*values: int, dtype: type = np.int32) -> np.ndarray:
    return np.array(values, dtype)


@pytest.mark.parametrize("npu", OLDER)
def test_pools_and_elementwise_operations_read_no_per_channel_scales(npu: str, emulator: Emulator) -> None:
    """The bit for a global scale is clear, and SCALE_BASE is not set."""
    image = _row(1, -2, 3, 4, dtype=np.int8).reshape(1, 1, 4)
    assert pool(emulator, npu, MAX, image, scale=None) == [1, -2, 3, 4]
    padded = _row(8, 9, dtype=np.int8).reshape(1, 2, 1)
    assert pool(emulator, npu, AVERAGE, padded, kernel=(1, 2), right=1, scale=None) == [9, 9]
    operands = [_row(9, 9), _row(1, 2)]
    assert elementwise(emulator, npu, SUB, operands, np.int32, scale=None) == [8, 7]


@pytest.mark.parametrize("npu", OLDER)
def test_max_pools_and_padded_average_pools_are_not_scaled(npu: str, emulator: Emulator) -> None:
    """Inferred for averages with padding."""
    image = _row(1, -2, 3, 4, dtype=np.int8).reshape(1, 1, 4)
    assert pool(emulator, npu, MAX, image, scale=(1, 1)) == [1, -2, 3, 4]
    padded = _row(8, 10, dtype=np.int8).reshape(1, 2, 1)
    assert pool(emulator, npu, AVERAGE, padded, kernel=(1, 2), right=1, scale=(1, 1)) == [9, 10]
    assert pool(emulator, npu, AVERAGE, padded, kernel=(1, 2), scale=(1, 1)) == [
        9
    ]  # without padding, OFM_SCALE divides the sum


def test_max_pools_of_u85_are_scaled(emulator: Emulator) -> None:
    assert pool(emulator, U85, MAX, _row(2, -4, dtype=np.int8).reshape(1, 1, 2), scale=(1, 1)) == [1, -2]


@pytest.mark.parametrize("npu", OLDER)
def test_int32_results_have_no_zero_point(npu: str, emulator: Emulator) -> None:
    assert elementwise(emulator, npu, SUB, [_row(9, 9), _row(1, 2)], np.int32, zero_point=5) == [8, 7]


def test_int32_results_have_a_zero_point_before_a_table(emulator: Emulator) -> None:
    table = np.arange(-128, 128, dtype=np.int32) * 1000
    commands, x = CommandStreamBuilder(U55), _row(3, -4, dtype=np.int8).reshape(1, 1, 2)
    commands.copy((0, 0), (TABLES, TABLE_ADDRESS), table.nbytes)
    output = np.zeros((1, 1, 2), np.int32)
    commands.ofm(16, output, zero_point=5)
    commands.set(293, 16 | 3 << 12)  # ACTIVATION: table 0, of results that are clipped to 8 bits
    commands.set(294, -128)
    commands.set(295, 127)
    commands.ifm(0, x)
    commands.kernel(1, 1)
    commands.start(5, MAX)
    result = execute(emulator, commands, [(0, x)], (16, output), table)
    assert result.ravel().tolist() == [8000, 1000]


@pytest.mark.parametrize("npu", ALL)
def test_int32_products_are_only_shifted(npu: str, emulator: Emulator) -> None:
    operands = [_row(65536, 196608), _row(65536, 65536)]
    assert elementwise(emulator, npu, MUL, operands, np.int32, scale=(1 << 30, 31)) == [2, 6]
    narrow = [_row(256, 768, dtype=np.int16), _row(256, 256, dtype=np.int16)]
    assert elementwise(emulator, npu, MUL, narrow, np.int16, scale=(1 << 30, 31)) == [32767, 32767]
    assert elementwise(emulator, npu, MUL, narrow, np.int16, scale=(3, 16)) == [3, 9]


def test_int32_differences_are_scaled_on_u85(emulator: Emulator) -> None:
    operands = [_row(90, 9), _row(10, 1)]
    assert elementwise(emulator, U85, SUB, operands, np.int32, scale=(3, 2)) == [60, 6]


@pytest.mark.parametrize("npu", ALL)
def test_int32_results_saturate(npu: str, emulator: Emulator) -> None:
    """Inferred from U55."""
    operands = [_row(2**30, -(2**30)), _row(2, 4)]
    assert elementwise(emulator, npu, MUL, operands, np.int32) == [2**31 - 1, -(2**31)]
    operands = [_row(2**31 - 1, -(2**31)), _row(1, -1)]
    assert elementwise(emulator, npu, ADD, operands, np.int32) == [2**31 - 1, -(2**31)]
    operands = [_row(2**31 - 1, -(2**31)), _row(-1, 1)]
    assert elementwise(emulator, npu, SUB, operands, np.int32) == [2**31 - 1, -(2**31)]


@pytest.mark.parametrize("npu", OLDER)
def test_leaky_relu_scales_only_negative_values(npu: str, emulator: Emulator) -> None:
    for dtype in (np.int8, np.int16):
        assert elementwise(emulator, npu, LRELU, [_row(10, -10, dtype=dtype)], dtype, scale=(1, 1)) == [10, -5]


@pytest.mark.parametrize("npu", OLDER)
def test_right_shifts_follow_the_rounding_mode(npu: str, emulator: Emulator) -> None:
    """The rounding of mode 0 is inferred from U55."""
    operands = [_row(7, 6, -7), _row(1, 1, 1)]
    results = [elementwise(emulator, npu, SHR, operands, np.int32, scale=None, rounding=mode) for mode in range(3)]
    assert results == [[4, 3, -3], [3, 3, -4], [4, 3, -3]]


@pytest.mark.parametrize("npu", [U55, U85])
def test_built_in_sigmoid_and_tanh(npu: str, emulator: Emulator) -> None:
    """Arguments are in units of 1 / 12288, results have 15 fractional bits, as in TFLite Micro's 16-bit kernels."""
    x = _row(0, 12288, -12288, 32767, -32768, dtype=np.int16).reshape(1, 1, 5)
    assert pool(emulator, npu, AVERAGE, x, activation=SIGMOID[npu]) == [16384, 23956, 8812, 30639, 2128]
    assert pool(emulator, npu, AVERAGE, x, activation=TANH[npu]) == [0, 24956, -24956, 32453, -32453]


@pytest.mark.parametrize("npu", [U55, U85])
def test_arguments_of_built_in_functions_are_not_clipped(npu: str, emulator: Emulator) -> None:
    """Arguments that the scale moves beyond 16 bits give the limits of the functions."""
    x = _row(32767, -32768, dtype=np.int16).reshape(1, 1, 2)
    assert pool(emulator, npu, AVERAGE, x, scale=(16, 0), activation=SIGMOID[npu]) == [32767, 1]
    assert pool(emulator, npu, AVERAGE, x, scale=(16, 0), activation=TANH[npu]) == [32767, -32767]


def test_sigmoid_table_is_that_of_tflite_micro(emulator: Emulator) -> None:
    """TANH of each multiple of 256 is an entry of the table 65536 * sigmoid(i / 24), minus 32768."""
    x = (np.arange(256) * 128).astype(np.int16).reshape(1, 256, 1)
    points = np.array(pool(emulator, U55, AVERAGE, x, scale=(2, 0), activation=TANH[U55])) + 32768
    assert points[[0, 4, 24, 28, 255]].tolist() == [32768, 35493, 47911, 49975, 65535]
    assert zlib.crc32(points.astype("<u2").tobytes()) == 3092212404


@pytest.mark.parametrize("npu", [U55, U85])
def test_built_in_functions_of_8_bits_are_refused(npu: str, emulator: Emulator) -> None:
    x = _row(1, 2, dtype=np.int8).reshape(1, 1, 2)
    with pytest.raises(StreamError, match="a built-in activation function with results of 8 bits"):
        pool(emulator, npu, AVERAGE, x, activation=TANH[npu])


@pytest.mark.parametrize("npu", ALL)
def test_dma_of_one_row_needs_no_row_count(npu: str, emulator: Emulator) -> None:
    data = np.arange(16, dtype=np.uint8)
    assert copy_by_dma(emulator, npu, data) == list(range(16))


def test_average_pools_of_u85_are_not_scaled(emulator: Emulator) -> None:
    """Inferred. The average of one element is a copy, and is scaled."""
    image = _row(8, 8, dtype=np.int8).reshape(1, 2, 1)
    assert pool(emulator, U85, AVERAGE, image, kernel=(1, 2), scale=(1, 1)) == [8]
    assert pool(emulator, U85, AVERAGE, image, scale=(1, 1)) == [4, 4]
