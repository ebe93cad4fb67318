"""Host backends: ExecuTorch's runtime in this process executes delegates by callbacks into Python.

The host plugin (``runtime/host``) is the C++ side of the backends.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arm_recipes._internal.messages import import_quietly
from arm_recipes.runtime.delegates import DELEGATE_FACTORIES, LoadedDelegate, create_delegate
from arm_recipes.runtime.errors import RunError, RuntimeUnavailable
from arm_recipes.runtime.ethosu_payload import EthosUTensor
from arm_recipes.runtime.host_plugin import load_plugin
from arm_recipes.runtime.lazy import once

if TYPE_CHECKING:
    import numpy as np

    from arm_recipes.runtime.tensor_info import TensorInfo

    Array = np.ndarray[Any, Any]


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("nbytes", ctypes.c_uint64),
        ("sizes", ctypes.POINTER(ctypes.c_int32)),
        ("dim_order", ctypes.POINTER(ctypes.c_uint8)),
        ("rank", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )


class _CompileSpec(ctypes.Structure):
    _fields_ = (("key", ctypes.c_char_p), ("data", ctypes.c_void_p), ("size", ctypes.c_uint64))


_Init = ctypes.CFUNCTYPE(
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.POINTER(_CompileSpec),
    ctypes.c_uint64,
)
_Execute = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(_Tensor), ctypes.c_uint64)
_Destroy = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)


class _ExecutorStruct(ctypes.Structure):
    _fields_ = (("context", ctypes.c_void_p), ("init", _Init), ("execute", _Execute), ("destroy", _Destroy))


#: {executorch::aten::ScalarType: dtype name}, for the types that inputs and outputs of delegates can have.
_SCALAR_TYPES = {0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16", 6: "float32", 11: "bool"}
_SCALAR_TYPES |= {15: "bfloat16", 23: "float8_e5m2", 24: "float8_e4m3fn"}
#: {dtype that NumPy lacks: NumPy's dtype of raw bytes with the same size}. The reference model takes and returns these
#: bytes.
_RAW_BYTE_DTYPES = {"bfloat16": "V2", "float8_e5m2": "V1", "float8_e4m3fn": "V1"}

#: The backend of TOSA graphs. Reference programs use it, too. A reference program is a copy of a program for another
#: target, such as an NPU. Its payloads are the TOSA graphs that the delegates of the original were compiled from.
_REFERENCE_BACKEND = "TOSABackend"

_exceptions = threading.local()


def pop_exception() -> BaseException | None:
    """Return and clear the last exception that a callback of a backend raised on this thread.

    The C++ runtime returns only an error code to its caller.
    """
    exception: BaseException | None = getattr(_exceptions, "error", None)
    _exceptions.error = None
    return exception


@dataclass(frozen=True)
class DelegateExecution:
    """One execution of a delegate.

    Attributes:
        delegate: the delegate that ran.
        checksum: checksum of the payload from the compile specs, or None.
        inputs, outputs: copies of the delegate's tensors.
    """

    delegate: LoadedDelegate
    checksum: bytes | None
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]


_program_context = threading.local()


@contextmanager
def provide_named_data(named: Mapping[str, bytes | memoryview]) -> Iterator[None]:
    """Provide the named data of a program to the payloads that this thread loads inside the ``with`` block."""
    previous, _program_context.named = getattr(_program_context, "named", {}), named
    try:
        yield
    finally:
        _program_context.named = previous


_listeners = threading.local()


@contextmanager
def listen_to_delegates(listener: Callable[[DelegateExecution], None]) -> Iterator[None]:
    """Call ``listener`` after each execution of a delegate on this thread, before the program continues."""
    previous, _listeners.listener = getattr(_listeners, "listener", None), listener
    try:
        yield
    finally:
        _listeners.listener = previous


@contextmanager
def record_executions() -> Iterator[list[DelegateExecution]]:
    """Collect the executions of delegates on this thread."""
    executions: list[DelegateExecution] = []
    with listen_to_delegates(executions.append):
        yield executions


def log_output(operation: int, array: Array) -> None:
    """Log the output of an operation to the running program's event tracer.

    Only a listener of ``listen_to_delegates`` may call this function.

    Args:
        operation: delegate debug identifier.
        array: the output.

    Raises:
        RunError: the debug buffer is full.
    """
    sizes = (ctypes.c_int32 * max(array.ndim, 1))(*array.shape)
    order = (ctypes.c_uint8 * max(array.ndim, 1))(*range(array.ndim))
    code = next(code for code, name in _SCALAR_TYPES.items() if name == array.dtype.name)
    tensor = _Tensor(array.ctypes.data, array.nbytes, sizes, order, array.ndim, code)
    if load_plugin().arm_host_log_output(ctypes.c_int32(operation), ctypes.byref(tensor)) != 0:
        raise RunError(f"ETDump: the debug buffer has no room for operation {operation}, {array.nbytes:,} bytes")


def log_duration(operation: int, start: int, end: int, metadata: bytes) -> None:
    """Log start and end of an operation to the running program's event tracer.

    Only a listener of ``listen_to_delegates`` may call this function.

    Args:
        operation: delegate debug identifier.
        start, end: times in ns from the start of the delegate.
        metadata: bytes for the Inspector's metadata parser.
    """
    times = ctypes.c_uint64(start), ctypes.c_uint64(end)
    load_plugin().arm_host_log_duration(ctypes.c_int32(operation), *times, metadata, ctypes.c_uint64(len(metadata)))


class _Executor:
    """Callbacks of one backend. The C++ runtime calls them on the thread that runs the program."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._delegates: dict[int, LoadedDelegate] = {}
        self._checksums: dict[int, bytes | None] = {}
        self._handles = itertools.count(1)
        self.struct = _ExecutorStruct(None, _Init(self._init), _Execute(self._execute), _Destroy(self._destroy))

    # A Python exception must not propagate through C. It is stored for ``pop_exception``.

    def _init(self, _: Any, payload: int, size: int, specs: Any, spec_count: int) -> int:
        try:
            from arm_backend_core.backends.payload import CHECKSUM_KEY

            specs_by_key = {
                specs[i].key.decode(): ctypes.string_at(specs[i].data, specs[i].size) for i in range(spec_count)
            }
            named: Mapping[str, Any] = getattr(_program_context, "named", {})
            delegate = create_delegate(self._backend, ctypes.string_at(payload, size), specs_by_key, named.get)
            handle = next(self._handles)
            self._delegates[handle], self._checksums[handle] = delegate, specs_by_key.get(CHECKSUM_KEY)
            return handle
        except BaseException as error:
            _exceptions.error = error
            return 0

    def _execute(self, _: Any, handle: int, tensors: Any, count: int) -> int:
        try:
            delegate = self._delegates[handle]
            expected = [*delegate.inputs, *delegate.outputs]
            if count != len(expected):
                raise RunError(
                    f"{self._backend}: the program passes {count} tensors to a delegate, its payload has "
                    f"{len(delegate.inputs)} inputs and {len(delegate.outputs)} outputs"
                )
            arrays = [
                _view_as_bytes(self._backend, index, tensors[index], info)
                if isinstance(info, EthosUTensor)
                else _view_as_array(self._backend, tensors[index], info)
                for index, info in enumerate(expected)
            ]
            sources, targets = arrays[: len(delegate.inputs)], arrays[len(delegate.inputs) :]
            listener: Callable[[DelegateExecution], None] | None = getattr(_listeners, "listener", None)
            # Copy before the run, because the memory plan may place an output over an input.
            inputs = () if listener is None else tuple(array.copy() for array in sources)
            results = delegate.run(sources)
            for target, result in zip(targets, results, strict=True):
                target[...] = result.reshape(target.shape)
            if listener is not None:
                outputs = tuple(array.copy() for array in targets)
                listener(DelegateExecution(delegate, self._checksums[handle], inputs, outputs))
            return 0
        except BaseException as error:
            _exceptions.error = error
            return 1

    def _destroy(self, _: Any, handle: int) -> None:
        delegate = self._delegates.pop(handle, None)
        self._checksums.pop(handle, None)
        if delegate is not None:
            delegate.close()


