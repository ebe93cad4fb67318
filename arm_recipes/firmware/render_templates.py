"""Generated files of a firmware folder: templates whose placeholders are filled with the program's data."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import chain

from arm_recipes.firmware.board_files import (
    FirmwareBoard,
    memory_placeholders,
    render_board_files,
    render_readme_section,
)
from arm_recipes.firmware.host_run import FirmwareTestCase
from arm_recipes.firmware.io_tensors import IOTensor
from arm_recipes.firmware.kernels import Kernels
from arm_recipes.firmware.memory_pools import ProgramPools
from arm_recipes.firmware.versions import Versions
from arm_recipes.runtime.ethosu_payload import CACHE_LINE
from arm_recipes.runtime.method_memory import LOADED_DELEGATE_BYTES, TYPE_LAYOUTS
from arm_recipes.runtime.pte_schema import dtype_number

#: Number of bytes on a line of a C array.
_BYTES_PER_LINE = 24
_PLACEHOLDER = re.compile(r"@([A-Z_0-9]+)@")
#: Template block: lines for programs with Ethos-U delegates, then optional lines for programs without delegates.
_NPU_BLOCK = re.compile(r"^@NPU\?@\n(.*?)(?:^@NO_NPU\?@\n(.*?))?^@END\?@\n", re.M | re.S)
#: ``ARM_MODEL_ISA`` of model.h by instruction set.
_ISA_NUMBERS = {"scalar": 0, "dsp": 1, "mve": 2}
#: Tolerance of float32 outputs, relative to max(1, |expected value|). Device and host differ only in the floating-point
#: arithmetic of kernels outside this project (``Kernels.portable`` and ``Kernels.others``).
_FLOAT_TOLERANCE = 1e-5
#: Version of the payload format that the parser in ``runtime/`` reads: ``arm_runtime::kPayloadFormat``.
PAYLOAD_FORMAT = 1
_EXECUTORCH_CORTEX_M_OPTION = """\
# ExecuTorch's own kernels for Cortex-M, in place of those in backend/. There is no selective build of them.
if(DEFINED ARM_RUNTIME_CORTEX_M_KERNELS AND NOT ARM_RUNTIME_CORTEX_M_KERNELS)
  set(EXECUTORCH_BUILD_CORTEX_M ON CACHE BOOL "" FORCE)
endif()"""


@dataclass(frozen=True)
class MethodIO:
    """Inputs and outputs of a method."""

    method: str
    inputs: tuple[IOTensor, ...]
    outputs: tuple[IOTensor, ...]

    @property
    def prefix(self) -> str:
        """Prefix of the method's macros in ``model.h``."""
        return f"ARM_MODEL_{to_c_identifier(self.method).upper()}"


@dataclass(frozen=True)
class FirmwareTestVectors:
    """Test vectors of the self-test: test cases, and their outputs on the exporting machine."""

    cases: tuple[FirmwareTestCase, ...]
    outputs: tuple[tuple[bytes, ...], ...]


@dataclass(frozen=True)
class FirmwareData:
    """The data of the generated files."""

    name: str
    program: bytes
    data_file: bytes | None
    versions: Versions
    pools: ProgramPools
    methods: tuple[MethodIO, ...]
    kernels: Kernels
    test_vectors: FirmwareTestVectors
    board: FirmwareBoard | None = None


def to_c_identifier(text: str) -> str:
    """Convert text to a C identifier. Characters that C does not allow become ``u`` and the hexadecimal code point."""
    return re.sub(r"[^0-9A-Za-z_]", lambda match: f"u{ord(match[0]):x}", text)


