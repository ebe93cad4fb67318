"""Compilation log: the context object of an export. Reports are written from it.

``record()`` opens a log for a ``with`` block; ``current()`` returns the innermost open one, in whatever function of the
block it is called. Both use a context variable, so that logs of several threads are apart. Everything else that a
function needs is an argument.

Opened by: an export. Loop rolling, and an export that may have to try again without alternatives, open an inner log for
an attempt and copy it to the outer one if the attempt succeeds. Sweeps and comparisons open one for each lowering that
is no part of an export.

Written by: ``delegate`` (delegates, rejected operators), and functions with a decision that the user must know about
(notes): quantization, intervals of int64, alternatives, Vela's optimization goal, training.

Read by: whoever opened it, after the block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from executorch.exir.lowered_backend_module import LoweredBackendModule

    from arm_backend_core.backends.payload import VelaEstimates
    from arm_backend_core.tosa.graph import Origin


@dataclass(frozen=True)
class Rejection:
    """An operator that stays on the CPU, and why; ``fault``: caused by a bug of this compiler."""

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
class Delegate:
    """A delegate: a part of the program that the target runs.

    Attributes:
        operators: ATen operator of every delegated node, in program order.
        tosa_operators: TOSA operator of every node of the flatbuffer, in order.
        origins: for each TOSA operator, its origins (at least one), with the work that it does for each.
        handles: for each TOSA operator, ExecuTorch's debug handles of the ATen operators that it implements.
        tosa: the flatbuffer that was compiled (TOSA 1.0).
        payload_bytes: size of the payload in the ``.pte``.
        checksum: checksum of the payload, as in its compile spec.
        vela: Vela's estimates for one inference, for Ethos-U targets.
        calls: number of calls in one inference.
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


_RECORD = "arm_delegate"  #: Key in the metadata of a lowered module.


def set_delegate_record(module: LoweredBackendModule, record: Delegate) -> None:
    """Attach the record of a delegate to its lowered module; it replaces the previous record."""
    module.meta = {**(module.meta or {}), _RECORD: record}


def delegate_record(module: LoweredBackendModule) -> Delegate | None:
    """The record of a delegate; None for a delegate of another backend."""
    return cast("Delegate | None", (module.meta or {}).get(_RECORD))


@dataclass
class Log:
    """The events of the compilations while a log is open.

    Attributes:
        delegates: records of the delegates, in the order of their compilation.
        rejected: operators that stay on the CPU.
        notes: sentences for the user.
    """

    delegates: list[Delegate] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_notes_once(self, notes: Iterable[str]) -> None:
        """Add the notes that the log does not have yet."""
        self.notes += [note for note in dict.fromkeys(notes) if note not in self.notes]


_log: ContextVar[Log | None] = ContextVar("arm_backend_core_log", default=None)


def current() -> Log:
    """The innermost open log; a new log that is discarded if none is open."""
    return _log.get() or Log()


@contextmanager
def record() -> Iterator[Log]:
    """Collect the events of every compilation inside the ``with`` block."""
    log = Log()
    token = _log.set(log)
    try:
        yield log
    finally:
        _log.reset(token)
