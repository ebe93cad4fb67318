"""An Ethos-U command stream, loaded into the emulator with the memory that a driver would provide."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from arm_recipes.runtime.ethosu_abi import REGIONS, ByteRange, ExecutionStatistics, Message, Operation
from arm_recipes.runtime.ethosu_payload import FAST_SCRATCH, SCRATCH, WEIGHTS, EthosUTensor

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


class StreamError(Exception):
    """The emulator rejected a stream, or the execution of a stream failed.

    Attributes:
        offset: byte offset of the command from the start of the stream's header; 0 if the error concerns no command.
        indexed: whether the command is an indexed DMA.
    """

    def __init__(self, message: Message, indexed: bool = False) -> None:
        super().__init__(message.text.decode(errors="replace"))
        self.offset: int = message.offset
        self.indexed = indexed


class _SharedWeights:
    """Weights that several streams share, in an anonymous file that each stream maps copy-on-write.

    Attributes:
        instances: {(address, size) of the source bytes: instance}, for the instances in use. An instance keeps its
            source bytes alive, so no other bytes get the same address.
    """

    instances: ClassVar[weakref.WeakValueDictionary[tuple[int, int], _SharedWeights]] = weakref.WeakValueDictionary()

    def __init__(self, source: Array) -> None:
        self._source, self._file = source, os.memfd_create("weights")
        weakref.finalize(self, os.close, self._file)
        written = 0
        while written < source.nbytes:  # one call writes at most 2 GiB
            written += os.write(self._file, source[written:].data)

    @classmethod
    def for_source(cls, source: Array) -> _SharedWeights:
        """Return the instance for these weights, and create it if there is none."""
        key = source.ctypes.data, source.nbytes
        weights = cls.instances.get(key) or cls(source)
        return cls.instances.setdefault(key, weights)

    def map_copy_on_write(self) -> Array:
        """Map the weights into new writable memory. Streams share the file's pages until they write to them."""
        import numpy as np

        return np.frombuffer(mmap.mmap(self._file, self._source.nbytes, access=mmap.ACCESS_COPY), np.uint8)


