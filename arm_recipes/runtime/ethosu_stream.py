"""A command stream of an Ethos-U in the emulator, over the memory that a driver would give it."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from arm_recipes.runtime.ethosu_abi import REGIONS, Figures, Message, Operation, Span
from arm_recipes.runtime.ethosu_payload import FAST_SCRATCH, SCRATCH, WEIGHTS, EthosUTensor

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


class StreamError(Exception):
    """What the emulator says of a stream that it does not load, or that fails.

    Attributes:
        offset: byte of the command that it is about, counted from the stream's header; 0 if it is about none.
        indexed: whether that is a DMA by indices.
    """

    def __init__(self, message: Message, indexed: bool = False) -> None:
        super().__init__(message.text.decode(errors="replace"))
        self.offset: int = message.offset
        self.indexed = indexed


class _SharedWeights:
    """Weights of a program with many streams, written down once: each has them until it writes into a page.

    Attributes:
        instances: those in use, by where their source lies, which stays there as long.
    """

    instances: ClassVar[weakref.WeakValueDictionary[tuple[int, int], _SharedWeights]] = weakref.WeakValueDictionary()

    def __init__(self, source: Array) -> None:
        self._source, self._file = source, os.memfd_create("weights")
        weakref.finalize(self, os.close, self._file)
        written = 0
        while written < source.nbytes:  # by at most 2 GiB
            written += os.write(self._file, source[written:].data)

    @classmethod
    def for_source(cls, source: Array) -> _SharedWeights:
        """The one that there is, or a new one."""
        key = source.ctypes.data, source.nbytes
        pages = cls.instances.get(key) or cls(source)
        return cls.instances.setdefault(key, pages)

    def map_copy_on_write(self) -> Array:
        """Memory with these bytes that may be written."""
        import numpy as np

        return np.frombuffer(mmap.mmap(self._file, self._source.nbytes, access=mmap.ACCESS_COPY), np.uint8)


class Stream:
    """A command stream that is loaded, with its memory.

    Args:
        library: has the emulator's functions, as ``declared``.
        commands: the stream with its header.
        weights: bytes of region 0, which become its own: what a damaged stream writes there does not reach them.
        scratch, fast_scratch: bytes of these regions; of fast scratch there are no more than the stream reaches.
        shared: other streams have the same weights: they are not copied before they are written.
        one_arena: scratch and fast scratch are the same memory.
        inputs, outputs: where they lie. An input may have no place; what is given for it is left aside.
        variables: what lies there has a meaning before the stream writes it.

    Raises:
        StreamError: it is damaged, or the emulator does not execute it.
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
        for tensor in (*inputs, *outputs):  # which may have regions of their own
            sizes[tensor.region] = max(sizes[tensor.region], tensor.offset + tensor.nbytes)
        sizes[WEIGHTS], sizes[SCRATCH], sizes[FAST_SCRATCH] = len(weights), scratch, fast_scratch
        given = np.frombuffer(weights, np.uint8)
        self._shared_weights = _SharedWeights.for_source(given) if shared and hasattr(os, "memfd_create") else None
        first = given.copy() if self._shared_weights is None else self._shared_weights.map_copy_on_write()
        limits, message = (ctypes.c_uint64 * REGIONS)(*sizes), Message()
        self._program = library.arm_npu_load(commands, len(commands), first.ctypes.data, limits, ctypes.byref(message))
        if self._program is None:
            raise StreamError(message)
        sizes[FAST_SCRATCH] = min(fast_scratch, library.arm_npu_reach(self._program, FAST_SCRATCH))
        self.memory: list[Array] = [first, *(np.zeros(size, np.uint8) for size in sizes[1:])]
        #: Whether it has memory by two names. The watch tells accesses by their region, so it would miss some of these.
        self.is_aliased = one_arena and sizes[FAST_SCRATCH] > 0
        if self.is_aliased:
            self.memory[FAST_SCRATCH] = self.memory[SCRATCH]
        self._bases = (ctypes.c_void_p * REGIONS)(*[array.ctypes.data for array in self.memory])

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Execute once, on the bytes of each input; returns those of each output, which are in the stream's memory.

        Raises:
            StreamError: it fails, or the watch finds something.
        """
        self._write_inputs(arrays)
        self._call("execute", self._bases)
        return [self._bytes_of(tensor) for tensor in self._outputs]

    def fill(self, tensor: EthosUTensor, value: int) -> None:
        """Set all bytes of a tensor."""
        self._bytes_of(tensor)[:] = value & 0xFF

    def enable_access_checks(self, fails: int) -> None:
        """Watch the accesses of all executions from now on; ``fails``: findings that end one, as bits."""
        arguments: list[Any] = []
        for tensors in ((*self._inputs, *self._variables), self._outputs):
            placed = [Span(tensor.region, tensor.offset, tensor.nbytes) for tensor in tensors if tensor.offset >= 0]
            arguments += [(Span * len(placed))(*placed), len(placed)]
        self._call("watch", *arguments, fails)

    def figures(self) -> Figures:
        """Of the last execution, which may have failed; zeros but for operations and commands without ``enable_access_checks``."""
        figures = Figures()
        self._library.arm_npu_measure(self._program, ctypes.byref(figures))
        return figures

    def operations(self) -> Iterator[Operation]:
        """All of them, with the figures of the last execution as in ``figures``."""
        operation, index = Operation(), 0
        while self._library.arm_npu_describe(self._program, index, ctypes.byref(operation)) == 0:
            yield operation
            operation, index = Operation(), index + 1

    def trace(self, arrays: Sequence[Array]) -> Iterator[tuple[Operation, Array]]:
        """Execute once, operation by operation, each with what it wrote: nothing where its sums stay in the NPU.

        Raises:
            StreamError: as ``run``.
            LookupError: the emulator cannot tell what an operation wrote.
        """
        self._write_inputs(arrays)
        for index, operation in enumerate(self.operations()):
            self._call("step", index, self._bases)
            yield operation, self._result(index, operation)

    def close(self) -> None:
        """Give the loaded stream back."""
        self._library.arm_npu_free(self._program)

    def _result(self, index: int, operation: Operation) -> Array:
        import numpy as np

        if operation.element_size == 0:
            return np.empty(0, np.uint8)
        dtype = np.dtype(f"{'i' if operation.is_signed else 'u'}{operation.element_size}")
        result = np.empty(tuple(operation.shape), dtype)
        if self._library.arm_npu_result(self._program, index, result.ctypes.data, result.nbytes) != 0:
            raise LookupError(f"what {operation.name.decode()} at byte {operation.offset} wrote is not known")
        return result

    def _write_inputs(self, arrays: Sequence[Array]) -> None:
        for tensor, array in zip(self._inputs, arrays, strict=True):
            if tensor.offset >= 0:  # else nothing reads it
                self._bytes_of(tensor)[:] = array

    def _bytes_of(self, tensor: EthosUTensor) -> Array:
        return self.memory[tensor.region][tensor.offset : tensor.offset + tensor.nbytes]

    def _call(self, function: str, *arguments: Any) -> None:
        message = Message()
        if getattr(self._library, f"arm_npu_{function}")(self._program, *arguments, ctypes.byref(message)) != 0:
            indexed = any(each.indexed for each in self.operations() if each.offset == message.offset)
            raise StreamError(message, indexed)
