"""What several tests of the runtime share."""

from __future__ import annotations

import pytest

from tests.runtime.ethosu_emulator import Emulator, build


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    """The Ethos-U emulator, compiled once in a process."""
    return Emulator(build(tmp_path_factory.mktemp("emulator")))
