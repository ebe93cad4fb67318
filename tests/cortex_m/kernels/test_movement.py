"""The kernels that move elements equal their records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from arm_backend_core.cortex_m.kernels.movement import find_transpose_limitation, padded_shape
from arm_backend_core.targets.cortex_m import Isa
from tests.cortex_m.kernels.cases import Case
from tests.cortex_m.kernels.kernel_comparison import check_refusal, compare, compare_random_cases
from tests.runtime.kernel_library import KernelLibrary, to_channels_last

pytestmark = pytest.mark.xdist_group("cortex_m_kernels")

_IMAGE = np.arange(-60, 60, dtype=np.int8).reshape(2, 3, 4, 5)
_MATRIX = _IMAGE.reshape(6, 20)
_TRANSPOSE: dict[str, Any] = {"input": _IMAGE, "perm": [0, 2, 3, 1]}
_PAD: dict[str, Any] = {"input": _IMAGE, "pre_pad": [0, 1, 0, 1], "post_pad": [1, 0, 0, 2], "pad_value": 7}


@pytest.mark.parametrize("name", ["transpose", "pad"])
def test_random_arguments(name: str, kernels: KernelLibrary, case_count: int) -> None:
    compare_random_cases(kernels, name, case_count)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": _IMAGE.astype(np.int16)}, "input must be int8"),
        ({"input": np.zeros((), np.int8), "perm": []}, "rank of input must be from 1 to 4"),
        ({"input": _IMAGE.reshape(1, 2, 3, 4, 5), "perm": [0, 1, 2, 4, 3]}, "rank of input must be from 1 to 4"),
        ({"perm": [0, 2, 3]}, "perm must name each axis"),
        ({"perm": [0, 2, 3, 3]}, "perm must name each axis"),
        ({"perm": [0, 2, 3, -3]}, "perm must name each axis"),
        ({"perm": [0, 2, 3, 1 << 40]}, "perm must name each axis"),
        ({"input": _MATRIX, "perm": [0, 1]}, r"perm must be \(1, 0\) for an input of rank 2"),
        ({"input": to_channels_last(_IMAGE)}, "input must have contiguous memory format"),
        ({"perm": [0, 1, 2, 3]}, "out cannot have the shape of the result"),
        ({"out": np.zeros((2, 5, 4, 3), np.int8).transpose(0, 2, 1, 3)}, "out must have contiguous memory format"),
    ],
)
def test_bad_transposes_are_refused(changes: dict[str, Any], message: str, kernels: KernelLibrary) -> None:
    out = np.zeros((2, 4, 5, 3), np.int8)
    check_refusal(kernels, "transpose", _TRANSPOSE, out, changes, message)


@pytest.mark.parametrize(
    ("isa", "shape", "permutation", "expected"),
    [
        (Isa.SCALAR, (3, 4), [0, 1], False),
        (Isa.SCALAR, (3, 4), [1, 0], True),
        (Isa.SCALAR, (1 << 16, 4), [1, 0], False),
        (Isa.SCALAR, (4, 9363), [1, 0], True),
        (Isa.MVE, (4, 9363), [1, 0], False),
        (Isa.MVE, (4, 9362), [1, 0], True),
        (Isa.DSP, (2, 3, 4, 5), [0, 1, 2, 3], True),
        (Isa.MVE, (2, 3, 4, 5), [0, 1, 2, 3], False),
        (Isa.MVE, (2, 3, 4, 9363), [0, 1, 3, 2], False),
        (Isa.MVE, (2, 3, 4, 9363), [0, 3, 1, 2], True),
        (Isa.MVE, (2, 3, 4), [0, 1, 2], True),
        (Isa.MVE, (2, 3, 4), [0, 1, 1], False),
        (Isa.MVE, (1, 2, 3, 4, 5), [4, 3, 2, 1, 0], False),
    ],
)
def test_transposes_that_cmsis_nn_has(isa: Isa, shape: tuple[int, ...], permutation: list[int], expected: bool) -> None:
    assert (find_transpose_limitation(isa, shape, permutation) is None) is expected


@pytest.mark.parametrize("shape", [(2, 1, 4, 5), (2, 3, 1, 1)])
def test_order_of_the_amounts_where_the_memory_format_is_ambiguous(
    shape: tuple[int, ...], kernels: KernelLibrary
) -> None:
    """A contiguous tensor of one channel or one pixel is padded as one in channels_last memory format."""
    x = np.arange(np.prod(shape), dtype=np.int8).reshape(shape)
    case = Case((x, [0, 1, 0, 0], [0, 0, 2, 3], 9), channels_last=True)
    assert compare(kernels, "pad", case).shape == (shape[0], shape[1] + 3, shape[2] + 1, shape[3] + 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": _IMAGE.astype(np.int16)}, "input must be int8"),
        ({"input": np.zeros((), np.int8)}, "rank of input must be from 1 to 4"),
        ({"pre_pad": [0, 1, 0]}, "pre_pad has the wrong length"),
        ({"post_pad": [0, 1, 0, -1]}, "post_pad must be from 0"),
        ({"pre_pad": [0, (1 << 31) - 1, 0, 1]}, "post_pad makes the result too large"),
        ({"pad_value": 128}, "pad_value must be from -128 to 127"),
        ({"input": _MATRIX, "pre_pad": [0, 1, 0, 1]}, "pre_pad or post_pad must be 0 for axes that the input lacks"),
        ({"pre_pad": [0, 1, 0, 2]}, "out cannot have the shape of the result"),
        ({"out": to_channels_last(np.zeros((3, 4, 4, 8), np.int8))}, "out must have contiguous memory format"),
        ({"input": _IMAGE.transpose(1, 0, 2, 3).copy().transpose(1, 0, 2, 3)}, "input must have contiguous memory"),
    ],
)
def test_bad_padding_is_refused(changes: dict[str, Any], message: str, kernels: KernelLibrary) -> None:
    check_refusal(kernels, "pad", _PAD, np.zeros((3, 4, 4, 8), np.int8), changes, message)


@pytest.mark.parametrize(
    ("shape", "before"), [((2, 3), [0, 1, 0, 0]), ((2, 3), [0, 0, 0, -1]), ((1, 2, 3, 4, 5), [0] * 4)]
)
def test_padding_without_a_shape(shape: tuple[int, ...], before: list[int]) -> None:
    with pytest.raises(ValueError, match="padding"):
        padded_shape(shape, before, [0] * 4)
