"""PT2E quantization: operator records decide which tensors are quantized, and with which parameters."""

from arm_backend_core.quantization.config import (
    QuantizationConfig,
    get_symmetric_a8w4_quantization_config,
    get_symmetric_a16w8_quantization_config,
    get_symmetric_quantization_config,
)
from arm_backend_core.quantization.quantizer import EthosUQuantizer, TOSAQuantizer, VgfQuantizer

__all__ = [
    "EthosUQuantizer",
    "QuantizationConfig",
    "TOSAQuantizer",
    "VgfQuantizer",
    "get_symmetric_a8w4_quantization_config",
    "get_symmetric_a16w8_quantization_config",
    "get_symmetric_quantization_config",
]