def render_files(data: FirmwareData) -> dict[str, bytes]:
    """Render all templates, and return the files by path in the folder."""
    placeholders = {**_version_placeholders(data), **_memory_placeholders(data.pools), **_build_placeholders(data)}
    placeholders |= _planned_memory_placeholders(data.pools) | memory_placeholders(data.board)
    placeholders["BOARD"] = render_readme_section(data.board)
    placeholders["TENSORS"] = "\n".join(chain.from_iterable(map(_tensor_macros, data.methods)))
    placeholders_of_file = {
        "model.c": {
            "PTE": format_array(data.program),
            "PTD": "" if data.data_file is None else format_array(data.data_file),
            "TABLES": "\n".join(chain.from_iterable(map(_tensor_tables, data.methods))),
            "METHODS": "\n".join(map(_method_entry, data.methods)),
        },
        "golden.c": {
            "TABLES": "\n".join(_golden_arrays(data.test_vectors)),
            "CASES": "\n".join(_golden_cases(data)),
        },
    }
    root = files("arm_recipes.firmware") / "templates"
    result = {}
    for name in _TEMPLATES:
        text = root.joinpath(*name.split("/")).read_text(encoding="utf-8")
        text = _select_blocks(text, has_npu=data.versions.has_npu)
        result[name] = _fill_placeholders(text, {**placeholders, **placeholders_of_file.get(name, {})}).encode()
    return result | render_board_files(data.board, data.kernels, has_npu=data.versions.has_npu)


_TEMPLATES = (
    "README.md",
    "CMakeLists.txt",
    "arm_model_layout.h",
    "executorch_options.cmake",
    "golden.c",
    "golden.h",
    "linker/arm_model.ld",
    "model.c",
    "model.h",
    "self_test.cpp",
    "zephyr/CMakeLists.txt",
    "zephyr/Kconfig",
    "zephyr/module.yml",
)


def _select_blocks(text: str, *, has_npu: bool) -> str:
    """Resolve the template blocks (``_NPU_BLOCK``): keep the lines for programs with delegates, or those without."""
    return _NPU_BLOCK.sub(lambda match: match[1] if has_npu else match[2] or "", text)


def _fill_placeholders(text: str, placeholders: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: placeholders[match[1]], text)


def format_array(data: bytes) -> str:
    """Format bytes as the elements of a C array. An empty array gets one element, because C has no empty arrays."""
    data = data or b"\0"
    return ",\n".join(
        ",".join(map(str, data[at : at + _BYTES_PER_LINE])) for at in range(0, len(data), _BYTES_PER_LINE)
    )


def _version_placeholders(data: FirmwareData) -> dict[str, str]:
    versions = data.versions
    major, minor, *_ = versions.executorch.split(".")
    return {
        "NAME": re.sub(r"[^\w .+-]", "_", data.name),
        "EXECUTORCH": versions.executorch,
        "EXECUTORCH_MAJOR": major,
        "EXECUTORCH_MINOR": minor,
        "VELA": versions.vela,
        "NPU": versions.npu,
        "TARGET": versions.target,
        "ISA": str(_ISA_NUMBERS.get(versions.isa, -1)),
        "READER": ", in memory that the NPU can read" if versions.has_npu else "",
        "WRITER": ", in memory that the NPU can read and write" if versions.has_npu else "",
        "SET_UP": ", memory and NPU (ethosu_init())" if versions.has_npu else " and memory",
        "REGISTERED": "backend and kernels" if versions.has_npu else "kernels",
        "COMPARED": " and the format of the payloads" if versions.has_npu else ", and ARM_MODEL_ISA for CMSIS-NN,",
        "STREAM": versions.stream,
        "ARCHITECTURE": versions.architecture,
        "PAYLOAD_FORMAT": str(PAYLOAD_FORMAT),
        "PTE_SIZE": str(len(data.program)),
        "PTE_CRC32": f"0x{zlib.crc32(data.program):08X}",
        "PTD_SIZE": str(len(data.data_file or b"")),
        "PTD_CRC32": f"0x{zlib.crc32(data.data_file or b''):08X}",
        "ASSERTS": "\n".join(_layout_asserts(has_npu=versions.has_npu)),
    }


def _layout_asserts(*, has_npu: bool) -> Iterator[str]:
    """Yield static assertions on the sizes of the runtime's types, for 32-bit and for 64-bit pointers.

    The pool sizes were computed from these sizes.
    """
    for bits, layout in TYPE_LAYOUTS.items():
        yield "#if UINTPTR_MAX > 0xFFFFFFFFu" if bits == 64 else "#if UINTPTR_MAX <= 0xFFFFFFFFu"
        for name, (size, alignment) in layout.named.items():
            yield f"ARM_MODEL_HAS_LAYOUT({size}, {alignment}, {name});"
        if has_npu:
            text = '"the sizes in model.h are for another backend: build with the backend in backend/"'
            actual, expected = "arm_runtime::EthosUBackend::kMethodAllocatorBytes", LOADED_DELEGATE_BYTES[bits]
            yield f"static_assert({actual} == {expected}, {text});"
        yield "#endif"


