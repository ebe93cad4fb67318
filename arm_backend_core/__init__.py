"""Compiler core: compiles PyTorch programs to TOSA, Ethos-U and VGF delegates, and to calls of Cortex-M kernels.

Exports are imported when they are first used, so importing this package is cheap.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULE_OF = {
    "ArmBackendError": "errors",
    "CompileError": "errors",
    "FullDelegationError": "errors",
    "Unsupported": "errors",
    "ArmCompileSpec": "targets.compile_spec",
    "EthosUCompileSpec": "targets.compile_spec",
    "TosaCompileSpec": "targets.compile_spec",
    "VgfCompileSpec": "targets.compile_spec",
    "EthosUPartitioner": "partitioner",
    "TOSAPartitioner": "partitioner",
    "VgfPartitioner": "partitioner",
    "EthosUQuantizer": "quantization",
    "QuantizationConfig": "quantization",
    "TOSAQuantizer": "quantization",
    "VgfQuantizer": "quantization",
    "get_symmetric_a8w4_quantization_config": "quantization",
    "get_symmetric_a16w8_quantization_config": "quantization",
    "get_symmetric_quantization_config": "quantization",
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
