"""TFLite models that Vela compiled, on this machine: their command stream, by the emulator of the NPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from arm_recipes.runtime.errors import RunError
from arm_recipes.runtime.ethosu import EthosUDelegate, EthosUFigures
from arm_recipes.runtime.program import Program
from arm_recipes.runtime.pte import ProgramError, PteDelegate, PteMethod, PteProgram, PteTensor
from arm_recipes.runtime.signature import Signature
from arm_recipes.runtime.tensor_info import TensorInfo
from arm_recipes.runtime.vela_tflite import ETHOS_U, VelaTflite, read_vela_tflite

if TYPE_CHECKING:
    import numpy as np

    from arm_recipes.runtime.trace import TracedOperation

    Array = np.ndarray[Any, Any]

#: What the only method is called, as in programs of ExecuTorch.
METHOD = "forward"


class VelaProgram(Program):
    """A TFLite model that Vela compiled to one operator for the NPU. Its memory is kept from one run to the next.

    Args:
        data: the ``.tflite``.

    Attributes:
        model: what the file holds; ``content`` is the same as that of a ``.pte``, with one method and one delegate.

    Raises:
        ProgramError: it is no such model, or a damaged one; or some of its operators stay on the CPU.
        PayloadError: its command stream is damaged, or the emulator does not execute it.
        RuntimeUnavailable: the plugin, which has the emulator, cannot be built or loaded.
    """

    def __init__(self, data: bytes) -> None:
        self.model = read_vela_tflite(data)
        self._delegate = _delegate(self.model)
        signature = Signature(self.model.inputs, self.model.outputs, frozenset())
        self._initialize(data, PteProgram({METHOD: _method(self.model)}, {}), {METHOD: signature})
        self.reset()

    def reset(self) -> None:
        """Give variables, an LSTM's state for example, their first values again."""
        with self._lock:
            for place, value in self.model.variables:
                self._delegate.fill(place, value)

    def run_arrays(self, arrays: Sequence[Array]) -> list[Array]:
        """Execute once, with NumPy's arrays in the place of tensors.

        Raises:
            ValueError: they are not what it takes.
            RunError: it failed.
        """
        given = self._bytes(arrays)
        with self._lock:
            outputs = [output.tobytes() for output in self._delegate.run(given)]
        return [_array(data, info) for data, info in zip(outputs, self.model.outputs, strict=True)]

    def watched(self, arrays: Sequence[Array]) -> EthosUFigures:
        """Execute once with all accesses watched; so are later executions.

        Raises:
            ValueError: the arrays are not what it takes.
            RunError: as ``EthosUDelegate.watched``.
        """
        given = self._bytes(arrays)
        with self._lock:
            return self._delegate.watched(given)

    def trace(self, *tensors: Any, method: str = METHOD, **named: Any) -> Iterator[TracedOperation]:
        """Execute once; yields what each operation of the NPU wrote. Names of layers are not known.

        Raises:
            ValueError, RunError: as ``run``.
        """
        from arm_recipes.runtime.plugin import Execution
        from arm_recipes.runtime.trace import trace_delegate

        given = self._bind_inputs(method, tensors, named)
        execution = Execution(self._delegate, None, tuple(self._bytes([x.numpy() for x in given])), ())
        with self._lock:
            operations = list(trace_delegate(0, execution, None))
        yield from operations

    def _execute(self, name: str, inputs: Sequence[Any]) -> list[Any]:
        import torch

        outputs = self._delegate.run(self._bytes([tensor.numpy() for tensor in inputs]))
        arrays = [_array(output.tobytes(), info) for output, info in zip(outputs, self.model.outputs, strict=True)]
        return list(map(torch.from_numpy, arrays))

    def _reference_for(self, backend: str) -> Program:
        raise RunError(f"backend={backend!r}: a TFLite model that Vela compiled has no TOSA graphs")

    def _runtime(self, name: str) -> Any:
        raise RunError("ExecuTorch's runtime does not run TFLite models")

    def _bytes(self, arrays: Sequence[Array]) -> list[Array]:
        import numpy as np

        if len(arrays) != len(self.model.inputs):
            raise ValueError(f"the model takes {len(self.model.inputs)} inputs, got {len(arrays)}")
        for index, (array, info) in enumerate(zip(arrays, self.model.inputs, strict=True)):
            if array.dtype.name != info.dtype or array.shape != info.shape:
                raise ValueError(
                    f"input {index} ('{info.name}') must be {info}; got {array.dtype.name}{list(array.shape)}"
                )
        return [np.frombuffer(array.tobytes(), np.uint8) for array in arrays]


def _array(data: bytes, info: TensorInfo) -> Array:
    import numpy as np

    return np.frombuffer(bytearray(data), info.dtype).reshape(info.shape)


def _method(model: VelaTflite) -> PteMethod:
    """The model as a method."""
    inputs, outputs = (
        tuple(PteTensor(info.dtype, info.shape, tuple(range(len(info.shape)))) for info in side)
        for side in (model.inputs, model.outputs)
    )
    delegates = tuple(PteDelegate(ETHOS_U, operator.parts.commands, {}) for operator in model.npu)
    return PteMethod(METHOD, inputs, outputs, model.operators, delegates, None, model.arena_bytes, 1)


def _delegate(model: VelaTflite) -> EthosUDelegate:
    """The operator, with the inputs and outputs of the model.

    Raises:
        ProgramError: it is not all of the model.
    """
    if model.operators:
        counted = ", ".join(f"{name} ({n})" if n > 1 else name for name, n in Counter(model.operators).items())
        raise ProgramError(
            "not all of the model is for the NPU: these TFLite operators stay on the CPU, and nothing runs them here: "
            f"{counted}"
        )
    if len(model.npu) != 1:
        raise ProgramError(f"the model has {len(model.npu)} operators for the NPU; those with one are run here")
    (operator,) = model.npu
    payload = replace(
        operator.parts.payload,
        inputs=model.input_locations,
        outputs=model.output_locations,
        scratch_bytes=model.arena_bytes,
    )
    variables = tuple(place for place, _ in model.variables)
    parts = replace(operator.parts, payload=payload)
    return EthosUDelegate.from_parts(parts, one_arena=operator.one_arena, variables=variables)
