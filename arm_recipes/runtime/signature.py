"""What the methods of a program take and return, with the names and the quantization that ``export`` stored."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arm_recipes.runtime.pte import ProgramError, PteProgram, PteTensor
from arm_recipes.runtime.shape_variants import SizedMethod
from arm_recipes.runtime.tensor_info import TensorInfo

#: Key of the named data in which ``export`` keeps the names, as JSON. The runtime reads named data when it is asked.
NAMES_KEY = "arm_recipes"
#: How what is stored begins; the checksum of the whole file follows, taken with eight zeros in its own place.
_SEAL, _UNSEALED = b'{"crc32": "', "00000000"
_SEALED = re.compile(re.escape(_SEAL) + rb'([0-9a-f]{8})", "methods": ')
#: What ``stages.edge_manager`` publishes about a quantized input or output, each by a constant method.
_PUBLISHED = ("scale", "zp", "quant_min", "quant_max", "dtype")


@dataclass(frozen=True)
class OtherValue:
    """An input or output that is no tensor.

    Attributes:
        kind: by ExecuTorch's name, for example ``Int``.
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
        published: the constant methods that tell the quantization of both.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    published: frozenset[str]


def signature(program: PteProgram, method: str) -> Signature:
    """Inputs and outputs of a method. Without stored names they are ``input0``, ``output0`` and so on.

    Raises:
        KeyError: there is no such method.
    """
    found = program.methods[method]
    names = _stored_names(program, method)
    published: set[str] = set()

    def values(side: str, given: tuple[PteTensor | str, ...]) -> tuple[Value, ...]:
        known = names.get(f"{side}s")
        if not isinstance(known, list) or len(known) != len(given) or not all(isinstance(n, str) for n in known):
            known = [f"{side}{index}" for index in range(len(given))]
        result: list[Value] = []
        for index, (name, value) in enumerate(zip(known, given, strict=True)):
            if isinstance(value, str):
                result.append(OtherValue(name, value))
                continue
            methods = {key: f"{method}_{side}{index}_{key}" for key in _PUBLISHED}
            scale = _constant(program, methods["scale"])
            zero_point = _constant(program, methods["zp"])
            if isinstance(scale, float) and type(zero_point) is int:
                published.update(name for name in methods.values() if name in program.methods)
                result.append(TensorInfo(name, value.dtype, value.shape, scale, zero_point))
            else:
                result.append(TensorInfo(name, value.dtype, value.shape))
        return tuple(result)

    return Signature(values("input", found.inputs), values("output", found.outputs), frozenset(published))


def _constant(program: PteProgram, method: str) -> object:
    """What a constant method returns; None if there is no such method, or if it returns several values."""
    found = program.methods.get(method)
    return found.constants[0] if found is not None and found.constants and len(found.constants) == 1 else None


def stored_names(
    methods: Mapping[str, tuple[Sequence[TensorInfo], Sequence[TensorInfo]]],
    tosa_of: str | None = None,
    sized: Mapping[str, Any] | None = None,
) -> bytes:
    """What is stored: names of inputs and outputs by method; for a reference program, the SHA-256 of its original.

    Args:
        sized: see ``arm_recipes.samples.sizes.SizedMethod.to_dict``, by the name of the method.
    """
    sides = {
        method: {"inputs": [tensor.name for tensor in inputs], "outputs": [tensor.name for tensor in outputs]}
        for method, (inputs, outputs) in methods.items()
    }
    others = {"tosa_of": tosa_of, "sized": sized}
    told = {key: value for key, value in others.items() if value}
    return json.dumps({"crc32": _UNSEALED, "methods": sides} | told).encode()


def sealed(pieces: Sequence[bytes]) -> list[bytes | memoryview]:
    """The program that ``pieces`` make up, with its checksum in what is stored, which lies in one of them.

    In pieces too: a program with large weights need not be in memory twice to be written.
    """
    unsealed, checksum = _SEAL + _UNSEALED.encode(), 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    parts: list[bytes | memoryview] = [*pieces]
    last = next((i for i, piece in reversed([*enumerate(pieces)]) if unsealed in piece), None)
    if last is not None:
        at, view = pieces[last].rindex(unsealed) + len(_SEAL), memoryview(pieces[last])
        parts[last : last + 1] = [view[:at], f"{checksum:08x}".encode(), view[at + len(_UNSEALED) :]]
    return parts


def check_seal(data: bytes, program: PteProgram) -> None:
    """Compare a program with its checksum. A damaged one could crash the runtime, or give other numbers.

    Raises:
        ProgramError: they differ.
    """
    # Sought in the file, not where its tables say: those may be what is damaged.
    seal = _SEALED.match(data, max(data.rfind(_SEAL), 0))
    if seal is None:
        if NAMES_KEY in program.named_data:
            raise ProgramError("damaged: its checksum cannot be read; export or copy the program again")
        return
    first, last = seal.span(1)
    seen = zlib.crc32(data[:first] + _UNSEALED.encode() + data[last:])
    if seal[1] not in (_UNSEALED.encode(), f"{seen:08x}".encode()):
        raise ProgramError("damaged: its CRC-32 is not the one recorded at export; export or copy the program again")


def _stored_names(program: PteProgram, method: str) -> dict[str, Any]:
    """The names of one method; empty if none are stored, or something else under their key."""
    methods = _stored(program).get("methods")
    names = methods.get(method) if isinstance(methods, dict) else None
    return names if isinstance(names, dict) else {}


def reference_of(program: PteProgram) -> str | None:
    """SHA-256 of the program that this is the reference program of, in hexadecimal; None if it is none."""
    digest = _stored(program).get("tosa_of")
    return digest if isinstance(digest, str) else None


def sized_methods(program: PteProgram) -> dict[str, SizedMethod]:
    """Methods that were exported in several sizes, by name; none if what is stored of them is something else."""
    try:
        found = {name: SizedMethod.of(name, told) for name, told in dict(_stored(program).get("sized") or {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}
    return {name: sized for name, sized in found.items() if set(sized.methods) <= set(program.methods)}


def _stored(program: PteProgram) -> dict[str, Any]:
    """What ``export`` stored; empty if it stored nothing, or something else is under its key."""
    try:
        stored = json.loads(bytes(program.named_data.get(NAMES_KEY, b"")))
    except (ValueError, RecursionError):
        return {}
    return stored if isinstance(stored, dict) else {}