def _memory_placeholders(pools: ProgramPools) -> dict[str, str]:
    names = [f"ARM_MODEL_{to_c_identifier(method.name).upper()}" for method in pools.methods]
    method_bytes = sum(method.method_allocator + method.planned for method in pools.methods)
    exact = "The sizes for Cortex-M are computed from the program and the runtime's types, and are minimal."
    bound = "Some sizes for Cortex-M could not be computed: these are upper bounds, measured with 64-bit pointers."
    return {
        "EXACT": exact if pools.exact else bound,
        "ALIGNMENT": str(CACHE_LINE),
        "TEMP": str(pools.temp),
        "TEMP_64": str(pools.temp_64),
        "FAST_SCRATCH": str(pools.fast_scratch),
        "OUTPUTS": str(pools.outputs),
        "SHARED_COUNT": str(len(pools.shared)),
        "SHARED": ", ".join(map(str, pools.shared)) or "0",
        "METHOD_COUNT": str(len(pools.methods)),
        "POOL_BYTES": str(pools.temp + pools.outputs + sum(pools.shared) + method_bytes),
        "METHOD_POOLS": "\n".join(_pool_macros(pools)),
        "METHOD_POOL_LIST": ", ".join(f"{name}_POOL_SIZE" for name in names),
        "PLANNED_LIST": ", ".join(f"{name}_PLANNED_SIZE" for name in names),
    }


def _planned_memory_placeholders(pools: ProgramPools) -> dict[str, str]:
    """Placeholders for planned memories: linker sections, arrays for all but the first, and bytes the NPU accesses."""
    numbers = range(2, 2 + len(pools.shared))
    names = [f"ARM_MODEL_PLANNED{number}_SECTION" for number in numbers]
    sections = [
        f'#ifndef {name}\n#define {name} ".bss.arm_model_planned{number}"\n#endif'
        for number, name in zip(numbers, names, strict=True)
    ]
    arrays = [
        f"ARM_MODEL_PLACED({name}, ARM_MODEL_POOL_ALIGNMENT) "
        f"uint8_t planned{number}[array_size(kSharedSizes[{number - 2}])];"
        for number, name in zip(numbers, names, strict=True)
    ]
    return {
        # The NPU must reach a planned memory that contains the NPU's scratch.
        "PLANNED1_SECTION": "ARM_MODEL_TEMP_SECTION" if pools.shares_scratch else '".bss.arm_model_planned1"',
        "NPU_BYTES": str(pools.temp + sum(method.planned for method in pools.methods) * pools.shares_scratch),
        "NPU_POOLS": "temp pool and planned memory" if pools.shares_scratch else "temp pool",
        "PLANNED_SECTIONS": "\n".join(sections),
        "PLANNED_POOLS": "\n".join(arrays),
        "PLANNED_POOL_LIST": ", ".join([*(f"planned{number}" for number in numbers), "nullptr"]),
    }


def _pool_macros(pools: ProgramPools) -> Iterator[str]:
    for method in pools.methods:
        name = f"ARM_MODEL_{to_c_identifier(method.name).upper()}"
        yield f"#ifndef {name}_POOL_SIZE"
        yield "#if UINTPTR_MAX > 0xFFFFFFFFu"
        yield f"#define {name}_POOL_SIZE {method.method_allocator_64}u"
        yield "#else"
        yield f"#define {name}_POOL_SIZE {method.method_allocator}u"
        yield "#endif"
        yield "#endif"
        yield f"#ifndef {name}_PLANNED_SIZE"
        yield f"#define {name}_PLANNED_SIZE {method.planned}u"
        yield "#endif"


