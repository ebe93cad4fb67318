"""TensorFlow Lite for Microcontrollers (TFLM): the reference kernels."""

from __future__ import annotations

from collections.abc import Sequence

from tests.tflite.network import Array

#: Arena of the interpreter, sufficient for every network of the tests. Each call allocates it.
_ARENA_BYTES = 1 << 20


def run(flatbuffer: bytes, samples: Sequence[Sequence[Array]], outputs: int) -> list[list[Array]]:
    """Run a network on one sample after the other, and return the outputs of each. Variables keep their values.

    Raises:
        RuntimeError: TFLM has no kernel for an operator.
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
