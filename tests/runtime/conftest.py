"""What several tests of the runtime share."""

from __future__ import annotations

import pytest

from tests.runtime.ethosu_emulator import ACCELERATORS, OTHERS, Emulator, build


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    """The Ethos-U emulator, compiled once in a process."""
    return Emulator(build(tmp_path_factory.mktemp("emulator")))


@pytest.fixture(scope="session")
def accelerators(pytestconfig: pytest.Config) -> tuple[str, ...]:
    """The NPUs that ``make test`` has the time for, or more of them."""
    return (*ACCELERATORS, *OTHERS) if pytestconfig.getoption("verify") else ACCELERATORS