def _view_as_array(backend: str, tensor: Any, expected: TensorInfo) -> Array:
    """View a tensor of the runtime as an array, with its dimensions in memory order.

    Raises:
        RunError: dtype, shape or size differ from the payload's.
    """
    import numpy as np

    shape = tuple(tensor.sizes[tensor.dim_order[axis]] for axis in range(tensor.rank))
    dtype_name = _SCALAR_TYPES.get(tensor.dtype)
    if dtype_name == "bool" and expected.dtype == "int8" and backend == _REFERENCE_BACKEND:
        dtype_name = "int8"  # the graph was lowered for hardware without booleans; it represents them as int8 0 and 1
    if dtype_name == "uint8" and expected.dtype == "int8":
        dtype_name = "int8"  # TOSA has no unsigned types: an operator of the graph reads the bits as uint8
    if dtype_name is None or dtype_name != expected.dtype or shape != expected.shape:
        raise RunError(
            f"{backend}: the program passes '{expected.name}' of a delegate as "
            f"{dtype_name or 'an unknown type'}{list(shape)} (in memory order), its payload expects {expected}. "
            "They do not match: export the program again."
        )
    dtype = np.dtype(_numpy_dtype(dtype_name))
    size = dtype.itemsize * math.prod(shape)
    if size == 0:
        return np.empty(shape, dtype)
    if size != tensor.nbytes or not tensor.data:
        raise RunError(f"{backend}: '{expected.name}' of a delegate has {tensor.nbytes} bytes, not {size}")
    return _view_memory(tensor).view(dtype).reshape(shape)


