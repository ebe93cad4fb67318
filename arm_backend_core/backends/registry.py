"""Backend registry: finds the compiler of TOSA flatbuffers by the class of the compile spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arm_backend_core.backends.artifacts import FindOperator
from arm_backend_core.backends.ethosu import compile_ethosu
from arm_backend_core.backends.payload import Payload
from arm_backend_core.backends.vgf import compile_vgf
from arm_backend_core.targets.compile_spec import ArmCompileSpec, EthosUCompileSpec, TosaCompileSpec, VgfCompileSpec
from arm_backend_core.tosa.graph import Graph


@dataclass(frozen=True)
class CompileRequest:
    """A delegate to compile.

    Attributes:
        flatbuffer: the TOSA flatbuffer, of version 1.0, or of the 1.1 draft if an operator needs it.
        delegate: name of the delegate in the program, for errors and files.
        find_operator: finds the ATen operator and source line that a compiler's message is about.
        graph: the TOSA graph that the flatbuffer was written from; None if only the flatbuffer is known.
        unused_inputs: {index of an input that no operator reads: (elements, bytes per element)}, for Ethos-U.
        input_bytes: expected bytes of each input of the compiled program, for Ethos-U. None: not checked.
        output_bytes: expected bytes of each output of the compiled program, for Ethos-U. None: not checked.
    """

    flatbuffer: bytes
    delegate: str
    find_operator: FindOperator
    graph: Graph | None = None
    unused_inputs: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    input_bytes: Sequence[int] | None = None
    output_bytes: Sequence[int] | None = None


#: Compiles a delegate; raises CompileError if the delegate cannot be compiled.
Compiler = Callable[[Any, CompileRequest], Payload]

_COMPILERS: dict[type[ArmCompileSpec], Compiler] = {}


def register_backend(spec_class: type[ArmCompileSpec], compiler: Compiler) -> None:
    """Register the compiler for ``spec_class`` and its subclasses.

    Raises:
        ValueError: the class has a compiler already.
    """
    if spec_class in _COMPILERS:
        raise ValueError(f"{spec_class.__name__} has a backend already")
    _COMPILERS[spec_class] = compiler


def compile_payload(
    spec: ArmCompileSpec, flatbuffer: bytes, *, delegate: str, find_operator: FindOperator, **details: Any
) -> Payload:
    """Compile a TOSA flatbuffer with the backend of ``spec``. ``CompileRequest`` describes the arguments.

    Raises:
        CompileError: the compiler refused the flatbuffer, crashed on it or timed out, or wrote a wrong program.
        ArmBackendError: there is no usable compiler (VGF).
        TypeError: no backend is registered for the class of ``spec``.
    """
    compiler = next((_COMPILERS[spec_class] for spec_class in type(spec).__mro__ if spec_class in _COMPILERS), None)
    if compiler is None:
        registered = ", ".join(spec_class.__name__ for spec_class in _COMPILERS)
        raise TypeError(
            f"compile spec: no backend for {type(spec).__name__}; call register_backend (known: {registered})"
        )
    return compiler(spec, CompileRequest(flatbuffer, delegate, find_operator, **details))


def _compile_ethosu(spec: EthosUCompileSpec, request: CompileRequest) -> Payload:
    return compile_ethosu(
        request.flatbuffer,
        spec,
        delegate=request.delegate,
        find_operator=request.find_operator,
        unused_inputs=request.unused_inputs,
        input_bytes=request.input_bytes,
        output_bytes=request.output_bytes,
    )


def _compile_vgf(spec: VgfCompileSpec, request: CompileRequest) -> Payload:
    return compile_vgf(request.flatbuffer, spec, delegate=request.delegate, find_operator=request.find_operator)


def _keep_flatbuffer(spec: TosaCompileSpec, request: CompileRequest) -> Payload:
    """For the TOSA target, the flatbuffer is the payload."""
    return Payload(request.flatbuffer)


register_backend(EthosUCompileSpec, _compile_ethosu)
register_backend(VgfCompileSpec, _compile_vgf)
register_backend(TosaCompileSpec, _keep_flatbuffer)
