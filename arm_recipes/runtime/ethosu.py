"""Ethos-U programs on this machine: the command stream itself, by the emulator in the host plugin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from arm_recipes.runtime.errors import Command, PayloadError, RunError
from arm_recipes.runtime.ethosu_abi import FINDINGS, Operation, emulator
from arm_recipes.runtime.ethosu_origins import Origin, Origins
from arm_recipes.runtime.ethosu_payload import EthosUParts, EthosUTensor, NamedDataLookup, read_parts, with_fast_scratch
from arm_recipes.runtime.ethosu_stream import Stream, StreamError

if TYPE_CHECKING:
    import numpy as np

    from arm_backend_core.events import Delegate

    Array = np.ndarray[Any, Any]

#: Scratch and fast scratch are counted in 32 bits: a stream cannot reach further into them.
_MAX_BYTES = 2**32


@dataclass(frozen=True)
class EthosUOperation:
    """An operation of a command stream that has run, and what it wrote.

    Attributes:
        command: for example ``NPU_OP_CONV``.
        offset: byte of the stream, counted from its header; the emulator's errors name it too.
        indexed: whether it is a DMA by indices.
        region: of the memory that it writes; -1 where the result stays in the NPU, 8 for the NPU's tables.
        address: of the result's first element in the region.
        integers: what it wrote, as rows, columns and channels; bytes for a DMA. Empty if it wrote nothing: its sums
            stay in the NPU for the next operation.
    """

    command: str
    offset: int
    indexed: bool
    region: int
    address: int
    integers: Array


@dataclass(frozen=True)
class EthosULayer:
    """What the operations of a layer did in one execution, as ``EthosUFigures``.

    Attributes:
        origin: the layer's names, and Vela's estimate. Where nothing is known, all operations are one layer.
    """

    origin: Origin
    operations: int
    commands: int
    macs: int
    bytes_read: tuple[int, ...]
    bytes_written: tuple[int, ...]

    @property
    def bytes_moved(self) -> int:
        """Read and written, in all memories."""
        return sum(self.bytes_read) + sum(self.bytes_written)


@dataclass(frozen=True)
class EthosUFigures:
    """What one execution did, measured. Lists have a number for each region; an operation reads each byte once.

    Attributes:
        peak: the byte after the last one that is read or written; ``touched``: how many different ones are.
        layers: the same by layer, in the order in which they run.
    """

    operations: int
    commands: int
    macs: int
    bytes_read: tuple[int, ...]
    bytes_written: tuple[int, ...]
    peak: tuple[int, ...]
    touched: tuple[int, ...]
    layers: tuple[EthosULayer, ...]


class EthosUDelegate:
    """A command stream with the memory that a device would give it.

    Args:
        payload: ExecuTorch's container of a compiled program.
        compile_specs: of the delegate; may tell the size of fast scratch. Otherwise it is what the stream touches.
        find: gives the program's named data, where methods share weights.

    Attributes:
        header_bytes: of the command stream, before its first command.

    Raises:
        PayloadError: it is damaged, or the emulator does not execute it.
        RuntimeUnavailable: the plugin cannot be built or loaded.
    """

    def __init__(self, payload: bytes, compile_specs: Mapping[str, bytes], find: NamedDataLookup | None = None) -> None:
        from arm_backend_core.backends.payload import CHECKSUM_KEY

        parts = read_parts(payload, find)
        described = with_fast_scratch(parts.payload, compile_specs)
        self._load(replace(parts, payload=described), compile_specs.get(CHECKSUM_KEY))

    @classmethod
    def from_parts(
        cls, parts: EthosUParts, *, one_arena: bool = False, variables: Sequence[EthosUTensor] = ()
    ) -> EthosUDelegate:
        """One whose parts are not in a container of ExecuTorch's.

        Args:
            one_arena: scratch and fast scratch are the same memory.
            variables: tensors that have a value before the first run.

        Raises:
            PayloadError, RuntimeUnavailable: as the constructor.
        """
        delegate = cls.__new__(cls)
        delegate._load(parts, None, one_arena, variables)
        return delegate

    def _load(
        self,
        parts: EthosUParts,
        checksum: bytes | None,
        one_arena: bool = False,
        variables: Sequence[EthosUTensor] = (),
    ) -> None:
        self._checksum = checksum
        self.header_bytes = parts.header_bytes
        described = self._described = parts.payload
        self.inputs: Sequence[EthosUTensor] = described.inputs
        self.outputs: Sequence[EthosUTensor] = described.outputs
        unplaced = [str(index) for index, tensor in enumerate(self.outputs) if tensor.offset < 0]
        if unplaced:
            raise PayloadError(f"{self._name}: nothing computes output {unplaced[0]}: it has no place in memory")
        told = described.fast_scratch_bytes
        fast_scratch = _MAX_BYTES if told is None else min(told, _MAX_BYTES)
        memory = described.scratch_bytes, fast_scratch, self.inputs, self.outputs
        try:
            self._stream = Stream(
                emulator(),
                bytes(parts.commands),
                parts.weights,
                *memory,
                shared=parts.has_external_weights,
                one_arena=one_arena,
                variables=variables,
            )
        except StreamError as error:
            what = "is damaged, or does what the emulator does not know"
            raise self._failure(PayloadError, what, error) from None

    @property
    def _name(self) -> str:
        return f"a program for Ethos-U{self._described.product}-{self._described.macs}"

    def run(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """See ``Delegate``. Takes and returns bytes: what they stand for is in the program around it."""
        with self._translate_errors():
            return self._stream.run(arrays)

    def fill(self, tensor: EthosUTensor, value: int) -> None:
        """Set all bytes of a variable."""
        self._stream.fill(tensor, value)

    def watched(self, arrays: Sequence[Array], record: Delegate | None = None) -> EthosUFigures:
        """Execute once with all accesses watched; so are later executions.

        Args:
            record: what the export tells of the delegate, for the names of layers.

        Raises:
            RunError: a byte is read, or is a result, that nothing has written; or nothing makes an operation wait for
                another one whose accesses must come before its own. The message names command, offset and byte.
                Or scratch and fast scratch are the same memory, and the stream uses both.
        """
        if self._stream.is_aliased:
            raise RunError(f"{self._name} uses regions 1 and 2, which are the same memory: it cannot be watched")
        with self._translate_errors():
            self._stream.enable_access_checks(FINDINGS)
            self._stream.run(arrays)
        figures = self._stream.figures()
        lists = (figures.bytes_read, figures.bytes_written, figures.peak, figures.touched)
        read, written, peak, touched = map(tuple, lists)
        layers = self._layers(Origins(record))
        return EthosUFigures(figures.operations, figures.commands, figures.macs, read, written, peak, touched, layers)

    def _layers(self, origins: Origins) -> tuple[EthosULayer, ...]:
        layers: dict[Origin, list[Operation]] = {}
        for operation in self._stream.operations():
            origin = origins.find(operation.offset - self.header_bytes, indexed=bool(operation.indexed))
            layers.setdefault(origin, []).append(operation)
        return tuple(
            EthosULayer(
                origin,
                len(done),
                sum(operation.commands for operation in done),
                sum(operation.macs for operation in done),
                tuple(map(sum, zip(*(operation.bytes_read for operation in done), strict=True))),
                tuple(map(sum, zip(*(operation.bytes_written for operation in done), strict=True))),
            )
            for origin, done in layers.items()
        )

    def trace(self, arrays: Sequence[Array]) -> list[EthosUOperation]:
        """Execute once, operation by operation."""
        with self._translate_errors():
            return [
                EthosUOperation(done.name.decode(), done.offset, bool(done.indexed), done.region, done.address, result)
                for done, result in self._stream.trace(arrays)
            ]

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Errors of the stream as those of a run."""
        try:
            yield
        except StreamError as error:
            raise self._failure(RunError, "failed", error) from None
        except LookupError as error:
            raise RunError(f"{self._name}: {error}") from None

    def _failure(self, kind: type[RunError], what: str, error: StreamError) -> RunError:
        failure = kind(f"{self._name} {what}. In its command stream, {error}")
        if self._checksum is not None and error.offset >= self.header_bytes:
            failure.command = Command(self._checksum, error.offset - self.header_bytes, error.indexed)
        return failure

    def close(self) -> None:
        """See ``Delegate``."""
        self._stream.close()