def _view_as_bytes(backend: str, index: int, tensor: Any, expected: EthosUTensor) -> Array:
    """View a tensor of the runtime as bytes.

    Raises:
        RunError: its size or element size differs from the payload's.
    """
    import numpy as np

    dtype_name = _SCALAR_TYPES.get(tensor.dtype)
    size = 0 if dtype_name is None else np.dtype(_numpy_dtype(dtype_name)).itemsize
    if size != expected.element_size or tensor.nbytes != expected.nbytes or not tensor.data:
        raise RunError(
            f"{backend}: the program passes tensor {index} of a delegate as {tensor.nbytes} bytes of "
            f"{dtype_name or 'an unknown type'}, its payload expects {expected}. "
            "They do not match: export the program again."
        )
    return _view_memory(tensor)


def _numpy_dtype(dtype_name: str) -> str:
    return _RAW_BYTE_DTYPES.get(dtype_name, dtype_name)


def _view_memory(tensor: Any) -> Array:
    import numpy as np

    return np.frombuffer((ctypes.c_char * tensor.nbytes).from_address(tensor.data), np.uint8)


@once
def register_backends() -> Sequence[_Executor]:
    """Register ``TOSABackend``, ``VgfBackend`` and ``EthosUBackend`` with ExecuTorch's runtime in this process, once.

    Afterwards, ``executorch.runtime`` can also run programs with these backends.

    Raises:
        RuntimeUnavailable: the plugin cannot be built or loaded, or ExecuTorch's runtime cannot register its backends
            and kernels, for example because other code has registered these backends.
    """
    # Registers the quantize and dequantize kernels that VGF programs need; ExecuTorch's base runtime lacks them.
    import_quietly("executorch.kernels.quantized")

    loaded = load_plugin()
    _call_or_raise(loaded.arm_host_install)
    executors = [_Executor(backend) for backend in DELEGATE_FACTORIES]
    for backend, executor in zip(DELEGATE_FACTORIES, executors, strict=True):
        _call_or_raise(loaded.arm_host_set_executor, backend.encode(), ctypes.byref(executor.struct))
    return executors  # the cache of ``once`` keeps them alive, because the runtime holds pointers into them


def _call_or_raise(function: Any, *arguments: Any) -> None:
    message = ctypes.create_string_buffer(512)
    if function(*arguments, message, ctypes.c_uint64(len(message))) != 0:
        raise RuntimeUnavailable(f"ExecuTorch's runtime in this process cannot be used: {message.value.decode()}")
