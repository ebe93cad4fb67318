"""Calibration coverage: find tensors with too few values, or only one distinct value, in the calibration samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from arm_backend_core.quantization.observer import RangeObserver, WeightObserver

#: A range is estimated reliably from at least this number of values, over all samples.
_MIN_VALUES = 16
#: Maximum number of tensors that a note names.
_MAX_NAMED = 3


def find_coverage_problems(observers: Iterable[Any]) -> list[str]:
    """Return a note for the user for each kind of problem. It names up to ``_MAX_NAMED`` tensors with this problem."""
    notes = []
    kinds: dict[str, list[str]] = {}
    for observer in dict.fromkeys(observers):
        if (
            isinstance(observer, RangeObserver)
            and not isinstance(observer, WeightObserver)
            and not observer.is_constant
        ):
            kind, value = _describe_problem(observer)
            if kind:
                kinds.setdefault(kind, []).append(f"{observer.description}{value}")
    for kind, tensors in kinds.items():
        omitted = f" and {len(tensors) - _MAX_NAMED} more" if len(tensors) > _MAX_NAMED else ""
        notes.append(f"calibration: {', '.join(tensors[:_MAX_NAMED])}{omitted} {kind}")
    return notes


def _describe_problem(observer: RangeObserver) -> tuple[str, str]:
    """Describe the problem of a tensor; "" if it has none.

    Returns:
        The problem, and a suffix for the tensor's name. If the tensor had only one value, the suffix is this value,
        for example " (0.5)"; else it is "".
    """
    if not observer.count:
        return "had no value in any sample: the program represents only values near 0", ""
    low, high = observer.extremes
    if low == high:
        return (
            "had only one value in all samples: its range follows from this value alone; calibrate with samples in "
            "which it varies, if it does",
            f" ({low:g})",
        )
    if observer.count < _MIN_VALUES:
        return (
            f"had fewer than {_MIN_VALUES} values in all samples: its range is a guess; calibrate with more samples",
            "",
        )
    return "", ""
