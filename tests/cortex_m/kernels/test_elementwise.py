"""The elementwise kernels in C++ equal their records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from arm_backend_core.cortex_m.fixed_point import quantize_multiplier
from arm_backend_core.cortex_m.kernels.elementwise import ADD_LEFT_SHIFT, quantized_add
from arm_backend_core.cortex_m.kernels.registry import KERNELS
from arm_backend_core.targets.cortex_m import Isa
from tests.cortex_m.kernels.cases import Case
from tests.cortex_m.kernels.kernel_comparison import check_refusal, compare, compare_random_cases
from tests.runtime.kernel_library import KernelError, KernelLibrary, to_channels_last

pytestmark = pytest.mark.xdist_group("cortex_m_kernels")

_NAMES = ["quantized_add", "quantized_mul", "quantized_div", "minimum", "maximum", "quantized_activation"]
_IMAGE = np.arange(-60, 60, dtype=np.int8).reshape(2, 3, 4, 5)
_CHANNELS = np.arange(-1, 2, dtype=np.int8).reshape(1, 3, 1, 1)

_ADD = {
    "self": _IMAGE,
    "self_zero_point": 1,
    "self_multiplier": 1 << 30,
    "self_shift": 0,
    "other": _IMAGE,
    "other_zero_point": 2,
    "other_multiplier": 1 << 30,
    "other_shift": 0,
    "output_zero_point": 3,
    "output_multiplier": 1 << 30,
    "output_shift": -18,
    "activation_min": -100,
    "activation_max": 100,
}
_MUL = {
    "self": _IMAGE,
    "self_zero_point": 1,
    "other": _IMAGE,
    "other_zero_point": 2,
    "output_zero_point": 3,
    "output_multiplier": 1 << 30,
    "output_shift": -5,
}
_DIV = {
    "self": _IMAGE,
    "self_zero_point": 1,
    "other": _IMAGE,
    "other_zero_point": 2,
    "output_zero_point": 3,
    "output_scale": 16.0,
}
_VALID: dict[str, dict[str, Any]] = {
    "quantized_add": _ADD,
    "quantized_mul": _MUL,
    "quantized_div": _DIV,
    "minimum": {"self": _IMAGE, "other": _IMAGE},
    "maximum": {"self": _IMAGE, "other": _IMAGE},
    "quantized_activation": {"input": _IMAGE, "lut": np.arange(-128, 128, dtype=np.int8)},
}


@pytest.mark.parametrize("name", _NAMES)
def test_random_arguments(name: str, kernels: KernelLibrary, case_count: int) -> None:
    compare_random_cases(kernels, name, case_count)


@pytest.mark.parametrize("name", _NAMES)
def test_empty_tensors(name: str, kernels: KernelLibrary) -> None:
    empty = np.zeros((2, 0, 3), np.int8)
    tensors = {"self", "other", "input"}
    case = Case(tuple(empty if key in tensors else value for key, value in _VALID[name].items()))
    assert compare(kernels, name, case).shape == (2, 0, 3)


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": _IMAGE.astype(np.float32)}, r"(out|self|other) must be int(8|16)"),
        ({"out": np.zeros((2, 3, 4, 6), np.int8)}, "out cannot have the shape of the input"),
        ({"out": to_channels_last(_IMAGE)}, "out must have the memory format of "),
    ],
)
def test_bad_results_are_refused(name: str, changes: dict[str, Any], message: str, kernels: KernelLibrary) -> None:
    check_refusal(kernels, name, _VALID[name], np.zeros_like(_IMAGE), changes, message)


@pytest.mark.parametrize("name", ["quantized_add", "quantized_mul", "quantized_div", "minimum", "maximum"])
@pytest.mark.parametrize("argument", ["self", "other"])
def test_other_types_are_refused(name: str, argument: str, kernels: KernelLibrary) -> None:
    changes = {argument: _IMAGE.astype(np.int32)}
    check_refusal(kernels, name, _VALID[name], np.zeros_like(_IMAGE), changes, f"{argument} must be int8")


@pytest.mark.parametrize("name", ["quantized_add", "quantized_mul", "quantized_div"])
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *((f"{of}_zero_point", value) for of in ("self", "other", "output") for value in (-32_641, 32_641, 1 << 40)),
        ("output_zero_point", -129),
        ("output_zero_point", 128),
        *((f"{of}_multiplier", value) for of in ("self", "other", "output") for value in (-(1 << 31), 1 << 31)),
        *((f"{of}_shift", value) for of in ("self", "other", "output") for value in (-32, 31)),
        ("activation_min", -129),
        ("activation_min", 101),
        ("activation_max", 128),
        ("output_scale", float("nan")),
        ("output_scale", 1e39),
    ],
)
def test_bad_quantization_is_refused(name: str, argument: str, value: Any, kernels: KernelLibrary) -> None:
    if argument in _VALID[name]:
        check_refusal(kernels, name, _VALID[name], np.zeros_like(_IMAGE), {argument: value}, r"\w+ must be ")


@pytest.mark.parametrize("name", ["quantized_add", "quantized_div"])
@pytest.mark.parametrize("argument", ["self_zero_point", "other_zero_point"])
@pytest.mark.parametrize("value", [-129, 128])
def test_zero_point_outside_int8_is_refused(name: str, argument: str, value: int, kernels: KernelLibrary) -> None:
    check_refusal(kernels, name, _VALID[name], np.zeros_like(_IMAGE), {argument: value}, r"\w+ must be ")


@pytest.mark.parametrize("name", ["quantized_add", "quantized_mul"])
@pytest.mark.parametrize("argument", ["self", "other"])
def test_channels_are_broadcast_to_an_empty_tensor(name: str, argument: str, kernels: KernelLibrary) -> None:
    operands = {"self": _CHANNELS, "other": _CHANNELS, argument: np.zeros((0, 3, 4, 5), np.int8)}
    compare(kernels, name, Case(tuple((_VALID[name] | operands).values()), channels_last=True))


@pytest.mark.parametrize("name", ["quantized_add", "quantized_mul", "quantized_div"])
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (_CHANNELS, "self must have channels_last memory format"),
        (np.zeros((1, 1, 1, 1), np.int8), "other must have the shape of self"),
        (np.zeros((1, 3, 4, 5), np.int8), "other must have the shape of self"),
        (np.zeros((3, 1, 1), np.int8), "other must have the shape of self"),
        (to_channels_last(_IMAGE), "other must have the memory format of self"),
    ],
)
def test_other_broadcasts_are_refused(name: str, other: Any, message: str, kernels: KernelLibrary) -> None:
    expected = "other must have the shape of self" if name == "quantized_div" and other is _CHANNELS else message
    check_refusal(kernels, name, _VALID[name], np.zeros_like(_IMAGE), {"other": other}, expected)
    if other.shape != _IMAGE.shape and (other is not _CHANNELS or name == "quantized_div"):
        arguments = {**_VALID[name], "self": _IMAGE.shape, "other": other.shape}
        with pytest.raises(ValueError, match="broadcast"):
            KERNELS[name].result_shape(*arguments.values())


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ((2, 3, 4, 5), (2, 2, 4, 5), "other cannot be broadcast with self"),
        ((2, 3, 1, 1), (2, 3, 4, 5), "CMSIS-NN reads wrong elements if a row has one element"),
        ((2, 3, 4, 5), (3, 1, 1), "CMSIS-NN reads wrong elements if a row has one element"),
        ((1, 2, 3, 4, 5), (5,), "other cannot be broadcast with more than 4 axes"),
    ],
)
def test_broadcasts_that_cmsis_nn_lacks(
    first: tuple[int, ...], second: tuple[int, ...], message: str, kernels: KernelLibrary
) -> None:
    out = np.zeros([max(sizes) for sizes in zip(first, (1, 1, 1, 1, *second)[-len(first) :], strict=True)], np.int8)
    with pytest.raises(KernelError, match=message):
        kernels.call("minimum", np.zeros(first, np.int8), np.zeros(second, np.int8), out)
    if "with self" not in message:
        for isa in Isa:
            assert KERNELS["minimum"].find_limitation(isa, first, second)


def test_a_broadcast_needs_contiguous_tensors_or_one_element(kernels: KernelLibrary) -> None:
    image = to_channels_last(_IMAGE)
    compare(kernels, "minimum", Case((image, np.zeros((1, 1), np.int8)), channels_last=True))
    with pytest.raises(KernelError, match="can be broadcast only in contiguous memory format"):
        kernels.call("minimum", image, np.zeros((1, 1, 4, 5), np.int8), np.zeros_like(_IMAGE))
    assert KERNELS["minimum"].find_limitation(Isa.MVE, _IMAGE.shape, (4, 5)) is None


@pytest.mark.parametrize("count", [0, 255, 257])
def test_tables_have_256_elements(count: int, kernels: KernelLibrary) -> None:
    changes = {"lut": np.zeros(count, np.int8)}
    valid = _VALID["quantized_activation"]
    check_refusal(kernels, "quantized_activation", valid, np.zeros_like(_IMAGE), changes, "lut must have 256 elements")


def test_error_of_a_sum_is_about_half_a_step() -> None:
    """With the factors that exporters compute, the error is little more than half a step."""
    random = np.random.default_rng(0)
    x, y = (random.integers(-128, 128, 1000, np.int8) for _ in range(2))
    scales, zero_points = (0.03, 0.05, 0.07), (-3, 5, 10)
    largest = 2 * max(scales[:2])
    factors = [quantize_multiplier(scale / largest) for scale in scales[:2]]
    output = quantize_multiplier(largest / (2.0**ADD_LEFT_SHIFT * scales[2]))
    result = quantized_add(x, zero_points[0], *factors[0], y, zero_points[1], *factors[1], 10, *output, -128, 127)
    real = (x - float(zero_points[0])) * scales[0] + (y - float(zero_points[1])) * scales[1]
    assert np.abs(result - np.clip(real / scales[2] + 10, -128, 127)).max() < 0.501
