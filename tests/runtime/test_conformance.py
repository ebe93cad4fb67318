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
    """Of each operator a small test on U85 and on U55 or U65."""
    entry = _INTEGER[kind]
    smaller = npu.ACCELERATORS[len(kind) % 2]
    tests = sampled(entry, 2, 1, most_elements=1000, most_batches=1)
    written = [test.write() for test in tests if test.fails is None]
    done = [
        npu.judge(test, accelerator, emulator)
        for test in written
        if test is not None
        for accelerator in (smaller, npu.ACCELERATORS[-1])
    ]
    assert {verdict.written for verdict in done} <= {npu.EQUAL, npu.HARDWARE, npu.LARGE}, done
    assert any(verdict.written == npu.EQUAL for verdict in done), done
