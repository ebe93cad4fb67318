"""``inspect_program``: describe a program file without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from arm_backend_core.backends.payload import (
    CHECKSUM_KEY,
    COMMANDS_CHECKSUM_KEY,
    FAST_SCRATCH_KEY,
    PLANNED_SCRATCH_KEYS,
    WEIGHTS_CHECKSUM_KEY,
    PlannedScratch,
)
from arm_recipes._internal.rendering import Renderable, Section, format_bytes
from arm_recipes.runtime.data_file import data_file_path, external_data_keys, read_data_file
from arm_recipes.runtime.errors import RunError
from arm_recipes.runtime.ethosu_blocks import NamedDataLookup, external_keys
from arm_recipes.runtime.ethosu_payload import EthosUPayload, read_payload, with_fast_scratch
from arm_recipes.runtime.payload_parts import COMMANDS_PREFIX, WEIGHTS_PREFIX, join_parts
from arm_recipes.runtime.pte import ProgramError, PteDelegate, PteTensor, read_program
from arm_recipes.runtime.signature import IOValue, read_signature
from arm_recipes.runtime.tosa_flatbuffer import TosaPayload, read_tosa_payload
from arm_recipes.runtime.vela_tflite import ETHOS_U_CUSTOM_CODE, is_tflite, read_vela_tflite
from arm_recipes.runtime.vgf_payload import VgfPayload, read_vgf

Payload = EthosUPayload | TosaPayload | VgfPayload
_PAYLOAD_READERS: dict[str, Callable[[memoryview], Payload]] = {
    "EthosUBackend": read_payload,
    "TOSABackend": read_tosa_payload,
    "VgfBackend": read_vgf,
}
#: Keys of the compile specs whose value is a binary number, not text.
_NUMERIC_SPECS = (
    CHECKSUM_KEY,
    FAST_SCRATCH_KEY,
    *PLANNED_SCRATCH_KEYS,
    COMMANDS_CHECKSUM_KEY,
    WEIGHTS_CHECKSUM_KEY,
)


@dataclass(frozen=True)
class DelegateInspection:
    """Description of a delegate of a method.

    Attributes:
        backend: backend id.
        payload_bytes: size of the payload.
        payload: description of the payload; None if it could not be parsed, or if it is of a backend that this package
            does not provide.
        problem: why the payload of an Arm backend could not be parsed, for example damage or a missing data file; else
            None.
        compile_specs: compile specs whose value is text.
        data_file_keys: keys of the payload's blocks that the program expects in its data file (``.ptd``).
        shares_scratch: whether the scratch is a part of the method's planned memory.
    """

    backend: str
    payload_bytes: int
    payload: Payload | None
    problem: str | None
    compile_specs: dict[str, str]
    data_file_keys: tuple[str, ...] = ()
    shares_scratch: bool = False


@dataclass(frozen=True)
class MethodInspection:
    """Description of a method.

    Attributes:
        delegates: in program order.
        operators: names of the CPU kernels that the firmware must contain. For a TFLite model: names of the operators
            that Vela left on the CPU.
        planned_bytes: size of the memory-planned buffers, which the firmware must provide. For a TFLite model: size of
            the arena.
    """

    name: str
    inputs: tuple[IOValue, ...]
    outputs: tuple[IOValue, ...]
    delegates: tuple[DelegateInspection, ...]
    operators: tuple[str, ...]
    planned_bytes: int


@dataclass(frozen=True)
class Inspection(Renderable):
    """Description of a program: ``print`` it, show it in a notebook, or convert it with ``to_dict()``.

    Attributes:
        program_bytes: size of the file.
        methods: all methods except constant methods.
        constants: results of the constant methods, by method. Methods that publish quantization parameters are omitted.
        named_data: size in bytes of each entry of the named data, by key.
        data_file: size in bytes of each entry of the data file (``.ptd``), by key; empty if the program needs no data
            file, or if there is none.
    """

    program_bytes: int
    methods: tuple[MethodInspection, ...]
    constants: dict[str, tuple[object, ...]]
    named_data: dict[str, int]
    data_file: dict[str, int] = field(default_factory=dict)

    def sections(self) -> Iterator[Section]:
        """Headings with their table rows, for text and HTML."""
        # Names come from an untrusted file: escape control characters, which could move the cursor.
        for heading, rows in self._raw_sections():
            yield _escape_unprintable(heading), [tuple(map(_escape_unprintable, row)) for row in rows]

    def _raw_sections(self) -> Iterator[Section]:
        yield (
            "Program",
            [("size", format_bytes(self.program_bytes)), ("methods", ", ".join(m.name for m in self.methods))],
        )
        for method in self.methods:
            yield from _method_sections(method, many=len(self.methods) > 1)
        if self.constants:
            yield (
                "Constants",
                [(name, ", ".join(map(_format_constant, values))) for name, values in self.constants.items()],
            )
        if self.named_data:
            yield "Named data", [(name, format_bytes(count)) for name, count in self.named_data.items()]
        if self.data_file:
            yield "Data file (.ptd)", [(name, format_bytes(count)) for name, count in self.data_file.items()]


def inspect_program(
    source: str | Path | bytes | bytearray | memoryview, ptd: str | Path | bytes | None = None
) -> Inspection:
    """Describe a program: inputs, outputs, delegates, and the kernels and memory that firmware must provide.

    If a payload is damaged, the description says so and still covers the rest of the program. For a TFLite model that
    Vela compiled, the operators for the NPU appear as delegates of one method.

    Args:
        source: path of a ``.pte`` file or of a ``.tflite`` that Vela compiled, or its bytes.
        ptd: path or bytes of the data file of a ``.pte``. Default: the file ``model.ptd`` beside ``model.pte``, if it
            exists.

    Raises:
        ValueError: a file cannot be read.
        ProgramError: a file is damaged, ``source`` is not a program, or ``ptd`` is not a data file. This is a
            ``ValueError``.
    """
    if isinstance(source, (bytearray, memoryview)):
        source = bytes(source)
    if ptd is None and not isinstance(source, bytes) and (beside := data_file_path(source)).is_file():
        ptd = beside
    data_file = None if ptd is None else _read_bytes(ptd)
    if isinstance(source, bytes):
        return _inspect(source, data_file)
    data = _read_bytes(source)
    try:
        return _inspect(data, data_file)
    except ProgramError as error:
        raise ProgramError(f"'{source}': {error}") from None


def _read_bytes(source: str | Path | bytes) -> bytes:
    if isinstance(source, bytes):
        return source
    try:
        return Path(source).expanduser().read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read '{source}': {error.strerror}") from error


def _inspect_vela_tflite(data: bytes) -> Inspection:
    model = read_vela_tflite(data)
    payloads = [
        replace(operator.content.payload, fast_scratch_bytes=0) if operator.one_arena else operator.content.payload
        for operator in model.npu_operators
    ]
    delegates = tuple(
        DelegateInspection(
            ETHOS_U_CUSTOM_CODE,
            payload.command_bytes + payload.weight_bytes,
            payload,
            None,
            {"compiler": model.description},
        )
        for payload in payloads
    )
    method = MethodInspection("forward", model.inputs, model.outputs, delegates, model.cpu_operators, model.arena_bytes)
    return Inspection(len(data), (method,), {}, {})


def _inspect(data: bytes, data_file: bytes | None) -> Inspection:
    if is_tflite(data):
        return _inspect_vela_tflite(data)
    program = read_program(data)
    keys = external_data_keys(program)
    outside = read_data_file(data_file) if data_file is not None and keys else {}
    named_data = {**outside, **program.named_data}
    methods = []
    quantization_methods: set[str] = set()
    for name, method in program.methods.items():
        if method.constants is not None:
            continue
        values = read_signature(program, name)
        quantization_methods |= values.quantization_methods
        delegates = tuple(_inspect_delegate(delegate, named_data.get, keys) for delegate in method.delegates)
        methods.append(
            MethodInspection(name, values.inputs, values.outputs, delegates, method.operators, method.planned_bytes)
        )
    constants = {
        name: method.constants
        for name, method in program.methods.items()
        if method.constants is not None and name not in quantization_methods
    }
    sizes, outside_sizes = ({name: len(view) for name, view in each.items()} for each in (program.named_data, outside))
    return Inspection(len(data), tuple(methods), constants, sizes, outside_sizes)


def _inspect_delegate(
    delegate: PteDelegate, find_named_data: NamedDataLookup, data_file_keys: Sequence[str]
) -> DelegateInspection:
    reader = _PAYLOAD_READERS.get(delegate.backend)
    payload, problem = None, None
    try:
        payload = reader(memoryview(join_parts(delegate.data, find_named_data))) if reader is not None else None
        if isinstance(payload, EthosUPayload):
            payload = with_fast_scratch(payload, delegate.compile_specs)
    except RunError as error:
        problem = str(error)
    text_by_key = {
        key: _decode_printable(value) for key, value in delegate.compile_specs.items() if key not in _NUMERIC_SPECS
    }
    specs = {key: text for key, text in text_by_key.items() if text is not None}
    keys = external_keys(delegate.data) if delegate.backend == "EthosUBackend" else []
    outside = tuple(key for key in keys if key in data_file_keys)
    shares_scratch = PlannedScratch.from_compile_specs(delegate.compile_specs) is not None
    return DelegateInspection(delegate.backend, len(delegate.data), payload, problem, specs, outside, shares_scratch)


def _decode_printable(value: bytes) -> str | None:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return None
    return text if text.isprintable() else None


def _method_sections(method: MethodInspection, *, many: bool) -> Iterator[Section]:
    suffix = f" of '{method.name}'" if many else ""
    values = [("in", value) for value in method.inputs] + [("out", value) for value in method.outputs]
    yield f"Inputs and outputs{suffix}", [(side, value.name, str(value)) for side, value in values]
    for index, delegate in enumerate(method.delegates):
        yield f"Delegate {index}{suffix}: {delegate.backend}", _delegate_rows(delegate)
    if not method.delegates:
        yield f"Delegates{suffix}", [("none",)]
    kernels: list[tuple[str, ...]] = [(name,) for name in method.operators]
    yield f"Kernels on the CPU{suffix}: {len(kernels)}", kernels or [("none",)]
    yield f"Memory{suffix}", [("planned memory", format_bytes(method.planned_bytes))]


def _delegate_rows(delegate: DelegateInspection) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("payload", format_bytes(delegate.payload_bytes))]
    payload = delegate.payload
    if delegate.problem is not None:
        rows.append(("unreadable payload", delegate.problem.partition("\n")[0]))
    if isinstance(payload, EthosUPayload):
        commands = format_bytes(payload.command_bytes)
        stream_format = "COP2, for Direct Drive" if payload.stream == "COP2" else payload.stream
        rows += [
            ("target", f"Ethos-U{payload.product}, {payload.macs} MACs"),
            (
                "command stream",
                f"{commands}, {stream_format}{_describe_location(delegate, COMMANDS_PREFIX)}",
            ),
            ("weights", f"{format_bytes(payload.weight_bytes)}{_describe_location(delegate, WEIGHTS_PREFIX)}"),
            ("scratch", format_bytes(payload.scratch_bytes) + ", in planned memory" * delegate.shares_scratch),
        ]
        if payload.fast_scratch_bytes != 0:
            size = payload.fast_scratch_bytes
            rows.append(("fast scratch", "unknown" if size is None else format_bytes(size)))
    elif isinstance(payload, TosaPayload):
        rows += [("TOSA version", payload.version), ("operators", f"{payload.operators:,}")]
    elif isinstance(payload, VgfPayload):
        rows += [("segments", f"{payload.segments:,}"), ("constants", format_bytes(payload.constant_bytes))]
    if payload is not None:
        for side, tensors in (("in", payload.inputs), ("out", payload.outputs)):
            rows += [(f"{side} {index}", str(tensor)) for index, tensor in enumerate(tensors)]
    return rows + list(delegate.compile_specs.items())


def _describe_location(delegate: DelegateInspection, prefix: str) -> str:
    """Return ", in the .ptd" if the data file has the block whose key begins with ``prefix``, else an empty string."""
    return ", in the .ptd" if any(key.startswith(prefix) for key in delegate.data_file_keys) else ""


def _format_constant(value: object) -> str:
    if isinstance(value, PteTensor):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    return repr(value)


def _escape_unprintable(text: str) -> str:
    return text if text.isprintable() else repr(text)[1:-1]