def _tensor_macros(method_io: MethodIO) -> Iterator[str]:
    for side, tensors in (("INPUT", method_io.inputs), ("OUTPUT", method_io.outputs)):
        yield f"#define {method_io.prefix}_{side}_COUNT {len(tensors)}"
        for index, io_tensor in enumerate(tensors):
            info, name = io_tensor.info, f"{method_io.prefix}_{side}{index}"
            yield f"/* {_escape_comment(f'{info.name}: {info}')} */"
            yield f"#define {name}_SHAPE {{{', '.join(map(str, info.shape)) or '0'}}}"
            yield f"#define {name}_BYTES {io_tensor.nbytes}u"
            if info.scale is not None:
                yield f"#define {name}_SCALE {_format_float(info.scale)}"
                yield f"#define {name}_ZERO_POINT ({info.zero_point})"


def _tensor_tables(method_io: MethodIO) -> Iterator[str]:
    for side, tensors in (("inputs", method_io.inputs), ("outputs", method_io.outputs)):
        name = f"{to_c_identifier(method_io.method)}_{side}"
        rows = []
        for index, io_tensor in enumerate(tensors):
            info, layout = io_tensor.info, io_tensor.layout
            shape, order = f"{name}_{index}_shape", f"{name}_{index}_order"
            yield f"static const int32_t {shape}[] = {{{', '.join(map(str, info.shape)) or '0'}}};"
            yield f"static const uint8_t {order}[] = {{{', '.join(map(str, layout.dim_order)) or '0'}}};"
            number, rank = dtype_number(info.dtype), len(info.shape)
            quantized = int(info.scale is not None)
            scale, zero = _format_float(info.scale or 0.0), info.zero_point or 0
            rows.append(
                f'  {{"{_escape_string(info.name)}", {number}, {rank}, {quantized}, {shape}, {order}, '
                f"{io_tensor.nbytes}u, {scale}, {zero}}},"
            )
        if rows:
            yield f"static const arm_model_tensor {name}[] = {{"
            yield from rows
            yield "};"


def _method_entry(method_io: MethodIO) -> str:
    name = to_c_identifier(method_io.method)
    sides = (("inputs", method_io.inputs), ("outputs", method_io.outputs))
    tables = (f"{len(tensors)}, {f'{name}_{side}' if tensors else 'NULL'}" for side, tensors in sides)
    return f'  {{"{_escape_string(method_io.method)}", {", ".join(tables)}}},'


def _golden_arrays(vectors: FirmwareTestVectors) -> Iterator[str]:
    for number, (case, outputs) in enumerate(zip(vectors.cases, vectors.outputs, strict=True)):
        for side, contents in (("input", case.inputs), ("output", outputs)):
            for index, content in enumerate(contents):
                yield f"static const uint8_t case{number}_{side}{index}[] ALIGNED = {{\n{format_array(content)}}};"
            if contents:
                names = ", ".join(f"case{number}_{side}{index}" for index in range(len(contents)))
                yield f"static const uint8_t *const case{number}_{side}s[] = {{{names}}};"


def _golden_cases(data: FirmwareData) -> Iterator[str]:
    names = [method_io.method for method_io in data.methods]
    for number, case in enumerate(data.test_vectors.cases):
        sides = (("inputs", case.inputs), ("outputs", data.test_vectors.outputs[number]))
        tables = ", ".join(f"case{number}_{side}" if contents else "NULL" for side, contents in sides)
        yield f"  {{{names.index(case.method)}, {tables}}},"


