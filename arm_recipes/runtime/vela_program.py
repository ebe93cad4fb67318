"""TFLite models that Vela compiled, on this machine: their command stream, by the emulator of the NPU."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from arm_recipes.report import TensorInfo
from arm_recipes.runtime.calls import call_batch, checked_input, placed
from arm_recipes.runtime.ethosu import EthosUDelegate, EthosUFigures
from arm_recipes.runtime.pte import ProgramError, PteTensor
from arm_recipes.runtime.signature import Signature
from arm_recipes.runtime.vela_tflite import VelaTflite, read_vela_tflite

if TYPE_CHECKING:
    import numpy as np

    from arm_recipes.runtime.trace import TracedOperation

    Array = np.ndarray[Any, Any]

#: What the only method is called, as in programs of ExecuTorch.
METHOD = "forward"


class VelaProgram:
    """A loaded model, of which all is one operator for the NPU. Variables keep their values from one run to the next.

    Threads may share it: they wait for each other.

    Args:
        data: the ``.tflite``.

    Attributes:
        data: the file; ``content``: what it holds.
        inputs, outputs: with scale and zero point if quantized.

    Raises:
        ProgramError: it is no such model, or a damaged one; or some of its operators stay on the CPU.
        PayloadError: its command stream is damaged, or the emulator does not execute it.
        RuntimeUnavailable: the plugin, which has the emulator, cannot be built or loaded.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.content = read_vela_tflite(data)
        self.inputs: tuple[TensorInfo, ...] = self.content.inputs
        self.outputs: tuple[TensorInfo, ...] = self.content.outputs
        self._delegate = _delegate(self.content)
        self._lock = threading.Lock()

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods, of which there is one."""
        return (METHOD,)

    def signature(self, method: str = METHOD) -> Signature:
        """Inputs and outputs.

        Raises:
            ValueError: there is no such method.
        """
        if method != METHOD:
            raise ValueError(f"no method '{method}'; a TFLite model has: {METHOD}")
        return Signature(self.inputs, self.outputs, frozenset())

    def run(self, *tensors: Any, method: str = METHOD, **named: Any) -> list[Any]:
        """Execute once.

        Args:
            tensors: one for each input, in the shape and dtype of ``inputs``; or the first ones of them.
            named: the others, by their names in ``inputs``.

        Returns:
            one tensor for each output.

        Raises:
            ValueError: no such method, or the tensors are not what it takes.
            RunError: it failed.
        """
        import torch

        return [torch.from_numpy(array) for array in self.run_arrays(self._arrays(method, tensors, named))]

    def run_arrays(self, arrays: Sequence[Array]) -> list[Array]:
        """Execute once, with NumPy's arrays in the place of tensors.

        Raises:
            ValueError: they are not what it takes.
            RunError: it failed.
        """
        given = self._bytes(arrays)
        with self._lock:
            outputs = [bytes(output) for output in self._delegate.run(given)]
        return [_array(data, info) for data, info in zip(outputs, self.outputs, strict=True)]

    def run_batch(self, samples: Iterable[Any], *, method: str = METHOD) -> Iterator[list[Any]]:
        """Execute it for one sample after the other; yields the outputs of each as they come.

        Args:
            samples: tuples of tensors, dicts of them by name, or tensors for a model with one input.

        Raises:
            ValueError, RunError: as ``run``; the message begins with the number of the sample.
        """
        return call_batch(lambda *tensors, **named: self.run(*tensors, method=method, **named), samples)

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
        from arm_recipes.runtime.trace import traced

        given = tuple(self._bytes(self._arrays(method, tensors, named)))
        with self._lock:
            operations = list(traced(0, Execution(self._delegate, None, given, ()), None))
        yield from operations

    def _arrays(self, method: str, tensors: Sequence[Any], named: Mapping[str, Any]) -> list[Array]:
        given = placed(method, self.signature(method), tensors, named)
        if len(given) != len(self.inputs):
            names = ", ".join(f"{info.name}: {info}" for info in self.inputs)
            raise ValueError(f"the model takes {len(self.inputs)} inputs ({names}), got {len(given)}")
        return [
            checked_input(index, info, PteTensor(info.dtype, info.shape, tuple(range(len(info.shape)))), tensor).numpy()
            for index, (info, tensor) in enumerate(zip(self.inputs, given, strict=True))
        ]

    def _bytes(self, arrays: Sequence[Array]) -> list[Array]:
        import numpy as np

        if len(arrays) != len(self.inputs):
            raise ValueError(f"the model takes {len(self.inputs)} inputs, got {len(arrays)}")
        for index, (array, info) in enumerate(zip(arrays, self.inputs, strict=True)):
            if array.dtype.name != info.dtype or array.shape != info.shape:
                raise ValueError(
                    f"input {index} ('{info.name}') must be {info}; got {array.dtype.name}{list(array.shape)}"
                )
        return [np.frombuffer(array.tobytes(), np.uint8) for array in arrays]

    def __repr__(self) -> str:
        inputs, outputs = (", ".join(f"{v.name}: {v}" for v in values) for values in (self.inputs, self.outputs))
        return f"<VelaProgram ({inputs}) -> ({outputs})>"


def _array(data: bytes, info: TensorInfo) -> Array:
    import numpy as np

    return np.frombuffer(bytearray(data), info.dtype).reshape(info.shape)


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
        inputs=model.input_places,
        outputs=model.output_places,
        scratch_bytes=model.arena_bytes,
    )
    return EthosUDelegate.of_parts(replace(operator.parts, payload=payload), one_arena=operator.one_arena)
