"""Compilation log: collects delegates, refused operators and notes during an export, for its reports.

``open_log()`` opens a log for a ``with`` block. ``current_log()`` returns the innermost open log, in every function
that the block calls. A context variable, the only one of the compiler core, holds the log, so threads have separate
logs.

An export opens a log. Outside of an export, a lowering for a sweep or a comparison opens a log. An attempt that may
fail (loop rolling, an export that may be repeated without alternatives) opens an inner log. If the attempt succeeds, it
adds its delegates, refused operators and notes to the outer log.

These modules write to the log: ``delegate`` (delegates, refused operators), loop rolling (delegates that a loop calls),
and ``TrackedHardware`` (attributes of the target that quantization read). Functions add notes about decisions that the
user must know: quantization, intervals of int64, alternatives, Vela's optimization goal, training. The function that
opened a log reads it after the block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from executorch.exir.lowered_backend_module import LoweredBackendModule

    from arm_backend_core.backends.vela_estimates import VelaEstimates
    from arm_backend_core.tosa.graph import Origin


@dataclass(frozen=True)
class RefusedOperator:
    """An operator that stays on the CPU, and why. ``fault`` is True if the reason is a bug of this compiler."""

    node: str
    operator: str
    reason: str
    source: str
    fault: bool = False


@dataclass(frozen=True)
class BoundaryTensor:
    """An input or output of a delegate; ``scale``/``zero_point`` are None when it is not quantized."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    scale: float | None = None
    zero_point: int | None = None


@dataclass(frozen=True)
class DelegateRecord:
    """A delegate: a part of the program that the target runs.

    Attributes:
        operators: ATen operator of every delegated node, in program order.
        tosa_operators: TOSA operator of every node of the flatbuffer, in order.
        origins: for each TOSA operator, the ATen operators that it implements (at least one), each with its share of
            the work (``Op.work``).
        handles: for each TOSA operator, ExecuTorch's debug handles of the ATen operators that it implements.
        tosa: the flatbuffer that was compiled (TOSA 1.0, or the 1.1 draft if an operator needs it).
        payload_bytes: size of the payload in the ``.pte``.
        checksum: checksum of the payload, as in its compile spec.
        vela: Vela's estimates for one inference, for Ethos-U targets.
        calls: number of calls in one inference.
        external_blocks: {key: size in bytes} of the delegate's blocks in the data file (``.ptd``). Delegates may
            share a block.
        may_share_scratch: whether the memory plan may put the scratch of an Ethos-U delegate into planned memory.
    """

    name: str
    backend: str
    operators: tuple[str, ...]
    tosa_operators: tuple[str, ...]
    tosa: bytes = field(repr=False)
    payload_bytes: int
    checksum: bytes
    vela: VelaEstimates | None
    inputs: tuple[BoundaryTensor, ...]
    outputs: tuple[BoundaryTensor, ...]
    origins: tuple[tuple[tuple[Origin, int], ...], ...] = field(default=(), repr=False)
    handles: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    calls: int = 1
    external_blocks: dict[str, int] = field(default_factory=dict)
    may_share_scratch: bool = False


_RECORD_KEY = "arm_delegate"  #: Key in the metadata of a lowered module.


def set_delegate_record(module: LoweredBackendModule, record: DelegateRecord) -> None:
    """Attach the record of a delegate to its lowered module; it replaces the previous record."""
    module.meta = {**(module.meta or {}), _RECORD_KEY: record}


def delegate_record(module: LoweredBackendModule) -> DelegateRecord | None:
    """The record of a delegate; None for a delegate of another backend."""
    return cast("DelegateRecord | None", (module.meta or {}).get(_RECORD_KEY))


@dataclass
class Log:
    """The entries of the compilations that ran while the log was open.

    Attributes:
        delegates: records of the delegates, in the order of their compilation.
        refused_operators: operators that stay on the CPU.
        notes: sentences for the user.
        hardware_dependencies: {name: value} of the attributes of ``Hardware`` that quantization read.
    """

    delegates: list[DelegateRecord] = field(default_factory=list)
    refused_operators: list[RefusedOperator] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    hardware_dependencies: dict[str, Any] = field(default_factory=dict)

    def add_notes_once(self, notes: Iterable[str]) -> None:
        """Add the notes that the log does not have yet."""
        self.notes += [note for note in dict.fromkeys(notes) if note not in self.notes]


_log: ContextVar[Log | None] = ContextVar("arm_backend_core_log", default=None)


def current_log() -> Log:
    """The innermost open log. If no log is open, a new one, which nobody reads."""
    return _log.get() or Log()


@contextmanager
def open_log() -> Iterator[Log]:
    """Collect the entries of every compilation inside the ``with`` block."""
    log = Log()
    token = _log.set(log)
    try:
        yield log
    finally:
        _log.reset(token)
