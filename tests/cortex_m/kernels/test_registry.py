"""Registration of kernel records."""

from __future__ import annotations

import numpy as np
import pytest

from arm_backend_core.cortex_m.catalog import find_kernel
from arm_backend_core.cortex_m.kernels import registry
from arm_backend_core.targets.cortex_m import Isa


def test_a_name_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.KERNELS, "negate", find_kernel("quantized_linear"))
    with pytest.raises(ValueError, match="'negate' is registered already"):
        registry.kernel("negate", "Tensor input")(np.negative)


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "KERNELS", {})
    registry.kernel("negate", "Tensor input")(np.negative)
    record = registry.KERNELS["negate"]
    assert record.result_shape((2, 3)) == (2, 3)
    assert record.scratch_bytes(Isa.MVE, (2, 3)) == ()
    assert record.find_limitation(Isa.MVE, (2, 3)) is None
