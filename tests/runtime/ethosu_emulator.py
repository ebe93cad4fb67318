"""Python interface of the Ethos-U emulator in ``runtime/emulator``, for tests."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.export import ExportedProgram

from arm_backend_core import compilation_log
from arm_backend_core.tosa import reference_model
from arm_recipes.runtime.ethosu_abi import ALL_FINDINGS, ExecutionStatistics, load_emulator
from arm_recipes.runtime.ethosu_payload import EthosUTensor, read_payload_content
from arm_recipes.runtime.ethosu_stream import EmulatedStream
from tests.ops.runner import DelegatedProgram

Array = np.ndarray[Any, Any]
#: Bytes of fast scratch for every program, because payloads do not contain the required size.
_FAST_SCRATCH = 4 << 20


@dataclass(frozen=True)
class Payload:
    """The parts of an Ethos-U payload that a runtime passes to the driver."""

    commands: bytes
    weights: bytes
    scratch: int
    inputs: tuple[EthosUTensor, ...]
    outputs: tuple[EthosUTensor, ...]


def read_payload(data: bytes) -> Payload:
    """Parse the blocks of an Ethos-U payload."""
    content = read_payload_content(data)
    layout = content.payload
    return Payload(bytes(content.commands), bytes(content.weights), layout.scratch_bytes, layout.inputs, layout.outputs)


def _with_size(tensor: EthosUTensor, nbytes: int) -> EthosUTensor:
    """Copy the tensor with another size in bytes, at the same address."""
    return replace(tensor, shape=(nbytes,), element_size=1)


class Emulator:
    """The emulator of the host plugin."""

    def __init__(self) -> None:
        self._library = load_emulator()
        self.statistics = ExecutionStatistics()

    def run(
        self,
        payload: Payload,
        inputs: Sequence[Array],
        outputs: Sequence[tuple[str, tuple[int, ...]]],
        *,
        fatal_findings: int | None = ALL_FINDINGS,
    ) -> list[Array]:
        """Execute a program once with access checks, and store the statistics of this execution in ``statistics``.

        Args:
            payload: the program.
            inputs: arrays of any type; only their bytes count.
            outputs: element type and shape of each result.
            fatal_findings: findings of the access checker that are errors, as a bit mask; None disables the checker.

        Raises:
            StreamError: the program does not load, or its execution fails.
        """
        input_bytes = [np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8) for array in inputs]
        results = [np.empty(shape, dtype) for dtype, shape in outputs]
        input_tensors, output_tensors = (
            [_with_size(tensor, array.nbytes) for tensor, array in zip(tensors, arrays, strict=True)]
            for tensors, arrays in ((payload.inputs, input_bytes), (payload.outputs, results))
        )
        parts = payload.commands, payload.weights, payload.scratch, _FAST_SCRATCH, input_tensors, output_tensors
        stream = EmulatedStream(self._library, *parts)
        try:
            if fatal_findings is not None:
                stream.enable_access_checks(fatal_findings)
            written = stream.run(input_bytes)
        finally:
            self.statistics = stream.statistics()
            stream.close()
        return [
            np.frombuffer(data.tobytes(), result.dtype).reshape(result.shape)
            for data, result in zip(written, results, strict=True)
        ]

    def matches_reference_model(self, delegate: compilation_log.DelegateRecord, payload: bytes) -> bool:
        """Whether program and TOSA reference model give equal results for random inputs."""
        inputs = random_inputs(delegate, seed=0)
        expected = reference_model.run(delegate.tosa, inputs)
        results = self.run(read_payload(payload), inputs, [(array.dtype.name, array.shape) for array in expected])
        return all(np.array_equal(ours, theirs) for ours, theirs in zip(results, expected, strict=True))


def delegates_with_payloads(lowered: DelegatedProgram) -> list[tuple[compilation_log.DelegateRecord, bytes]]:
    """List the delegates of a lowered program, each with its payload."""
    by_checksum = {zlib.crc32(payload).to_bytes(4, "little"): payload for payload in payloads(lowered.program)}
    return [(delegate, by_checksum[delegate.checksum]) for delegate in lowered.log.delegates]


def payloads(program: ExportedProgram) -> Iterator[bytes]:
    """Yield the payloads of a delegated program, in the order of its delegate calls."""
    modules: Mapping[str, Any] = dict(program.graph_module.named_modules())
    for node in program.graph.nodes:
        if node.op == "call_function" and "executorch_call_delegate" in str(node.target):
            yield modules[node.args[0].target].processed_bytes


def random_inputs(delegate: compilation_log.DelegateRecord, seed: int) -> list[Array]:
    """Draw inputs from the whole range of the element types, not only the calibrated range; int32 (indices): 0, 1."""
    generator = np.random.default_rng(seed)
    arrays = []
    for io in delegate.inputs:
        if io.dtype == "bool":
            arrays.append(generator.random(io.shape) < 0.5)
            continue
        info = np.iinfo(io.dtype)
        low, high = (info.min, info.max + 1) if info.bits < 32 else (0, 2)
        arrays.append(generator.integers(low, high, io.shape).astype(io.dtype))
    return arrays
