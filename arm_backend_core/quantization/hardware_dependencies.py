"""Hardware dependencies: record the attributes of ``Hardware`` that quantization reads.

The quantized graph of most models is the same for all NPUs: it depends on the hardware only where a pass reads an
attribute of ``Hardware``. ``compilation_log.Log.hardware_dependencies`` holds these attributes. Another NPU with the
same values has the same quantized graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Self

from arm_backend_core import compilation_log
from arm_backend_core.targets.hardware import Hardware

_ATTRIBUTES = frozenset(item.name for item in fields(Hardware))


class TrackedHardware(Hardware):
    """A copy of a ``Hardware`` that records each attribute in the current compilation log when it is read."""

    @classmethod
    def of(cls, hardware: Hardware) -> Self:
        """Copy ``hardware``."""
        return cls(**{name: getattr(hardware, name) for name in _ATTRIBUTES})

    def __getattribute__(self, name: str) -> Any:
        """Return an attribute, and record it if it is a field of ``Hardware``."""
        value = super().__getattribute__(name)
        if name in _ATTRIBUTES:
            compilation_log.current_log().hardware_dependencies[name] = value
        return value


def find_changed_dependencies(dependencies: Mapping[str, Any], hardware: Hardware) -> dict[str, tuple[Any, Any]]:
    """Return the attributes whose value in ``hardware`` differs from the recorded value.

    The result has the form {"chains": (recorded value, value in ``hardware``)}.
    """
    pairs = {name: (value, getattr(hardware, name)) for name, value in dependencies.items()}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
