"""The one door to the compilers behind TOSA."""

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
    unread: Mapping[int, tuple[int, int]] = MappingProxyType({}),
    inputs: Sequence[int] | None = None,
    results: Sequence[int] | None = None,
) -> Payload:
    """Compile a TOSA 1.0 flatbuffer as ``spec`` says; for the TOSA target it is the payload itself.

    Args:
        delegate: its name in the program, for errors and files.
        locate: finds the ATen operator and source line that a compiler's message is about.
        unread: elements, and bytes of each, of the inputs that no operator reads, by their number.
        inputs: bytes of each input. The compiled program's inputs must have these sizes; None is not checked.
        results: bytes of each result, checked in the same way.

    Raises:
        CompileError: the compiler refused the flatbuffer or died on it.
    """
    if isinstance(spec, EthosUCompileSpec):
        from arm_backend_core.backends.ethosu import compile_ethosu

        return compile_ethosu(
            flatbuffer, spec, delegate=delegate, locate=locate, unread=unread, inputs=inputs, results=results
        )
    if isinstance(spec, VgfCompileSpec):
        from arm_backend_core.backends.vgf import compile_vgf

        return compile_vgf(flatbuffer, spec, delegate=delegate, locate=locate)
    assert isinstance(spec, TosaCompileSpec), spec
    return Payload(flatbuffer)
