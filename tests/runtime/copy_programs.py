"""Hand-written command streams with inputs and outputs, for tests that wrap them in models."""

from __future__ import annotations

from arm_recipes.runtime.ethosu_payload import SCRATCH, EthosUTensor
from tests.runtime.command_stream_builder import CommandStreamBuilder
from tests.runtime.ethosu_emulator import Payload


def make_copy_program(npu: str, *, region: int, waits: bool = True) -> Payload:
    """Build a program that copies the first 16 bytes of ``region`` to scratch, then within scratch to the result."""
    commands = CommandStreamBuilder(npu)
    commands.copy((region, 0), (SCRATCH, 16), 16, waits=waits)
    commands.copy((SCRATCH, 16), (SCRATCH, 32), 16)
    first, last = (EthosUTensor((16,), 1, offset, SCRATCH) for offset in (0, 32))
    return Payload(commands.stream, bytes(16), 48, (first,), (last,))
