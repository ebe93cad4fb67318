"""The records and the kernels in C++ are those of ExecuTorch's list of operators."""

from __future__ import annotations

import re

import pytest

from arm_backend_core.cortex_m.catalog import find_kernel
from arm_backend_core.cortex_m.kernels.registry import KERNELS
from tests.runtime.cpp_build import executorch_directory
from tests.runtime.kernel_library import KernelLibrary


@pytest.fixture(scope="module")
def schemas() -> dict[str, str]:
    """Arguments of ExecuTorch's operators by name."""
    text = (executorch_directory() / "backends/cortex_m/ops/operators.yaml").read_text()
    return dict(re.findall(r"func: cortex_m::(\w+)\.out\((.*), \*, Tensor\(a!\) out\) -> Tensor\(a!\)", text))


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_arguments_of_a_record_are_those_of_the_schema(name: str, schemas: dict[str, str]) -> None:
    assert find_kernel(name).arguments == schemas[name]


def test_each_kernel_has_a_record(kernels: KernelLibrary) -> None:
    assert sorted(kernels.list_names()) == sorted(KERNELS)


def test_each_operator_has_a_kernel(schemas: dict[str, str]) -> None:
    assert set(schemas) == set(KERNELS)


def test_an_unknown_kernel_raises() -> None:
    with pytest.raises(KeyError, match="quantized_tan"):
        find_kernel("quantized_tan")
