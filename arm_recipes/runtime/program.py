"""``Program``: run a ``.pte`` on this machine, in ExecuTorch's runtime.

The host plugin passes each delegate to its executor: the NPU emulator, the TOSA reference model, or Vulkan.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from arm_recipes._internal.messages import import_quietly
from arm_recipes.runtime import host_backends
from arm_recipes.runtime.calls import bind_arguments, call_batch, check_input, reject_old_backend_argument
from arm_recipes.runtime.command_origins import describe_with_origin
from arm_recipes.runtime.data_file import read_external_data
from arm_recipes.runtime.delegates import DELEGATE_FACTORIES
from arm_recipes.runtime.errors import RunError
from arm_recipes.runtime.output_structure import unflatten_outputs
from arm_recipes.runtime.padding import crop_outputs, pad_inputs
from arm_recipes.runtime.pte import ProgramError, PteMethod, PteProgram, read_program
from arm_recipes.runtime.shape_variants import Pad, StoredShapeVariants
from arm_recipes.runtime.signature import IOValue, Signature, read_shape_variants, read_signature, verify_checksum

if TYPE_CHECKING:
    from arm_backend_core.compilation_log import DelegateRecord
    from arm_recipes.runtime.trace import TracedOperation

#: Ids of this package's backends whose payload is not a TOSA graph. ``ethos-u`` stands for the custom operator in
#: TFLite models that Vela compiled.
_NON_TOSA_BACKENDS = frozenset({"EthosUBackend", "VgfBackend", "ethos-u"})


class Program:
    """A loaded program. Mutable buffers keep their values between runs.

    Threads may share a program, whose lock serializes the runs, or load one program each.

    Args:
        data: bytes of the ``.pte``.
        data_file: bytes of its ``.ptd``; None if the program has none.

    Attributes:
        data: bytes of the ``.pte``.
        data_file: bytes of the ``.ptd``, or None.
        content: the parsed file. Its named data include those of the ``.ptd``.
        shape_variants: methods that were exported in several sizes, by name.
        reference: the reference program (the same program with TOSA graphs as delegates), or None.
        records: the export's records of the delegates, by payload checksum. They provide the layer names for ``trace``
            and for error messages.

    Raises:
        ProgramError: the bytes are not a program or not a data file, or are damaged.
        RunError: the program needs a ``.ptd``, and it is missing, damaged or belongs to another program.
    """

    data_file: bytes | None = None

    def __init__(self, data: bytes, data_file: bytes | None = None) -> None:
        content = read_program(data)
        verify_checksum(data, content)
        if not content.methods:
            raise ProgramError("damaged: it has no methods")
        named_data = {**read_external_data(content, data_file), **content.named_data}
        content, self.data_file = replace(content, named_data=named_data), data_file
        self._initialize(data, content, {name: read_signature(content, name) for name in content.methods})

    def _initialize(self, data: bytes, content: PteProgram, signatures: Mapping[str, Signature]) -> None:
        # Assigned before ``data``, so that they are released before ``data``, which the loaded methods read.
        self._methods: dict[str, Any] = {}
        self._shared_program: Any = None
        self.content = content
        self.shape_variants = read_shape_variants(self.content)
        self.reference: Program | None = None
        self.records: Mapping[bytes, DelegateRecord] = {}
        self.data = data
        self._signatures = signatures
        self._lock = threading.Lock()

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of all methods except constant methods."""
        return tuple(name for name, method in self.content.methods.items() if method.constants is None)

    @property
    def inputs(self) -> tuple[IOValue, ...]:
        """Inputs of ``forward``, with scale and zero point if they are quantized.

        If there is no ``forward``, the inputs of the first method.
        """
        return self.signature(self._main_method).inputs

    @property
    def outputs(self) -> tuple[IOValue, ...]:
        """Outputs of the method that ``inputs`` describes."""
        return self.signature(self._main_method).outputs

    @property
    def _main_method(self) -> str:
        names = self.methods or tuple(self.content.methods)
        return "forward" if "forward" in names else names[0]

    def signature(self, method: str) -> Signature:
        """Inputs and outputs of a method.

        Raises:
            ValueError: there is no such method.
        """
        if method not in self._signatures:
            raise ValueError(f"no method '{method}'; the program has: {', '.join(self._signatures)}")
        return self._signatures[method]

    def run(
        self,
        *tensors: Any,
        method: str = "forward",
        backend: Literal["tosa"] | None = None,
        pad: Pad | None = None,
        **named: Any,
    ) -> Any:
        """Execute a method. For a method that was exported in several sizes, the smallest size that fits is executed.

        Args:
            tensors: the inputs by position, in the shapes and dtypes of ``inputs``.
            named: the remaining inputs, by their names in ``inputs``.
            method: the method to execute.
            backend: "tosa" executes the TOSA graphs that the delegates were compiled from, instead of the delegates.
            pad: padding value if no exported size fits exactly: one number, or a dict of input name to number.
                Tensors are padded at the end of each axis, and the outputs are cropped accordingly.

        Returns:
            The outputs in the structure of the model's outputs, as ``ExportResult.run`` returns them: a tensor, or
            tuples, lists and dicts. Named tuples and dataclasses become tuples. If the file records no structure, the
            result is the tensor of a single output, or a list of the outputs.

        Raises:
            ValueError: there is no such method, ``backend`` is unknown, or a tensor has the wrong shape or dtype. For a
                method with several sizes, also: the inputs are larger than all sizes, or no size fits exactly and
                ``pad`` has no number for an input. For a method with delegates of an Arm backend, also: an int64 tensor
                has a value that int32 cannot hold.
            RunError: the run failed, this machine lacks a dependency, which the message names, or ``backend="tosa"``
                needs a reference program and none is loaded.
        """
        outputs = self.execute(*tensors, method=method, backend=backend, pad=pad, **named)
        executed = next(iter(self.shape_variants[method].sizes_by_method)) if method in self.shape_variants else method
        encoded = self.content.methods[executed].output_structure
        return unflatten_outputs(outputs, encoded, self.signature(executed).mutated_inputs)

    def execute(
        self,
        *tensors: Any,
        method: str = "forward",
        backend: Literal["tosa"] | None = None,
        pad: Pad | None = None,
        **named: Any,
    ) -> list[Any]:
        """Execute a method as ``run`` does, but return the flat list of outputs that ExecuTorch's runtime returns.

        Returns:
            One value for each output of the program, in order. The new values of mutated inputs come first.

        Raises:
            ValueError, RunError: as for ``run``.
        """
        reject_old_backend_argument(named)
        if backend is not None:
            return self._reference_for(backend).execute(*tensors, method=method, pad=pad, **named)
        if method in self.shape_variants:
            return self._execute_shape_variant(self.shape_variants[method], tensors, named, pad)
        inputs = self._bind_inputs(method, tensors, named)
        with self._lock:
            return self._execute(method, inputs)

    def _execute_shape_variant(
        self, variants: StoredShapeVariants, tensors: Sequence[Any], named: Mapping[str, Any], pad: Pad | None
    ) -> list[Any]:
        first, *_ = variants.sizes_by_method
        inputs = bind_arguments(variants.name, self.signature(first), tensors, named)
        if len(inputs) != len(variants.inputs):
            raise ValueError(f"'{variants.name}' takes {len(variants.inputs)} inputs, got {len(inputs)}")
        sizes = variants.read_sizes(inputs)
        method = variants.select_method(sizes, pad)
        outputs = self.execute(*pad_inputs(inputs, self.signature(method), pad), method=method)
        return crop_outputs(outputs, variants.outputs, sizes)

    def trace(self, *tensors: Any, method: str = "forward", **named: Any) -> Iterator[TracedOperation]:
        """Execute a method, then execute its Ethos-U delegates again, and yield each NPU operation with its result.

        A copy of the program is loaded and executed. The copy's mutable buffers start with their initial values, and
        the buffers of this program do not change.

        Args:
            tensors: as for ``run``.
            method: as for ``run``.
            named: as for ``run``.

        Raises:
            ValueError, RunError: as for ``run``.
        """
        from arm_recipes.runtime.trace import trace_delegate

        with host_backends.record_executions() as executions:
            loaded = self._copy_unloaded()  # keep a reference, because the program owns the delegates
            loaded.execute(*tensors, method=method, **named)
        for number, execution in enumerate(executions):
            with self._lock:
                operations = list(trace_delegate(number, execution, self.records.get(execution.checksum or b"")))
            yield from operations

    def _copy_unloaded(self) -> Program:
        """Return a copy of the program whose methods are not loaded yet."""
        program = copy.copy(self)
        program._methods, program._shared_program = {}, None
        return program

    def run_batch(
        self, samples: Iterable[Any], *, method: str = "forward", backend: Literal["tosa"] | None = None
    ) -> Iterator[Any]:
        """Execute a method for each sample, and yield its outputs, as ``run`` returns them, after each execution.

        Args:
            samples: tuples of tensors, ``Inputs``, dicts of tensors by name, or tensors for a method with one input.
            method: as for ``run``.
            backend: as for ``run``.

        Raises:
            ValueError, RunError: as for ``run``. The message begins with the index of the sample.
        """
        return call_batch(
            lambda *tensors, **named: self.run(*tensors, method=method, backend=backend, **named), samples
        )

    @property
    def has_reference(self) -> bool:
        """Whether ``backend="tosa"`` works.

        It works if a reference program is loaded, or if the payload of each of this package's delegates is a TOSA
        graph.
        """
        return self.reference is not None or self._is_own_reference

    @property
    def _is_own_reference(self) -> bool:
        backends = {delegate.backend for method in self.content.methods.values() for delegate in method.delegates}
        return not backends & _NON_TOSA_BACKENDS

    def _reference_for(self, backend: str) -> Program:
        if backend != "tosa":
            raise ValueError(f"backend={backend!r}: unknown backend; give backend='tosa' or leave it out")
        if self.reference is not None:
            return self.reference
        if self._is_own_reference:
            return self
        raise RunError(
            "backend='tosa' needs the TOSA graphs of this program, and no reference program is loaded. Write it at "
            "export with result.save('model.pte', reference=True), which creates 'model.tosa.pte' beside the program; "
            "load finds it there, or give its path as reference=..."
        )

    def _bind_inputs(self, method: str, tensors: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """Return all inputs of the method in order, validated and in the memory layout of the program."""
        expected = self.signature(method)
        return self._check_inputs(method, expected, bind_arguments(method, expected, tensors, named))

    def _check_inputs(self, method: str, expected: Signature, tensors: Sequence[Any]) -> list[Any]:
        if len(tensors) != len(expected.inputs):
            names = ", ".join(f"{value.name}: {value}" for value in expected.inputs)
            raise ValueError(f"'{method}' takes {len(expected.inputs)} inputs ({names}), got {len(tensors)}")
        description = self.content.methods[method]
        layouts, has_arm_delegate = (
            description.inputs,
            any(x.backend in DELEGATE_FACTORIES for x in description.delegates),
        )
        return [
            check_input(index, value, kind, tensor, reads_int32=has_arm_delegate)
            for index, (value, kind, tensor) in enumerate(zip(expected.inputs, layouts, tensors, strict=True))
        ]

    def etdump(
        self,
        *tensors: Any,
        method: str = "forward",
        debug_bytes: int,
        listener: Callable[[host_backends.DelegateExecution], None],
    ) -> tuple[bytes, bytes, list[Any]]:
        """Load the program again and execute a method with ExecuTorch's event tracer.

        Args:
            tensors: one tensor for each input.
            debug_bytes: size of the debug buffer for the logged tensors. If it is too small, the runtime aborts the
                process.
            listener: called after the execution of each delegate. It may log events of the delegate's operations.

        Returns:
            ETDump, debug buffer and outputs.

        Raises:
            ValueError, RunError: as for ``run``.
        """
        inputs = self._check_inputs(method, self.signature(method), tensors)
        with (
            self._lock,
            self._translate_errors(method),
            host_backends.provide_named_data(self.content.named_data),
            host_backends.listen_to_delegates(listener),
        ):
            program = self._checked_runtime(method).load_program(
                self.data, enable_etdump=True, debug_buffer_size=debug_bytes
            )
            outputs = list(program.load_method(method).execute(inputs))
        with TemporaryDirectory() as folder:
            paths = Path(folder, "etdump"), Path(folder, "debug")
            program.write_etdump_result_to_file(*map(str, paths))
            etdump, debug = (path.read_bytes() for path in paths)
        return etdump, debug, outputs

    def _execute(self, name: str, inputs: Sequence[Any]) -> list[Any]:
        with self._translate_errors(name):
            method = self._methods.get(name)
            if method is None:
                with host_backends.provide_named_data(self.content.named_data):
                    method = self._methods[name] = self._load_method(name)
            return list(method.execute(inputs))

    @contextmanager
    def _translate_errors(self, name: str) -> Iterator[None]:
        """Raise an error of the runtime as ``RunError``, with the message of the delegate that failed."""
        host_backends.pop_exception()
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            cause = host_backends.pop_exception()
            if cause is None:
                if isinstance(error, RunError):
                    raise
                raise RunError(f"ExecuTorch's runtime cannot run '{name}': {error}") from error
            if not isinstance(cause, Exception):  # Ctrl-C
                raise cause from None
            error_type = type(cause) if isinstance(cause, RunError) else RunError
            message = describe_with_origin(cause, self.records) if isinstance(cause, RunError) else cause
            raise error_type(f"'{name}' cannot be run: {message}") from cause

    def _checked_runtime(self, name: str) -> Any:
        """Return ExecuTorch's runtime, after a check that it has the backends and kernels that a method needs."""
        host_backends.register_backends()
        runtime = import_quietly("executorch.runtime").Runtime.get()
        _check_backends(self.content.methods[name], runtime.backend_registry.registered_backend_names)
        _check_kernels(self.content.methods[name], runtime.operator_registry.operator_names)
        return runtime

    def _load_method(self, name: str) -> Any:
        runtime = self._checked_runtime(name)
        if not self._shares_state:
            # Load the program once for each method. The methods of one loaded program share planned memory, so a method
            # would overwrite the mutable buffers of another method.
            return runtime.load_program(self.data).load_method(name)
        if self._shared_program is None:
            # Load all methods now, because loading a method later would reset the shared buffers to their initial
            # values.
            self._shared_program = runtime.load_program(self.data)
            self._methods |= {method: self._shared_program.load_method(method) for method in self.methods}
        return self._methods.get(name) or self._shared_program.load_method(name)

    @property
    def _shares_state(self) -> bool:
        """Whether methods share mutable buffers, which ``share_mutable_buffers`` places in planned buffer 2."""
        return sum(method.planned_buffers > 1 for method in self.content.methods.values()) > 1

    def __repr__(self) -> str:
        inputs, outputs = (", ".join(f"{v.name}: {v}" for v in values) for values in (self.inputs, self.outputs))
        return f"<{type(self).__name__} ({inputs}) -> ({outputs})>"


def _check_backends(method: PteMethod, registered: Iterable[str]) -> None:
    missing = sorted({delegate.backend for delegate in method.delegates} - set(registered))
    if missing:
        raise RunError(
            f"'{method.name}' needs the backend {', '.join(missing)}, which is not registered with ExecuTorch's "
            f"runtime here; registered: {', '.join(sorted(registered))}. "
            "Export without that backend, or load its library first"
        )


def _check_kernels(method: PteMethod, registered: Iterable[str]) -> None:
    missing = sorted(set(method.operators) - set(registered))
    if missing:
        raise RunError(
            f"'{method.name}' needs kernels that are not registered with ExecuTorch's runtime here: "
            f"{', '.join(missing)}. "
            "Load the library that registers them (torch.ops.load_library or ctypes.CDLL) before the first run"
        )
