"""Every PyTorch dtype has one kind, or raises."""

from __future__ import annotations

import pytest
import torch

from arm_backend_core.errors import ModelError
from arm_backend_core.quantization.diagnostics.error_metrics import ErrorSums
from arm_backend_core.scalar_kind import ScalarKind, kind_of
from arm_recipes.comparison.accuracy import flatten_labels
from arm_recipes.runtime.tensor_info import TensorInfo

DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kind_of_each_pytorch_dtype(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    if name.startswith(("q", "bits")):
        with pytest.raises(ModelError, match=rf"torch\.{name}.*dequantize"):
            kind_of(dtype)
        return
    found = kind_of(dtype)
    assert (found is ScalarKind.FLOAT) == dtype.is_floating_point
    assert (found is ScalarKind.COMPLEX) == dtype.is_complex
    assert (found is ScalarKind.BOOLEAN) == (dtype is torch.bool)
    assert (found is ScalarKind.INTEGER) == name.startswith(("int", "uint"))


def test_error_sums_count_real_and_imaginary_parts() -> None:
    right = torch.tensor([3 + 4j, 1j])
    sums = ErrorSums.of(right, right.conj())
    assert (sums.signal, sums.noise) == (26, 68)


def test_only_integer_tensors_are_quantized_and_dequantized() -> None:
    info = TensorInfo("y", "int8", (2,), scale=0.5, zero_point=1)
    assert info.to_model(torch.tensor([1, 3], dtype=torch.int8)).tolist() == [0.0, 1.0]
    for other in (torch.tensor([True, False]), torch.tensor([1j, 2.0])):
        assert info.to_model(other) is other
        assert info.to_program(other) is other


def test_complex_labels_raise() -> None:
    with pytest.raises(ValueError, match="complex64"):
        flatten_labels(torch.tensor([1 + 0j]))
