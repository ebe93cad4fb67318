"""Compilation log: delegates created and operators rejected. Reports are written from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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


@dataclass
class Log:
    """Collected while ``record()`` is open; ``notes`` are sentences for the user."""

    delegates: list[Delegate] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


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
