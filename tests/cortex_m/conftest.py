"""Fixtures of the tests of ``cortex_m`` kernels."""

from __future__ import annotations

import pytest

from tests.runtime.kernel_library import KernelLibrary


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    """The kernels in C++."""
    return KernelLibrary(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def case_count(pytestconfig: pytest.Config) -> int:
    """Number of random cases of each kernel: more with ``--verify``."""
    return 10_000 if pytestconfig.getoption("verify") else 300
