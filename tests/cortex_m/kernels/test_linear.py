"""The linear layer and the matrix product in C++ equal their records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from arm_backend_core.cortex_m.catalog import find_kernel
from arm_backend_core.cortex_m.kernels.linear import compute_kernel_sum
from arm_backend_core.targets.cortex_m import Isa
from tests.cortex_m.kernels.random_arguments import (
    add_scratch,
    draw_activation,
    draw_bias,
    draw_factors,
    draw_int8,
    draw_zero_point,
    make_generators,
)
from tests.runtime.kernel_library import KernelError, KernelLibrary

pytestmark = pytest.mark.xdist_group("cortex_m_kernels")


def draw_linear(random: np.random.Generator) -> list[Any]:
    """Arguments of ``quantized_linear`` with a bias and without ``kernel_sum``."""
    depth, columns = int(random.integers(1, 70)), int(random.integers(1, 12))
    lead = tuple(int(size) for size in random.integers(1, 4, int(random.integers(0, 4))))
    ((multiplier, shift),) = draw_factors(random, 1, 70 * 70 * depth**0.5)
    low, high = draw_activation(random)
    filter_offset = 0 if random.random() < 0.5 else -draw_zero_point(random)
    return [
        *(draw_int8(random, (*lead, depth)), draw_int8(random, (columns, depth)), draw_bias(random, columns), None),
        *(-draw_zero_point(random), filter_offset, draw_zero_point(random), [multiplier], [shift], high, low),
    ]


def draw_batch_matmul(random: np.random.Generator) -> list[Any]:
    """Arguments of ``quantized_batch_matmul`` without ``scratch``."""
    batch, rows, columns, depth = (int(random.integers(1, limit)) for limit in (4, 8, 12, 70))
    ((multiplier, shift),) = draw_factors(random, 1, 70 * 70 * depth**0.5)
    return [
        *(draw_int8(random, (batch, rows, depth)), -draw_zero_point(random)),
        *(draw_int8(random, (batch, columns, depth)), -draw_zero_point(random)),
        *(draw_zero_point(random), multiplier, shift),
    ]


def use_kernel_sum(arguments: list[Any]) -> list[Any]:
    """Replace the bias by the kernel sum in arguments of ``quantized_linear``, as in programs for MVE."""
    inputs, weights, bias, _, input_offset, filter_offset, *rest = arguments
    total = compute_kernel_sum(weights, bias, input_offset, filter_offset)
    return [inputs, weights, None, total, input_offset, filter_offset, *rest]


def test_random_linear(kernels: KernelLibrary, case_count: int) -> None:
    compute = find_kernel("quantized_linear").compute
    for number, random in enumerate(make_generators("quantized_linear", case_count)):
        arguments = draw_linear(random)
        expected = compute(*arguments)
        np.testing.assert_array_equal(kernels.run("quantized_linear", *arguments), expected, f"case {number}")
        summed = use_kernel_sum(arguments)
        np.testing.assert_array_equal(compute(*summed), expected, f"case {number}, kernel_sum")
        np.testing.assert_array_equal(kernels.run("quantized_linear", *summed), expected, f"case {number}, kernel_sum")


def test_random_batch_matmul(kernels: KernelLibrary, case_count: int) -> None:
    name = "quantized_batch_matmul"
    for number, random in enumerate(make_generators(name, case_count)):
        arguments = add_scratch(name, draw_batch_matmul(random), list(Isa)[number % len(Isa)])
        expected = find_kernel(name).compute(*arguments)
        np.testing.assert_array_equal(kernels.run(name, *arguments), expected, f"case {number}")


def test_sums_wrap(kernels: KernelLibrary) -> None:
    """Sums that 32 bits cannot represent, which no export makes, wrap in the kernel as in the record."""
    inputs = np.full((1, 140_000), 127, np.int8)
    arguments = [inputs, -inputs, np.array([-(2**31)], np.int32), None, 128, 0, 5, [2**31 - 1], [-20], 127, -128]
    expected = find_kernel("quantized_linear").compute(*arguments)
    np.testing.assert_array_equal(kernels.run("quantized_linear", *arguments), expected)


@pytest.mark.parametrize("shapes", [((0, 3), (2, 3)), ((2, 0), (3, 0)), ((2, 3), (0, 3))])
def test_empty_tensors(shapes: tuple[tuple[int, int], tuple[int, int]], kernels: KernelLibrary) -> None:
    inputs, weights = (np.zeros(shape, np.int8) for shape in shapes)
    arguments = [inputs, weights, None, None, 1, 2, 3, [1 << 30], [0], 127, -128]
    expected = find_kernel("quantized_linear").compute(*arguments)
    np.testing.assert_array_equal(kernels.run("quantized_linear", *arguments), expected)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("input", np.zeros((2, 3), np.int16)),
        ("input", np.zeros((), np.int8)),
        ("input", np.zeros((2, 4), np.int8)),
        ("weights", np.zeros((2, 3, 1), np.int8)),
        ("weights", np.zeros((3, 2), np.int8).T),
        ("bias", np.zeros(3, np.int32)),
        ("bias", np.zeros(2, np.int64)),
        ("kernel_sum", np.zeros(1, np.int32)),
        ("input_offset", 129),
        ("filter_offset", -128),
        ("output_offset", 1 << 40),
        ("requantize_multipliers", []),
        ("requantize_multipliers", [1, 1]),
        ("requantize_multipliers", [-(2**31)]),
        ("requantize_shifts", [31]),
        ("activation_max", 128),
        ("activation_min", 1 << 33),
    ],
)
def test_bad_linear_is_refused(argument: str, value: Any, kernels: KernelLibrary) -> None:
    valid: list[Any] = [np.zeros((2, 3), np.int8), np.zeros((2, 3), np.int8), None, None]
    valid += [0, 0, 0, [1 << 30], [0], 127, -128]
    names = [text.split()[-1] for text in find_kernel("quantized_linear").arguments.split(",")]
    arguments = {**dict(zip(names, valid, strict=True)), argument: value}
    kernels.call("quantized_linear", *valid, np.zeros((2, 2), np.int8))
    with pytest.raises(KernelError, match=r"cortex_m::quantized_linear\.out: \w+ \w+"):
        kernels.call("quantized_linear", *arguments.values(), np.zeros((2, 2), np.int8))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("lhs", np.zeros((2, 3), np.int8)),
        ("lhs", np.zeros((2, 3, 4), np.int32)),
        ("rhs_transposed", np.zeros((1, 5, 4), np.int8)),
        ("rhs_transposed", np.zeros((2, 5, 3), np.int8)),
        ("rhs_transposed", np.zeros((2, 4, 4), np.int8)),
        ("lhs_zero_point", 129),
        ("rhs_zero_point", -128),
        ("output_zero_point", 128),
        ("output_multiplier", 2**31),
        ("output_shift", 31),
    ],
)
def test_bad_batch_matmul_is_refused(argument: str, value: Any, kernels: KernelLibrary) -> None:
    valid: list[Any] = [np.zeros((2, 3, 4), np.int8), 0, np.zeros((2, 5, 4), np.int8), 0, 0, 1 << 30, 0]
    valid.append(np.zeros(0, np.int8))
    names = [text.split()[-1] for text in find_kernel("quantized_batch_matmul").arguments.split(",")]
    arguments = {**dict(zip(names, valid, strict=True)), argument: value}
    kernels.call("quantized_batch_matmul", *valid, np.zeros((2, 3, 5), np.int8))
    with pytest.raises(KernelError, match=r"cortex_m::quantized_batch_matmul\.out: \w+ \w+"):
        kernels.call("quantized_batch_matmul", *arguments.values(), np.zeros((2, 3, 5), np.int8))
