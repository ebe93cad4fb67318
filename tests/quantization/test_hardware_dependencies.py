"""``TrackedHardware``: it equals the hardware that it copies, and records what is read."""

from __future__ import annotations

from arm_backend_core import compilation_log
from arm_backend_core.quantization.hardware_dependencies import TrackedHardware, find_changed_dependencies
from arm_backend_core.targets.hardware import HARDWARE


def test_each_attribute_is_that_of_the_hardware() -> None:
    for hardware in HARDWARE.values():
        assert vars(TrackedHardware.of(hardware)) == vars(hardware)


def test_attributes_that_are_read_are_recorded() -> None:
    with compilation_log.open_log() as log:
        tracked = TrackedHardware.of(HARDWARE["ethos-u85"])
        assert log.hardware_dependencies == {}
        assert tracked.is_ethos_u
    assert log.hardware_dependencies == {"is_ethos_u": True}


def test_only_attributes_that_were_read_are_compared() -> None:
    with compilation_log.open_log() as log:
        assert TrackedHardware.of(HARDWARE["ethos-u85"]).splits_matmuls
    assert find_changed_dependencies(log.hardware_dependencies, HARDWARE["ethos-u55"]) == {
        "splits_matmuls": (True, False)
    }
    assert find_changed_dependencies({"is_ethos_u": True}, HARDWARE["ethos-u55"]) == {}
