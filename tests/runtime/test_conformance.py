"""A sample of the TOSA conformance generator's tests, compiled by Vela and executed on the emulator."""

from __future__ import annotations

import pytest

from tests.runtime.ethosu_emulator import Emulator
from tests.tosa.conformance import npu
from tests.tosa.conformance.campaign import sampled
from tests.tosa.conformance.generation import CONTROL_FLOW, Entry, entries

#: Of each operator of integers the first entry.
_INTEGER: dict[str, Entry] = {}
for _entry in entries():
    if _entry.kind not in CONTROL_FLOW and ("tosa-pro-int" in _entry.group or _entry.group == "standard"):
        _INTEGER.setdefault(_entry.kind, _entry)


@pytest.mark.parametrize("kind", sorted(_INTEGER))
def test_npus_compute_what_the_reference_model_does(kind: str, emulator: Emulator) -> None:
    """Of each operator small tests on U85 and on U55 or U65, until some are executed."""
    accelerators = npu.ACCELERATORS[len(kind) % 2], npu.ACCELERATORS[-1]
    executed = []
    for test in sampled(_INTEGER[kind], 20, 1, most_elements=1000, most_batches=1):
        written = test.write() if test.fails is None else None
        if written is not None:
            verdicts = [npu.judge(written, accelerator, emulator) for accelerator in accelerators]
            executed += [verdict for verdict in verdicts if verdict.written not in (npu.HARDWARE, npu.LARGE)]
        if len(executed) > 1:
            break
    assert executed
    assert all(verdict.written == npu.EQUAL for verdict in executed), executed
