"""Method signatures: names and quantization parameters of inputs and outputs, and the metadata that stores the names.

``export`` stores the metadata as JSON in the program's named data. The metadata begins with a CRC-32 of the file.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arm_recipes.runtime.pte import ProgramError, PteProgram, PteTensor
from arm_recipes.runtime.shape_variants import StoredShapeVariants
from arm_recipes.runtime.tensor_info import TensorInfo

#: Key of the metadata in the program's named data. The runtime reads named data only on request.
METADATA_KEY = "arm_recipes"
#: The metadata begins with this prefix and the CRC-32 of the file. The CRC-32 is computed over the file with the
#: placeholder in place of the CRC-32.
_CHECKSUM_PREFIX, _CHECKSUM_PLACEHOLDER = b'{"crc32": "', "00000000"
_CHECKSUM_PATTERN = re.compile(re.escape(_CHECKSUM_PREFIX) + rb'([0-9a-f]{8})", "methods": ')
#: Suffixes of the names of constant methods. ``stages.edge.edge_manager_passes`` adds such a method for each
#: quantization parameter of an input or output.
_QUANTIZATION_SUFFIXES = ("scale", "zp", "quant_min", "quant_max", "dtype")


@dataclass(frozen=True)
class NonTensorValue:
    """An input or output that is not a tensor.

    Attributes:
        kind: ExecuTorch's name of the type, for example ``Int``.
    """

    name: str
    kind: str

    def __str__(self) -> str:
        return self.kind


IOValue = TensorInfo | NonTensorValue


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a method.

    Attributes:
        quantization_methods: names of the constant methods that publish quantization parameters of inputs and outputs.
        mutated_inputs: number of outputs that are new values of mutated inputs. They come before the model's outputs.
    """

    inputs: tuple[IOValue, ...]
    outputs: tuple[IOValue, ...]
    quantization_methods: frozenset[str]
    mutated_inputs: int = 0


def read_signature(program: PteProgram, method: str) -> Signature:
    """Read the signature of a method. Without stored names, inputs and outputs are named ``input0``, ``output0`` etc.

    Raises:
        KeyError: there is no such method.
    """
    description = program.methods[method]
    names = _read_names(program, method)
    quantization_methods: set[str] = set()

    def values(side: str, descriptions: tuple[PteTensor | str, ...]) -> tuple[IOValue, ...]:
        stored_names = names.get(f"{side}s")
        if (
            not isinstance(stored_names, list)
            or len(stored_names) != len(descriptions)
            or not all(isinstance(n, str) for n in stored_names)
        ):
            stored_names = [f"{side}{index}" for index in range(len(descriptions))]
        result: list[IOValue] = []
        for index, (name, value) in enumerate(zip(stored_names, descriptions, strict=True)):
            if isinstance(value, str):
                result.append(NonTensorValue(name, value))
                continue
            methods = {key: f"{method}_{side}{index}_{key}" for key in _QUANTIZATION_SUFFIXES}
            scale = _constant_method_result(program, methods["scale"])
            zero_point = _constant_method_result(program, methods["zp"])
            if isinstance(scale, float) and type(zero_point) is int:
                quantization_methods.update(name for name in methods.values() if name in program.methods)
                result.append(TensorInfo(name, value.dtype, value.shape, scale, zero_point))
            else:
                result.append(TensorInfo(name, value.dtype, value.shape))
        return tuple(result)

    inputs, outputs = values("input", description.inputs), values("output", description.outputs)
    mutated = names.get("mutated_inputs", 0)
    is_valid = type(mutated) is int and 0 <= mutated <= len(outputs)
    return Signature(inputs, outputs, frozenset(quantization_methods), mutated if is_valid else 0)


def _constant_method_result(program: PteProgram, method: str) -> object:
    """Result of a constant method; None unless there is such a constant method and it has exactly one result."""
    description = program.methods.get(method)
    return (
        description.constants[0]
        if description is not None and description.constants and len(description.constants) == 1
        else None
    )


