"""``VelaProgram``: a TFLite model that Vela compiled, executed by the emulator of the NPU."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from arm_recipes.runtime.errors import RunError
from arm_recipes.runtime.ethosu import EthosUDelegate, EthosUStatistics
from arm_recipes.runtime.program import Program
from arm_recipes.runtime.pte import ProgramError, PteDelegate, PteMethod, PteProgram, PteTensor
from arm_recipes.runtime.signature import Signature
from arm_recipes.runtime.tensor_info import TensorInfo
from arm_recipes.runtime.vela_tflite import ETHOS_U_CUSTOM_CODE, VelaTflite, read_vela_tflite

if TYPE_CHECKING:
    import numpy as np

    from arm_recipes.runtime.trace import TracedOperation

    Array = np.ndarray[Any, Any]

#: Name of the only method. It is also the default name in ExecuTorch programs.
METHOD = "forward"


class VelaProgram(Program):
    """A TFLite model that Vela compiled to one NPU operator. The arena keeps its contents between runs.

    Args:
        data: bytes of the ``.tflite``.

    Attributes:
        model: the parsed file. The attribute ``content`` describes the model as a ``.pte`` with one method and one
            delegate.

    Raises:
        ProgramError: Vela did not compile the model, the file is damaged, some operators stay on the CPU, or there are
            several operators for the NPU.
        PayloadError: the command stream is damaged, or the emulator does not support it.
        RuntimeUnavailable: the plugin, which contains the emulator, cannot be built or loaded.
    """

    def __init__(self, data: bytes) -> None:
        self.model = read_vela_tflite(data)
        self._delegate = _create_delegate(self.model)
        weakref.finalize(self, self._delegate.close)
        signature = Signature(self.model.inputs, self.model.outputs, frozenset())
        self._initialize(data, PteProgram({METHOD: _describe_method(self.model)}, {}), {METHOD: signature})
        self.reset()

    def reset(self) -> None:
        """Reset variables, for example the state of an LSTM, to their initial values."""
        with self._lock:
            for location, value in self.model.variables:
                self._delegate.fill(location, value)

    def run_arrays(self, arrays: Sequence[Array]) -> list[Array]:
        """Execute once, with NumPy arrays instead of tensors.

        Raises:
            ValueError: number, dtype or shape of the arrays is wrong.
            RunError: the run failed.
        """
        inputs = self._inputs_to_bytes(arrays)
        with self._lock:
            outputs = [output.tobytes() for output in self._delegate.run(inputs)]
        return [_array_from_bytes(data, info) for data, info in zip(outputs, self.model.outputs, strict=True)]

    def run_checked(self, arrays: Sequence[Array]) -> EthosUStatistics:
        """Execute once with the access checker, and return statistics. The checker stays on for later executions.

        Raises:
            ValueError: number, dtype or shape of the arrays is wrong.
            RunError: as for ``EthosUDelegate.measure``.
        """
        inputs = self._inputs_to_bytes(arrays)
        with self._lock:
            return self._delegate.measure(inputs)

    def trace(self, *tensors: Any, method: str = METHOD, **named: Any) -> Iterator[TracedOperation]:
        """Load the model again, execute it, and yield each NPU operation with its result. Layer names are unknown.

        Raises:
            ValueError, RunError: as for ``run``.
        """
        from arm_recipes.runtime.host_backends import DelegateExecution
        from arm_recipes.runtime.trace import trace_delegate

        inputs = self._bind_inputs(method, tensors, named)
        loaded = VelaProgram(self.data)
        execution = DelegateExecution(
            loaded._delegate, None, tuple(self._inputs_to_bytes([x.numpy() for x in inputs])), ()
        )
        with self._lock:
            operations = list(trace_delegate(0, execution, None))
        yield from operations

    def _execute(self, name: str, inputs: Sequence[Any]) -> list[Any]:
        import torch

        outputs = self._delegate.run(self._inputs_to_bytes([tensor.numpy() for tensor in inputs]))
        arrays = [
            _array_from_bytes(output.tobytes(), info) for output, info in zip(outputs, self.model.outputs, strict=True)
        ]
        return list(map(torch.from_numpy, arrays))

    def _reference_for(self, backend: str) -> Program:
        raise RunError(f"backend={backend!r}: a TFLite model that Vela compiled has no TOSA graphs")

    def _checked_runtime(self, name: str) -> Any:
        raise RunError("ExecuTorch's runtime does not run TFLite models")

    def _inputs_to_bytes(self, arrays: Sequence[Array]) -> list[Array]:
        """Check the inputs, and return the bytes of each."""
        import numpy as np

        if len(arrays) != len(self.model.inputs):
            raise ValueError(f"the model takes {len(self.model.inputs)} inputs, got {len(arrays)}")
        for index, (array, info) in enumerate(zip(arrays, self.model.inputs, strict=True)):
            if array.dtype.name != info.dtype or array.shape != info.shape:
                raise ValueError(
                    f"input {index} ('{info.name}') must be {info}; got {array.dtype.name}{list(array.shape)}"
                )
        return [np.frombuffer(array.tobytes(), np.uint8) for array in arrays]


def _array_from_bytes(data: bytes, info: TensorInfo) -> Array:
    import numpy as np

    return np.frombuffer(bytearray(data), info.dtype).reshape(info.shape)


def _describe_method(model: VelaTflite) -> PteMethod:
    """Describe the model as a method of a ``.pte``."""
    inputs, outputs = (
        tuple(PteTensor(info.dtype, info.shape, tuple(range(len(info.shape)))) for info in tensors)
        for tensors in (model.inputs, model.outputs)
    )
    delegates = tuple(
        PteDelegate(ETHOS_U_CUSTOM_CODE, operator.content.commands, {}) for operator in model.npu_operators
    )
    return PteMethod(METHOD, inputs, outputs, model.cpu_operators, delegates, None, model.arena_bytes, 1)


def _create_delegate(model: VelaTflite) -> EthosUDelegate:
    """Create the delegate that executes the NPU operator with the model's inputs and outputs.

    Raises:
        ProgramError: the model has CPU operators, or not exactly one NPU operator.
    """
    if model.cpu_operators:
        operator_counts = ", ".join(
            f"{name} ({n})" if n > 1 else name for name, n in Counter(model.cpu_operators).items()
        )
        raise ProgramError(
            "Vela left these TFLite operators on the CPU, but this runtime executes only operators for the NPU: "
            f"{operator_counts}"
        )
    if len(model.npu_operators) != 1:
        raise ProgramError(f"the model has {len(model.npu_operators)} operators for the NPU; this runtime supports one")
    (operator,) = model.npu_operators
    payload = replace(
        operator.content.payload,
        inputs=model.input_locations,
        outputs=model.output_locations,
        scratch_bytes=model.arena_bytes,
    )
    variables = tuple(location for location, _ in model.variables)
    content = replace(operator.content, payload=payload)
    return EthosUDelegate.from_content(content, one_arena=operator.one_arena, variables=variables)
