"""Command streams by hand with their inputs and outputs, for models around them."""

from __future__ import annotations

from arm_recipes.runtime.ethosu_payload import SCRATCH, EthosUTensor
from tests.runtime.ethosu_emulator import Payload
from tests.runtime.npu_streams import Commands


def copies(npu: str, *, region: int, waits: bool = True) -> Payload:
    """16 bytes at the begin of ``region`` are copied twice, within scratch the second time: that is the result."""
    commands = Commands(npu)
    commands.copy((region, 0), (SCRATCH, 16), 16, waits=waits)
    commands.copy((SCRATCH, 16), (SCRATCH, 32), 16)
    first, last = (EthosUTensor((16,), 1, offset, SCRATCH) for offset in (0, 32))
    return Payload(commands.stream, bytes(16), 48, (first,), (last,))
