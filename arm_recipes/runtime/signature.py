"""Method signatures: inputs and outputs with names and quantization parameters, and the metadata that stores them.

``export`` stores the metadata as JSON in the program's named data. It begins with a CRC-32 of the file.
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
NAMES_KEY = "arm_recipes"
#: Beginning of the metadata; the CRC-32 of the file follows. It is computed with the placeholder in its own place.
_CHECKSUM_PREFIX, _CHECKSUM_PLACEHOLDER = b'{"crc32": "', "00000000"
_CHECKSUM_PATTERN = re.compile(re.escape(_CHECKSUM_PREFIX) + rb'([0-9a-f]{8})", "methods": ')
#: Suffixes of the constant methods by which ``stages.edge_manager`` publishes the quantization of an input or output.
_QUANTIZATION_SUFFIXES = ("scale", "zp", "quant_min", "quant_max", "dtype")


@dataclass(frozen=True)
class OtherValue:
    """An input or output that is not a tensor.

    Attributes:
        kind: ExecuTorch's name of the kind, for example ``Int``.
    """

    name: str
    kind: str

    def __str__(self) -> str:
        return self.kind


Value = TensorInfo | OtherValue


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a method.

    Attributes:
        quantization_methods: names of the constant methods that publish their quantization parameters.
        mutated_inputs: how many of the outputs are new values of mutated inputs. They come before the model's outputs.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    quantization_methods: frozenset[str]
    mutated_inputs: int = 0


def read_signature(program: PteProgram, method: str) -> Signature:
    """Read the signature of a method. Without stored names, values are named ``input0``, ``output0`` and so on.

    Raises:
        KeyError: there is no such method.
    """
    description = program.methods[method]
    names = _read_names(program, method)
    published: set[str] = set()

    def values(side: str, descriptions: tuple[PteTensor | str, ...]) -> tuple[Value, ...]:
        known = names.get(f"{side}s")
        if not isinstance(known, list) or len(known) != len(descriptions) or not all(isinstance(n, str) for n in known):
            known = [f"{side}{index}" for index in range(len(descriptions))]
        result: list[Value] = []
        for index, (name, value) in enumerate(zip(known, descriptions, strict=True)):
            if isinstance(value, str):
                result.append(OtherValue(name, value))
                continue
            methods = {key: f"{method}_{side}{index}_{key}" for key in _QUANTIZATION_SUFFIXES}
            scale = _constant(program, methods["scale"])
            zero_point = _constant(program, methods["zp"])
            if isinstance(scale, float) and type(zero_point) is int:
                published.update(name for name in methods.values() if name in program.methods)
                result.append(TensorInfo(name, value.dtype, value.shape, scale, zero_point))
            else:
                result.append(TensorInfo(name, value.dtype, value.shape))
        return tuple(result)

    inputs, outputs = values("input", description.inputs), values("output", description.outputs)
    mutated = names.get("mutated_inputs", 0)
    known = type(mutated) is int and 0 <= mutated <= len(outputs)
    return Signature(inputs, outputs, frozenset(published), mutated if known else 0)


def _constant(program: PteProgram, method: str) -> object:
    """Result of a constant method; None if there is no such method, or if it has several results."""
    description = program.methods.get(method)
    return (
        description.constants[0]
        if description is not None and description.constants and len(description.constants) == 1
        else None
    )


def encode_metadata(
    methods: Mapping[str, tuple[Sequence[TensorInfo], Sequence[TensorInfo]]],
    mutated_inputs: Mapping[str, int],
    tosa_of: str | None = None,
    sized: Mapping[str, Any] | None = None,
) -> bytes:
    """Encode the metadata: names of inputs and outputs by method.

    Args:
        methods: inputs and outputs by method.
        mutated_inputs: see ``Signature``, by method; methods without any may be missing.
        tosa_of: for a reference program, the SHA-256 of the program that it belongs to, in hexadecimal.
        sized: see ``arm_recipes.samples.sizes.Sized.told``, by the name of the method.
    """
    sides: dict[str, dict[str, Any]] = {
        method: {"inputs": [tensor.name for tensor in inputs], "outputs": [tensor.name for tensor in outputs]}
        for method, (inputs, outputs) in methods.items()
    }
    for method, count in mutated_inputs.items():
        if count:
            sides[method]["mutated_inputs"] = count
    others = {"tosa_of": tosa_of, "sized": sized}
    optional = {key: value for key, value in others.items() if value}
    return json.dumps({"crc32": _CHECKSUM_PLACEHOLDER, "methods": sides} | optional).encode()


def insert_checksum(pieces: Sequence[bytes]) -> list[bytes | memoryview]:
    """Replace the checksum placeholder in the metadata by the CRC-32 of the program.

    Args:
        pieces: the program in consecutive pieces; one of them holds the metadata.

    Returns:
        The program in pieces, without a copy, so that large weights are in memory only once.
    """
    unsealed, checksum = _CHECKSUM_PREFIX + _CHECKSUM_PLACEHOLDER.encode(), 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    parts: list[bytes | memoryview] = [*pieces]
    last = next((i for i, piece in reversed([*enumerate(pieces)]) if unsealed in piece), None)
    if last is not None:
        at, view = pieces[last].rindex(unsealed) + len(_CHECKSUM_PREFIX), memoryview(pieces[last])
        parts[last : last + 1] = [view[:at], f"{checksum:08x}".encode(), view[at + len(_CHECKSUM_PLACEHOLDER) :]]
    return parts


def verify_checksum(data: bytes, program: PteProgram) -> None:
    """Verify the checksum of a program. A damaged program could crash the runtime or return wrong results.

    Raises:
        ProgramError: the checksum differs or cannot be read.
    """
    # Search the file for the metadata: the tables that locate it may be damaged themselves.
    match = _CHECKSUM_PATTERN.match(data, max(data.rfind(_CHECKSUM_PREFIX), 0))
    if match is None:
        if NAMES_KEY in program.named_data:
            raise ProgramError("damaged: its checksum is unreadable; export or copy the program again")
        return
    first, last = match.span(1)
    seen = zlib.crc32(data[:first] + _CHECKSUM_PLACEHOLDER.encode() + data[last:])
    if match[1] not in (_CHECKSUM_PLACEHOLDER.encode(), f"{seen:08x}".encode()):
        raise ProgramError("damaged: its CRC-32 is not the one recorded at export; export or copy the program again")


def _read_names(program: PteProgram, method: str) -> dict[str, Any]:
    """Names of the inputs and outputs of one method; empty if there are none, or if the metadata is malformed."""
    methods = _read_metadata(program).get("methods")
    names = methods.get(method) if isinstance(methods, dict) else None
    return names if isinstance(names, dict) else {}


def read_reference_digest(program: PteProgram) -> str | None:
    """SHA-256 of the program that a reference program belongs to, in hexadecimal; None for other programs."""
    digest = _read_metadata(program).get("tosa_of")
    return digest if isinstance(digest, str) else None


def read_sized_methods(program: PteProgram) -> dict[str, StoredShapeVariants]:
    """Methods that were exported in several sizes, by name; empty if the metadata is malformed."""
    try:
        methods = {
            name: StoredShapeVariants.from_dict(name, stored)
            for name, stored in dict(_read_metadata(program).get("sized") or {}).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}
    return {name: sized for name, sized in methods.items() if set(sized.methods) <= set(program.methods)}


def _read_metadata(program: PteProgram) -> dict[str, Any]:
    """The metadata; empty if there is none, or if it is not a JSON object."""
    try:
        stored = json.loads(bytes(program.named_data.get(NAMES_KEY, b"")))
    except (ValueError, RecursionError):
        return {}
    return stored if isinstance(stored, dict) else {}
