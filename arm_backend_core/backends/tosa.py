"""The TOSA target: the flatbuffer is the payload."""

from __future__ import annotations

from arm_backend_core.backends.payload import Payload


def compile_tosa(flatbuffer: bytes) -> Payload:
    """The payload of a TOSA delegate is its flatbuffer, unchanged."""
    return Payload(flatbuffer)
