"""TensorFlow Lite for Microcontrollers: the kernels that results are compared with."""

from __future__ import annotations

from collections.abc import Sequence

from tests.tflite.network import Array

#: Enough for every network of the tests; it is taken at each call.
_ARENA_BYTES = 1 << 20


def run(flatbuffer: bytes, inputs: Sequence[Array], outputs: int) -> list[Array]:
    """Execute a network once, from its initial state.

    Raises:
        RuntimeError: TFLM has no kernel for it.
    """
    from tflite_micro.python.tflite_micro import runtime

    interpreter = runtime.Interpreter.from_bytes(flatbuffer, arena_size=_ARENA_BYTES)
    for index, array in enumerate(inputs):
        interpreter.set_input(array, index)
    interpreter.invoke()
    return [interpreter.get_output(index) for index in range(outputs)]
