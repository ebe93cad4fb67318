"""Comparison of a kernel in C++ with its record, and checks that it refuses arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from arm_backend_core.cortex_m.catalog import find_kernel
from arm_backend_core.cortex_m.kernels.registry import Array
from tests.cortex_m.kernels.cases import DRAW, Case
from tests.runtime.kernel_library import KernelError, KernelLibrary

_GUARD, _GUARD_BYTES = 0x5A, 64


def run_like(kernels: KernelLibrary, name: str, case: Case, expected: Array) -> Array:
    """Call a kernel and return its result, for which it gets memory of the type and shape of ``expected``.

    Raises:
        KernelError: the kernel refuses the arguments.
        AssertionError: the kernel writes outside its result.
    """
    memory = np.full(expected.nbytes + 2 * _GUARD_BYTES, _GUARD, np.uint8)
    inside = memory[_GUARD_BYTES : _GUARD_BYTES + expected.nbytes].view(expected.dtype)
    if case.channels_last:
        batch, channels, height, width = expected.shape
        out = inside.reshape(batch, height, width, channels).transpose(0, 3, 1, 2)
    else:
        out = inside.reshape(expected.shape)
    kernels.call(name, *case.arguments, out)
    guards = np.concatenate([memory[:_GUARD_BYTES], memory[_GUARD_BYTES + expected.nbytes :]])
    assert (guards == _GUARD).all(), f"{name} writes outside its result"
    return out


def compare(kernels: KernelLibrary, name: str, case: Case) -> Array:
    """Compare a kernel with the arithmetic and the result shape of its record, bit by bit; return the result."""
    record = find_kernel(name)
    expected = np.asarray(record.compute(*case.arguments))
    shapes = [value.shape if isinstance(value, np.ndarray) else value for value in case.arguments]
    options = {"channels_last": case.channels_last} if name == "pad" else {}
    assert tuple(record.result_shape(*shapes, **options)) == expected.shape, case
    result = run_like(kernels, name, case, expected)
    assert np.array_equal(result, expected, equal_nan=expected.dtype == np.float32), case
    return result


def compare_random_cases(kernels: KernelLibrary, name: str, count: int) -> None:
    """Compare a kernel with its record on ``count`` random cases."""
    random = np.random.default_rng(40)
    for _ in range(count):
        compare(kernels, name, DRAW[name](random))


def check_refusal(
    kernels: KernelLibrary, name: str, valid: dict[str, Any], out: Array, changes: dict[str, Any], message: str
) -> None:
    """Check that a kernel takes the arguments ``valid``, and refuses them with ``changes``.

    Args:
        kernels: the kernels in C++.
        name: operator.
        valid: arguments by their names in the schema.
        out: memory for the result.
        changes: other values of arguments; ``out`` is the result.
        message: regular expression for the log line, after the operator's name.
    """
    kernels.call(name, *valid.values(), out)
    changed = {**valid, "out": out, **changes}
    with pytest.raises(KernelError, match=rf"cortex_m::{name}\.out: {message}"):
        kernels.call(name, *changed.values())
