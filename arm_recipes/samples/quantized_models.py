"""Refuse models that PyTorch's quantization flows have changed and that cannot be captured; suggest a remedy."""

from __future__ import annotations

from typing import Any

import torch

#: Packages of the modules that eager, FX and dynamic quantization insert.
_QUANTIZED = ("torch.ao.nn.quantized.", "torch.ao.nn.intrinsic.quantized.", "torch.ao.nn.sparse.quantized.")
#: Python modules of the observers and fake quantizers that prepared models contain.
_OBSERVERS = (
    "torch.ao.quantization.observer",
    "torch.ao.quantization.fake_quantize",
    "torchao.quantization.pt2e.observer",
    "torchao.quantization.pt2e.fake_quantize",
)
#: Class that ``prepare_qat`` returns. It is not imported here, because few exports need it.
_PREPARED = "arm_recipes.qat.prepared.Prepared"
_PASS_FLOAT = (
    "pass the floating-point model with calibration samples, because the recipe quantizes it; scales are kept only in "
    "models of convert_pt2e (PT2E), which are exported as they are"
)
_PASS_PREPARED = (
    "pass the floating-point model with calibration samples; weights that were trained with fake quantization are kept "
    "by model.load_state_dict(prepared.state_dict(), strict=False); scales are kept only by convert_pt2e (PT2E)"
)


def reject_quantized_model(model: torch.nn.Module) -> None:
    """Refuse models of ``prepare_qat``, and of PyTorch's quantization flows: eager, FX and dynamic.

    Models that ``prepare_pt2e`` returns are refused too. Models that ``convert_pt2e`` returns can be captured.

    Raises:
        TypeError: the model is quantized or prepared; the message names the layer and says what to pass.
    """
    for name, module in model.named_modules():
        path = f"{type(module).__module__}.{type(module).__qualname__}"
        if path == _PREPARED:
            where = f"'{name}'" if name else "it"
            raise TypeError(
                f"model: {where} is a model of prepare_qat: call its method export(samples), which keeps the trained "
                "ranges"
            )
        if path.startswith(_QUANTIZED):
            raise TypeError(f"model: '{name}' is the quantized module {path}, which cannot be captured; {_PASS_FLOAT}")
        if path.startswith(_OBSERVERS):
            raise TypeError(f"model: '{name}' is the observer {path}: the model is prepared; {_PASS_PREPARED}")
        packed = next((item for item, value in vars(module).items() if _is_packed(value)), None)
        if packed is not None:
            where = f"{name}.{packed}".lstrip(".")
            raise TypeError(f"model: '{where}' holds packed quantized weights, which cannot be captured; {_PASS_FLOAT}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_quantized:
            raise TypeError(f"model: '{name}' is a quantized tensor, which cannot be captured; {_PASS_FLOAT}")


def _is_packed(value: Any) -> bool:
    """Whether an attribute is an object with packed weights. FX quantization adds such attributes to a graph module."""
    return isinstance(value, torch.ScriptObject) and "PackedParams" in str(value._type())
