"""Delegates on this machine: Arm's TOSA reference model, the NPU emulator or Vulkan executes the payloads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from arm_recipes.runtime.errors import PayloadError, RuntimeUnavailable
from arm_recipes.runtime.ethosu_blocks import NamedDataLookup
from arm_recipes.runtime.payload_parts import join_parts

if TYPE_CHECKING:
    import numpy as np

    from arm_recipes.runtime.ethosu_payload import EthosUTensor
    from arm_recipes.runtime.tensor_info import TensorInfo

    Array = np.ndarray[Any, Any]

_SANDBOX_TIMEOUT_SECONDS = 600.0
#: Exit code of the sandbox process if this machine lacks a dependency. A damaged payload has another exit code.
SANDBOX_UNAVAILABLE_EXIT_CODE = 3


class LoadedDelegate(Protocol):
    """A loaded payload, ready to run."""

    @property
    def inputs(self) -> Sequence[TensorInfo | EthosUTensor]:
        """Inputs of ``run``. Shapes are in memory order. An ``EthosUTensor`` has an element size, but no dtype."""

    @property
    def outputs(self) -> Sequence[TensorInfo | EthosUTensor]:
        """Outputs of ``run``, described like ``inputs``."""

    def run(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """Execute once. ``arrays`` match ``inputs``, are C-contiguous, and are not modified.

        The array of an ``EthosUTensor`` has the dtype uint8.
        """

    def close(self) -> None:
        """Release all resources."""


class TosaDelegate:
    """A TOSA flatbuffer that Arm's reference model executes.

    Raises:
        PayloadError: the payload is not a TOSA flatbuffer, or is damaged.
    """

    def __init__(self, payload: bytes) -> None:
        from arm_recipes.runtime.tosa_flatbuffer import read_tosa_payload

        self._payload = payload
        graph = read_tosa_payload(memoryview(payload))
        self.inputs, self.outputs = graph.inputs, graph.outputs

    def run(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """See ``LoadedDelegate``."""
        from arm_backend_core.tosa import reference_model

        return reference_model.run(self._payload, arrays)

    def run_intermediates(self, arrays: Sequence[Array], names: Sequence[str]) -> Sequence[Array]:
        """Execute once, and return the values of the intermediate tensors ``names``."""
        from arm_backend_core.tosa import reference_model
        from arm_recipes.runtime.tosa_flatbuffer import replace_outputs

        return reference_model.run(replace_outputs(self._payload, names), arrays)

    def close(self) -> None:
        """See ``LoadedDelegate``."""


def _create_tosa_delegate(
    payload: bytes, compile_specs: Mapping[str, bytes], find_named_data: NamedDataLookup
) -> LoadedDelegate:
    return TosaDelegate(bytes(join_parts(payload, find_named_data)))


def _create_vgf_delegate(
    payload: bytes, compile_specs: Mapping[str, bytes], find_named_data: NamedDataLookup
) -> LoadedDelegate:
    from arm_recipes.runtime.vgf import VgfDelegate

    return VgfDelegate(payload)


def _create_ethosu_delegate(
    payload: bytes, compile_specs: Mapping[str, bytes], find_named_data: NamedDataLookup
) -> LoadedDelegate:
    from arm_recipes.runtime.ethosu import EthosUDelegate

    return EthosUDelegate(payload, compile_specs, find_named_data)


#: {backend id: function that creates a delegate}. The arguments of the function are a payload, the compile specs of the
#: payload, and a function that looks up named data.
DELEGATE_FACTORIES: Mapping[str, Callable[[bytes, Mapping[str, bytes], NamedDataLookup], LoadedDelegate]] = {
    "TOSABackend": _create_tosa_delegate,
    "VgfBackend": _create_vgf_delegate,
    "EthosUBackend": _create_ethosu_delegate,
}
#: Backends in which a damaged payload can crash this process. The other backends are safe: the reference model runs in
#: its own process, and the emulator of Ethos-U checks every access.
_SANDBOXED_BACKENDS = frozenset({"VgfBackend"})


def create_delegate(
    backend: str, payload: bytes, compile_specs: Mapping[str, bytes], find_named_data: NamedDataLookup = lambda _: None
) -> LoadedDelegate:
    """Create the delegate of a payload. ``find_named_data`` looks up named data of the program by key.

    If the compile specs have a checksum of the payload, the checksum is verified. Without a checksum, a VGF payload
    first runs in a sandbox process, because a damaged one can crash the Vulkan driver and this process.

    Raises:
        PayloadError: the payload is damaged.
        RuntimeUnavailable: this machine lacks a dependency of the backend.
    """
    from arm_backend_core.backends.payload import CHECKSUM_KEY, checksum_spec

    recorded = compile_specs.get(CHECKSUM_KEY)
    if recorded is None:
        if backend in _SANDBOXED_BACKENDS:
            _run_in_sandbox(backend, payload)
    elif checksum_spec(payload).value != recorded:
        raise PayloadError(
            f"a payload of {backend} ({len(payload):,} bytes) is damaged: its CRC-32 is not the one that was "
            "recorded when it was exported. Export or copy the program again."
        )
    return DELEGATE_FACTORIES[backend](payload, compile_specs, find_named_data)


def _run_in_sandbox(backend: str, payload: bytes) -> None:
    """Run a payload once in a separate process, with zeros as inputs.

    Raises:
        PayloadError: the run failed.
        RuntimeUnavailable: this machine lacks a dependency of the backend.
    """
    from arm_backend_core.workers.worker import child_environment, describe_exit

    try:
        completed = subprocess.run(
            [sys.executable, "-P", str(Path(__file__).with_name("sandbox.py")), backend],
            input=payload,
            env=child_environment(),
            capture_output=True,
            timeout=_SANDBOX_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PayloadError(
            f"a payload of {backend} did not finish a trial run in {_SANDBOX_TIMEOUT_SECONDS:.0f} s"
        ) from None
    if completed.returncode != 0:
        lines = completed.stderr.decode(errors="replace").strip().splitlines()
        reason = (
            lines[-1] if completed.returncode > 0 and lines else f"a trial run {describe_exit(completed.returncode)}"
        )
        if completed.returncode == SANDBOX_UNAVAILABLE_EXIT_CODE:
            raise RuntimeUnavailable(reason)
        raise PayloadError(f"a payload of {backend} ({len(payload):,} bytes) cannot be run: {reason}")