def encode_metadata(
    methods: Mapping[str, tuple[Sequence[TensorInfo], Sequence[TensorInfo]]],
    mutated_inputs: Mapping[str, int],
    program_digest: str | None = None,
    shape_variants: Mapping[str, Any] | None = None,
) -> bytes:
    """Encode the metadata: names of inputs and outputs by method, and the optional entries below.

    Args:
        methods: {method: (its inputs, its outputs)}.
        mutated_inputs: {method: number of mutated inputs} (see ``Signature``). Methods without mutated inputs may be
            missing.
        program_digest: for a reference program, the SHA-256 in hexadecimal of the program that it belongs to.
        shape_variants: shape variants by method, as JSON objects (see ``StoredShapeVariants.from_dict``).
    """
    names_by_method: dict[str, dict[str, Any]] = {
        method: {"inputs": [tensor.name for tensor in inputs], "outputs": [tensor.name for tensor in outputs]}
        for method, (inputs, outputs) in methods.items()
    }
    for method, count in mutated_inputs.items():
        if count:
            names_by_method[method]["mutated_inputs"] = count
    optional_entries = {"tosa_of": program_digest, "sized": shape_variants}
    present_entries = {key: value for key, value in optional_entries.items() if value}
    return json.dumps({"crc32": _CHECKSUM_PLACEHOLDER, "methods": names_by_method} | present_entries).encode()


def insert_checksum(chunks: Sequence[bytes]) -> list[bytes | memoryview]:
    """Replace the checksum placeholder in the metadata by the CRC-32 of the program.

    Args:
        chunks: the program in consecutive chunks; one of them holds the metadata.

    Returns:
        The program in chunks. They refer to the memory of the arguments, so that large weights are in memory only once.
    """
    placeholder, checksum = _CHECKSUM_PREFIX + _CHECKSUM_PLACEHOLDER.encode(), 0
    for chunk in chunks:
        checksum = zlib.crc32(chunk, checksum)
    parts: list[bytes | memoryview] = [*chunks]
    metadata_index = next((i for i, chunk in reversed([*enumerate(chunks)]) if placeholder in chunk), None)
    if metadata_index is not None:
        view = memoryview(chunks[metadata_index])
        at = chunks[metadata_index].rindex(placeholder) + len(_CHECKSUM_PREFIX)
        parts[metadata_index : metadata_index + 1] = [
            view[:at],
            f"{checksum:08x}".encode(),
            view[at + len(_CHECKSUM_PLACEHOLDER) :],
        ]
    return parts


def verify_checksum(data: bytes, program: PteProgram) -> None:
    """Verify the checksum of a program. A damaged program could crash the runtime or return wrong results.

    Two kinds of programs are not checked: those without metadata, which have no checksum, and those that still have the
    placeholder, because ``insert_checksum`` was not applied to them.

    Raises:
        ProgramError: the checksum differs or cannot be read.
    """
    # Search the file for the metadata, because the tables that locate it may be damaged.
    match = _CHECKSUM_PATTERN.match(data, max(data.rfind(_CHECKSUM_PREFIX), 0))
    if match is None:
        if METADATA_KEY in program.named_data:
            raise ProgramError("damaged: its checksum is unreadable; export or copy the program again")
        return
    first, last = match.span(1)
    actual_crc32 = zlib.crc32(data[:first] + _CHECKSUM_PLACEHOLDER.encode() + data[last:])
    if match[1] not in (_CHECKSUM_PLACEHOLDER.encode(), f"{actual_crc32:08x}".encode()):
        raise ProgramError("damaged: its CRC-32 is not the one recorded at export; export or copy the program again")


def _read_names(program: PteProgram, method: str) -> dict[str, Any]:
    """Read the names of one method's inputs and outputs; empty if none are stored or the metadata is malformed."""
    methods = _read_metadata(program).get("methods")
    names = methods.get(method) if isinstance(methods, dict) else None
    return names if isinstance(names, dict) else {}


def read_reference_digest(program: PteProgram) -> str | None:
    """Read the SHA-256 (hexadecimal) of the program that a reference program belongs to; None for other programs."""
    digest = _read_metadata(program).get("tosa_of")
    return digest if isinstance(digest, str) else None


def read_shape_variants(program: PteProgram) -> dict[str, StoredShapeVariants]:
    """Read the methods that were exported in several sizes, by name; empty if the metadata is malformed.

    A method is omitted if the program lacks one of its variants.
    """
    try:
        methods = {
            name: StoredShapeVariants.from_dict(name, stored)
            for name, stored in dict(_read_metadata(program).get("sized") or {}).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}
    return {
        name: variants for name, variants in methods.items() if set(variants.sizes_by_method) <= set(program.methods)
    }


def _read_metadata(program: PteProgram) -> dict[str, Any]:
    """Read the metadata; empty if there is none, or if it is not a JSON object."""
    try:
        stored = json.loads(bytes(program.named_data.get(METADATA_KEY, b"")))
    except (ValueError, RecursionError):
        return {}
    return stored if isinstance(stored, dict) else {}
