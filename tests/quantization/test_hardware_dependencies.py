"""``ConsultedHardware``: it equals the hardware that it copies, and records what is read."""

from __future__ import annotations

from arm_backend_core import compilation_log
from arm_backend_core.quantization.hardware_dependencies import ConsultedHardware, differing_facts
from arm_backend_core.targets.hardware import HARDWARE


def test_each_attribute_is_that_of_the_hardware() -> None:
    for hardware in HARDWARE.values():
        assert vars(ConsultedHardware.of(hardware)) == vars(hardware)


def test_attributes_that_are_read_are_recorded() -> None:
    with compilation_log.record() as log:
        consulted = ConsultedHardware.of(HARDWARE["ethos-u85"])
        assert log.hardware_facts == {}
        assert consulted.npu
    assert log.hardware_facts == {"npu": True}


def test_only_attributes_that_were_read_are_compared() -> None:
    with compilation_log.record() as log:
        assert ConsultedHardware.of(HARDWARE["ethos-u85"]).splits_matmuls
    assert differing_facts(log.hardware_facts, HARDWARE["ethos-u55"]) == {"splits_matmuls": (True, False)}
    assert differing_facts({"npu": True}, HARDWARE["ethos-u55"]) == {}