class EmulatedStream:
    """A loaded command stream with its memory.

    Args:
        library: the emulator, see ``declare_functions``.
        commands: the stream with its header.
        weights: content of region 0. It is copied, so that a damaged stream cannot overwrite the original.
        scratch, fast_scratch: sizes of these regions in bytes. Fast scratch is reduced to the part that the stream
            accesses.
        inputs, outputs: locations of the tensors. The data of an input without a location is ignored.
        shared: whether all streams that are loaded from the same ``weights`` buffer share one copy of it. A stream that
            writes to a page of this copy gets a page of its own.
        one_arena: whether scratch and fast scratch are the same memory.
        variables: tensors that have a value before the stream writes them.

    Raises:
        StreamError: the stream is damaged, or the emulator does not support it.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        commands: bytes,
        weights: bytes | memoryview,
        scratch: int,
        fast_scratch: int,
        inputs: Sequence[EthosUTensor],
        outputs: Sequence[EthosUTensor],
        shared: bool = False,
        one_arena: bool = False,
        variables: Sequence[EthosUTensor] = (),
    ) -> None:
        import numpy as np

        self._library, self._inputs, self._outputs, self._variables = library, inputs, outputs, variables
        sizes = [0] * REGIONS
        for tensor in (*inputs, *outputs):  # COP2 streams may have regions for inputs and outputs
            sizes[tensor.region] = max(sizes[tensor.region], tensor.offset + tensor.nbytes)
        sizes[WEIGHTS], sizes[SCRATCH], sizes[FAST_SCRATCH] = len(weights), scratch, fast_scratch
        source = np.frombuffer(weights, np.uint8)
        self._shared_weights = _SharedWeights.for_source(source) if shared and hasattr(os, "memfd_create") else None
        own_weights = source.copy() if self._shared_weights is None else self._shared_weights.map_copy_on_write()
        limits, message = (ctypes.c_uint64 * REGIONS)(*sizes), Message()
        self._program = library.ethosu_emulator_load(
            commands, len(commands), own_weights.ctypes.data, limits, ctypes.byref(message)
        )
        if self._program is None:
            raise StreamError(message)
        sizes[FAST_SCRATCH] = min(fast_scratch, library.ethosu_emulator_required_size(self._program, FAST_SCRATCH))
        self.memory: list[Array] = [own_weights, *(np.zeros(size, np.uint8) for size in sizes[1:])]
        #: Whether two regions are the same memory. The access checker identifies memory by region, so it would miss
        #: conflicts between the two.
        self.is_aliased = one_arena and sizes[FAST_SCRATCH] > 0
        if self.is_aliased:
            self.memory[FAST_SCRATCH] = self.memory[SCRATCH]
        self._bases = (ctypes.c_void_p * REGIONS)(*[array.ctypes.data for array in self.memory])

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Execute once on the bytes of each input, and return views of the outputs in the stream's memory.

        Raises:
            StreamError: the execution fails, or the access checker reports a fatal finding.
        """
        self._write_inputs(arrays)
        self._call_emulator("execute", self._bases)
        return [self._view_tensor(tensor) for tensor in self._outputs]

    def fill(self, tensor: EthosUTensor, value: int) -> None:
        """Set all bytes of a tensor."""
        self._view_tensor(tensor)[:] = value & 0xFF

    def enable_access_checks(self, fatal_findings: int) -> None:
        """Check the memory accesses of all later executions.

        Args:
            fatal_findings: bit mask of the findings that abort an execution.

        Raises:
            StreamError: memory is exhausted.
        """
        range_arguments: list[Any] = []
        for tensors in ((*self._inputs, *self._variables), self._outputs):
            placed = [
                ByteRange(tensor.region, tensor.offset, tensor.nbytes) for tensor in tensors if tensor.offset >= 0
            ]
            range_arguments += [(ByteRange * len(placed))(*placed), len(placed)]
        self._call_emulator("enable_access_checker", *range_arguments, fatal_findings)

    def statistics(self) -> ExecutionStatistics:
        """Return the statistics of the last execution, even if it failed.

        Without the access checker, only operations and commands are counted. The other statistics are 0.
        """
        statistics_struct = ExecutionStatistics()
        self._library.ethosu_emulator_get_statistics(self._program, ctypes.byref(statistics_struct))
        return statistics_struct

    def operations(self) -> Iterator[Operation]:
        """Yield all operations, with their statistics in the last execution (see ``statistics``)."""
        operation, index = Operation(), 0
        while self._library.ethosu_emulator_get_operation(self._program, index, ctypes.byref(operation)) == 0:
            yield operation
            operation, index = Operation(), index + 1

    def trace(self, arrays: Sequence[Array]) -> Iterator[tuple[Operation, Array]]:
        """Execute the operations one by one, and yield each with its result.

        The result is empty for a scatter, and for an operation that leaves its result in the NPU's accumulators.

        Raises:
            StreamError: as for ``run``.
            LookupError: the emulator cannot determine the result of an operation.
        """
        self._write_inputs(arrays)
        for index, operation in enumerate(self.operations()):
            self._call_emulator("step", index, self._bases)
            yield operation, self._read_result(index, operation)

    def close(self) -> None:
        """Release the loaded stream."""
        self._library.ethosu_emulator_free(self._program)

    def _read_result(self, index: int, operation: Operation) -> Array:
        import numpy as np

        if operation.element_size == 0:
            return np.empty(0, np.uint8)
        dtype = np.dtype(f"{'i' if operation.is_signed else 'u'}{operation.element_size}")
        result = np.empty(tuple(operation.shape), dtype)
        if self._library.ethosu_emulator_copy_output(self._program, index, result.ctypes.data, result.nbytes) != 0:
            raise LookupError(f"the result of {operation.name.decode()} at byte {operation.offset} is unknown")
        return result

    def _write_inputs(self, arrays: Sequence[Array]) -> None:
        for tensor, array in zip(self._inputs, arrays, strict=True):
            if tensor.offset >= 0:  # no operation reads an input without a location
                self._view_tensor(tensor)[:] = array

    def _view_tensor(self, tensor: EthosUTensor) -> Array:
        return self.memory[tensor.region][tensor.offset : tensor.offset + tensor.nbytes]

    def _call_emulator(self, function: str, *arguments: Any) -> None:
        message = Message()
        if getattr(self._library, f"ethosu_emulator_{function}")(self._program, *arguments, ctypes.byref(message)) != 0:
            indexed = any(operation.indexed for operation in self.operations() if operation.offset == message.offset)
            raise StreamError(message, indexed)