def _build_placeholders(data: FirmwareData) -> dict[str, str]:
    kernels, pools, has_npu = data.kernels, data.pools, data.versions.has_npu
    why = "All implementations of the program's kernels compute the same bits."
    if not kernels.is_exact:
        why = "The kernels of the exporting machine may differ from those of the firmware."
    if kernels.portable:
        text = "Kernels of ExecuTorch's selective build"
        selected = f'set(EXECUTORCH_SELECT_OPS_LIST "{",".join(kernels.portable)}" CACHE STRING "{text}" FORCE)'
    else:
        selected = (
            "# The program needs no portable kernels: link neither portable_ops_lib nor executorch_kernels.\n"
            'set(EXECUTORCH_SELECT_OPS_LIST "" CACHE STRING "" FORCE)'
        )
    selected += "\n# Selecting kernels by the file model.pte instead needs ExecuTorch's Python package at build time."
    selected += '\nset(EXECUTORCH_SELECT_OPS_MODEL "" CACHE STRING "" FORCE)'
    others = [f"#   {name}" for name in kernels.others]
    if others:
        others.insert(
            0, "# These kernels are in other libraries of ExecuTorch (quantized_ops_lib, ...), or in your own:"
        )
    return {
        "CASE_COUNT": str(len(data.test_vectors.cases)),
        "TOLERANCE": "0.0" if kernels.is_exact else str(_FLOAT_TOLERANCE),
        "WHY": why,
        "CORTEX_M_KERNELS": "ON" if kernels.cortex_m else "OFF",
        "KERNEL_LIST": ";".join(kernels.symbols()),
        "KERNEL_MACROS": " ".join(f"KERNEL({symbol})" for symbol in kernels.symbols()),
        "EXECUTORCH_CORTEX_M": _EXECUTORCH_CORTEX_M_OPTION if kernels.cortex_m else "",
        "CORTEX_M_KERNELS_KCONFIG": "y" if kernels.cortex_m else "n",
        "SELECTED": selected,
        "OTHERS": "\n".join(others),
        "POOLS": "\n".join(_kconfig_entries(pools, has_npu=has_npu)),
        "DEFINITIONS": "\n    ".join(
            f"{name}=${{CONFIG_{name}}}" for name, *_ in _pool_size_macros(pools, has_npu=has_npu)
        ),
        "SIZES": "\n".join(
            f"| {description} | `{name}` | {size:,} |"
            for name, description, size, _ in _pool_size_macros(pools, has_npu=has_npu)
        ),
        "SHARED_ROWS": "".join(
            f"| Planned memory {at} (`.bss.arm_model_planned{at}`) | | {size:,} |\n"
            for at, size in enumerate(pools.shared, 2)
        ),
        "KERNELS": "\n".join(f"- `{name}`" for name in _list_kernels(kernels)) or "none",
    }


def _list_kernels(kernels: Kernels) -> Sequence[str]:
    return [*kernels.cortex_m, *kernels.portable, *kernels.others]


def _pool_size_macros(pools: ProgramPools, *, has_npu: bool) -> Iterable[tuple[str, str, int, int]]:
    """Yield the sizes that a build may override: macro, description, bytes for 32-bit and for 64-bit pointers."""
    scratch = ", with the NPU's scratch"
    in_planned, in_temp = (scratch * (has_npu and pools.shares_scratch is planned) for planned in (True, False))
    for method in pools.methods:
        name = f"ARM_MODEL_{to_c_identifier(method.name).upper()}"
        yield (
            f"{name}_POOL_SIZE",
            f"Method allocator of '{method.name}'",
            method.method_allocator,
            method.method_allocator_64,
        )
        yield f"{name}_PLANNED_SIZE", f"Planned memory of '{method.name}'{in_planned}", method.planned, method.planned
    yield "ARM_MODEL_TEMP_POOL_SIZE", f"Temp allocator{in_temp}", pools.temp, pools.temp_64
    if has_npu:
        yield "ARM_MODEL_FAST_SCRATCH_SIZE", "Fast scratch of the NPU", pools.fast_scratch, pools.fast_scratch


def _kconfig_entries(pools: ProgramPools, *, has_npu: bool) -> Iterator[str]:
    for name, description, size, size_64 in _pool_size_macros(pools, has_npu=has_npu):
        other = f"\tdefault {size_64} if 64BIT\n" if size_64 != size else ""
        yield f'config {name}\n\tint "{description}, in bytes"\n{other}\tdefault {size}\n'


def _format_float(value: float) -> str:
    text = f"{value:.9g}"
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


def _escape_string(text: str) -> str:
    """Escape text for a C string literal. Bytes outside of printable ASCII become octal escapes."""
    return "".join(chr(byte) if 32 <= byte < 127 and byte not in b'"\\?' else f"\\{byte:03o}" for byte in text.encode())


def _escape_comment(text: str) -> str:
    return _escape_string(text).replace("*/", "* /")
