"""Backend dispatch: compile a TOSA flatbuffer with the backend of a compile spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from arm_backend_core.backends.artifacts import Locate
from arm_backend_core.backends.payload import Payload
from arm_backend_core.targets.compile_spec import ArmCompileSpec, EthosUCompileSpec, TosaCompileSpec, VgfCompileSpec


def compile_payload(
    spec: ArmCompileSpec,
    flatbuffer: bytes,
    *,
    delegate: str,
    locate: Locate,
    unused_inputs: Mapping[int, tuple[int, int]] = MappingProxyType({}),
    inputs: Sequence[int] | None = None,
    results: Sequence[int] | None = None,
) -> Payload:
    """Compile a TOSA 1.0 flatbuffer for ``spec``'s backend; for the TOSA target, the flatbuffer is the payload.

    Args:
        flatbuffer: the TOSA graph.
        spec: the target and compiler options.
        delegate: name of the delegate in the program, for errors and files.
        locate: maps a compiler's message to the ATen operator and source line.
        unused_inputs: {index of an input that no operator reads: (number of elements, bytes per element)}.
        inputs: expected size of each input in bytes; None is not checked.
        results: expected size of each result in bytes; None is not checked.

    Raises:
        CompileError: the compiler refused the flatbuffer or crashed on it.
    """
    if isinstance(spec, EthosUCompileSpec):
        from arm_backend_core.backends.ethosu import compile_ethosu

        return compile_ethosu(
            flatbuffer,
            spec,
            delegate=delegate,
            locate=locate,
            unused_inputs=unused_inputs,
            inputs=inputs,
            results=results,
        )
    if isinstance(spec, VgfCompileSpec):
        from arm_backend_core.backends.vgf import compile_vgf

        return compile_vgf(flatbuffer, spec, delegate=delegate, locate=locate)
    assert isinstance(spec, TosaCompileSpec), spec
    return Payload(flatbuffer)
