"""TensorFlow Lite for Microcontrollers: the kernels that results are compared with."""

from __future__ import annotations

from collections.abc import Sequence

from tests.tflite.network import Array

#: Enough for every network of the tests; it is taken at each call.
_ARENA_BYTES = 1 << 20


def run(flatbuffer: bytes, samples: Sequence[Sequence[Array]], outputs: int) -> list[list[Array]]:
    """Outputs of a network for the inputs of one sample after the other. Variables keep their values between them.

    Raises:
        RuntimeError: TFLM has no kernel for it.
    """
    from tflite_micro.python.tflite_micro import runtime

    interpreter = runtime.Interpreter.from_bytes(flatbuffer, arena_size=_ARENA_BYTES)
    results = []
    for inputs in samples:
        for index, array in enumerate(inputs):
            interpreter.set_input(array, index)
        interpreter.invoke()
        results.append([interpreter.get_output(index).copy() for index in range(outputs)])
    return results
