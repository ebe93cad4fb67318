"""Ethos-U delegates on this machine: the NPU emulator in the host plugin executes their command streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from arm_recipes.runtime.command_origins import CommandOrigin, CommandOrigins
from arm_recipes.runtime.errors import FailedCommand, PayloadError, RunError
from arm_recipes.runtime.ethosu_abi import ALL_FINDINGS, Operation, load_emulator
from arm_recipes.runtime.ethosu_blocks import NamedDataLookup
from arm_recipes.runtime.ethosu_payload import (
    EthosUPayloadContent,
    EthosUTensor,
    read_payload_content,
    with_fast_scratch,
)
from arm_recipes.runtime.ethosu_stream import EmulatedStream, StreamError

if TYPE_CHECKING:
    import numpy as np

    from arm_backend_core.compilation_log import DelegateRecord

    Array = np.ndarray[Any, Any]

#: Offsets into scratch and fast scratch have 32 bits.
_MAX_BYTES = 2**32


@dataclass(frozen=True)
class EthosUOperation:
    """An executed operation of a command stream, with its result.

    Attributes:
        command: for example ``NPU_OP_CONV``.
        offset: byte offset of the command from the start of the stream's header. The emulator's errors give this
            offset.
        indexed: whether the operation is an indexed DMA (gather or scatter).
        region: region of the result; -1 if the result stays in the NPU, 8 for the NPU's lookup tables.
        address: offset of the result's first element in the region.
        result: the integers that the operation wrote, with shape (rows, columns, channels); for a DMA, the bytes. Empty
            for a scatter, and for an operation that leaves its result in the NPU's accumulators for the next operation.
    """

    command: str
    offset: int
    indexed: bool
    region: int
    address: int
    result: Array


@dataclass(frozen=True)
class EthosULayerStatistics:
    """Statistics of a layer's operations in one execution. ``EthosUStatistics`` describes the fields.

    Attributes:
        origin: the layer's name, module and source line, and Vela's cost estimate. All operations of unknown origin are
            counted together.
    """

    origin: CommandOrigin
    operations: int
    commands: int
    macs: int
    bytes_read: tuple[int, ...]
    bytes_written: tuple[int, ...]

    @property
    def bytes_moved(self) -> int:
        """Sum of the bytes read and written in all regions."""
        return sum(self.bytes_read) + sum(self.bytes_written)


@dataclass(frozen=True)
class EthosUStatistics:
    """Statistics of one execution, measured by the emulator. Tuples of numbers have one entry for each memory region.

    Each operation counts each byte of its operands once, even if it reads the byte several times.

    Attributes:
        operations: number of ``NPU_OP_*`` commands that compute or copy.
        commands: number of all commands of the stream, including those that only set registers.
        macs: number of multiply-accumulates of the convolutions.
        bytes_read, bytes_written: bytes that operations read and write.
        peak: number of bytes from the start of the region to the end of the last byte that is read or written.
        touched: number of distinct bytes that are read or written.
        layers: statistics of each layer, in execution order.
    """

    operations: int
    commands: int
    macs: int
    bytes_read: tuple[int, ...]
    bytes_written: tuple[int, ...]
    peak: tuple[int, ...]
    touched: tuple[int, ...]
    layers: tuple[EthosULayerStatistics, ...]


class EthosUDelegate:
    """A command stream in the emulator, with the memory that a device would provide.

    Args:
        payload: payload of ``EthosUBackend``.
        compile_specs: compile specs of the delegate. They may state the maximum size of fast scratch. Only the
            bytes of fast scratch that the stream accesses are allocated.
        find_named_data: looks up named data of the program, for commands and weights outside the payload.

    Attributes:
        header_bytes: size of the command stream's header.

    Raises:
        PayloadError: the payload is damaged, the emulator does not support it, or an external block is missing.
        RuntimeUnavailable: the plugin cannot be built or loaded.
    """

    def __init__(
        self, payload: bytes, compile_specs: Mapping[str, bytes], find_named_data: NamedDataLookup | None = None
    ) -> None:
        from arm_backend_core.backends.payload import CHECKSUM_KEY

        content = read_payload_content(payload, find_named_data)
        described_payload = with_fast_scratch(content.payload, compile_specs)
        self._load(replace(content, payload=described_payload), compile_specs.get(CHECKSUM_KEY))

    @classmethod
    def from_content(
        cls, content: EthosUPayloadContent, *, one_arena: bool = False, variables: Sequence[EthosUTensor] = ()
    ) -> EthosUDelegate:
        """Create a delegate from content that does not come from an ExecuTorch payload.

        Args:
            content: command stream, weights and description.
            one_arena: whether scratch and fast scratch are the same memory.
            variables: tensors that have a value before the first run.

        Raises:
            PayloadError, RuntimeUnavailable: as for the constructor.
        """
        delegate = cls.__new__(cls)
        delegate._load(content, None, one_arena, variables)
        return delegate

    def _load(
        self,
        content: EthosUPayloadContent,
        checksum: bytes | None,
        one_arena: bool = False,
        variables: Sequence[EthosUTensor] = (),
    ) -> None:
        self._checksum = checksum
        self.header_bytes = content.header_bytes
        payload = self._payload = content.payload
        self.inputs: Sequence[EthosUTensor] = payload.inputs
        self.outputs: Sequence[EthosUTensor] = payload.outputs
        unplaced_outputs = [str(index) for index, tensor in enumerate(self.outputs) if tensor.offset < 0]
        if unplaced_outputs:
            raise PayloadError(
                f"{self._name}: nothing computes output {unplaced_outputs[0]}: it has no address in memory"
            )
        declared_bytes = payload.fast_scratch_bytes
        fast_scratch = _MAX_BYTES if declared_bytes is None else min(declared_bytes, _MAX_BYTES)
        memory = payload.scratch_bytes, fast_scratch, self.inputs, self.outputs
        try:
            self._stream = EmulatedStream(
                load_emulator(),
                bytes(content.commands),
                content.weights,
                *memory,
                shared=content.has_external_weights,
                one_arena=one_arena,
                variables=variables,
            )
        except StreamError as error:
            what = "is damaged, or uses a feature that the emulator does not support"
            raise self._create_error(PayloadError, what, error) from None

    @property
    def _name(self) -> str:
        return f"a program for Ethos-U{self._payload.product}-{self._payload.macs}"

    def run(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """See ``runtime.delegates.LoadedDelegate.run``. Inputs and outputs are bytes.

        The payload does not contain dtypes. The program around the delegate has them.
        """
        with self._translate_errors():
            return self._stream.run(arrays)

    def fill(self, tensor: EthosUTensor, value: int) -> None:
        """Set all bytes of a variable."""
        self._stream.fill(tensor, value)

    def measure(self, arrays: Sequence[Array], record: DelegateRecord | None = None) -> EthosUStatistics:
        """Execute once with the access checker, and return statistics. The checker stays on for later executions.

        Args:
            arrays: bytes of the inputs.
            record: the export's record of the delegate, for the names of layers.

        Raises:
            RunError: the stream reads or returns a byte that nothing has written (a DMA may copy such bytes), or an
                operation does not wait for an earlier operation with a conflicting access to the same byte. The message
                names the command, its offset and the byte. The error also occurs if scratch and fast scratch are the
                same memory and the stream uses fast scratch.
        """
        if self._stream.is_aliased:
            raise RunError(
                f"{self._name} uses regions 1 and 2, which are the same memory: "
                "the access checker does not support that"
            )
        with self._translate_errors():
            self._stream.enable_access_checks(ALL_FINDINGS)
            self._stream.run(arrays)
        statistics = self._stream.statistics()
        by_region = (statistics.bytes_read, statistics.bytes_written, statistics.peak, statistics.touched)
        read, written, peak, touched = map(tuple, by_region)
        layers = self._layer_statistics(CommandOrigins(record))
        return EthosUStatistics(
            statistics.operations, statistics.commands, statistics.macs, read, written, peak, touched, layers
        )

    def _layer_statistics(self, origins: CommandOrigins) -> tuple[EthosULayerStatistics, ...]:
        operations_by_origin: dict[CommandOrigin, list[Operation]] = {}
        for operation in self._stream.operations():
            origin = origins.find(operation.offset - self.header_bytes, indexed=bool(operation.indexed))
            operations_by_origin.setdefault(origin, []).append(operation)
        return tuple(
            EthosULayerStatistics(
                origin,
                len(operations),
                sum(operation.commands for operation in operations),
                sum(operation.macs for operation in operations),
                tuple(map(sum, zip(*(operation.bytes_read for operation in operations), strict=True))),
                tuple(map(sum, zip(*(operation.bytes_written for operation in operations), strict=True))),
            )
            for origin, operations in operations_by_origin.items()
        )

    def trace(self, arrays: Sequence[Array]) -> list[EthosUOperation]:
        """Execute the operations one by one, and return each with its result."""
        with self._translate_errors():
            return [
                EthosUOperation(
                    operation.name.decode(),
                    operation.offset,
                    bool(operation.indexed),
                    operation.region,
                    operation.address,
                    result,
                )
                for operation, result in self._stream.trace(arrays)
            ]

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise errors of the stream as ``RunError``."""
        try:
            yield
        except StreamError as error:
            raise self._create_error(RunError, "failed", error) from None
        except LookupError as error:
            raise RunError(f"{self._name}: {error}") from None

    def _create_error(self, kind: type[RunError], problem: str, error: StreamError) -> RunError:
        failure = kind(f"{self._name} {problem}. In its command stream, {error}")
        if self._checksum is not None and error.offset >= self.header_bytes:
            failure.command = FailedCommand(self._checksum, error.offset - self.header_bytes, error.indexed)
        return failure

    def close(self) -> None:
        """See ``runtime.delegates.LoadedDelegate.close``."""
        self._stream.close()
