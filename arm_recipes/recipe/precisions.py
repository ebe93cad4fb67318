"""Names of what a part of a model can be quantized to, and of which parts. Nothing here imports PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arm_backend_core.quantization.config import QuantizationConfig
    from arm_backend_core.quantization.quantizer import ArmQuantizer

_QUANTIZED = ("A16W8", "INT8", "A8W4")
_PER_TENSOR = "_PER_TENSOR"
#: Left in floating point, between integers.
FLOAT = "FP"
#: From the most exact to the least.
NAMES = (FLOAT, *(name + end for name in _QUANTIZED for end in ("", _PER_TENSOR)))


def allowed(recipe: str) -> tuple[str, ...]:
    """What parts of a model can be with a recipe: floating point where the target has it beside integers."""
    return NAMES if recipe.startswith("VGF") else NAMES[1:]


def find_problem(value: Any) -> str | None:
    """What is wrong with precisions by module; see ``options.Option``."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return "not a dict"
    for module, name in value.items():
        if not isinstance(module, str):
            return f"{module!r} is no name of a module"
        if name not in NAMES:
            near = get_close_matches(str(name).upper(), NAMES, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            return f"there is no precision {name!r}{hint} (allowed: {', '.join(NAMES)})"
    return None


def check(recipe: str, names: Iterable[str]) -> None:
    """Find precisions that the recipe's target does not have.

    Raises:
        ValueError: there is one.
    """
    for name in names:
        if name not in allowed(recipe):
            raise ValueError(
                f"{recipe}: precisions: {name!r} is for VGF recipes: the others' targets compute with integers alone "
                f"(allowed: {', '.join(allowed(recipe))})"
            )


def quantization_config(name: str, observer: Any) -> QuantizationConfig | None:
    """What the quantizer takes; None for floating point.

    Args:
        observer: class that finds the ranges of int8 tensors.
    """
    from arm_backend_core import quantization

    kind, per_channel = name.removesuffix(_PER_TENSOR), not name.endswith(_PER_TENSOR)
    if kind == FLOAT:
        return None
    if kind == "A16W8":
        return quantization.get_symmetric_a16w8_quantization_config(per_channel)
    narrow = kind == "A8W4"
    make = (
        quantization.get_symmetric_a8w4_quantization_config
        if narrow
        else quantization.get_symmetric_quantization_config
    )
    return make(per_channel, observer=observer)


def default_precision(recipe: str, *, per_channel: bool) -> str:
    """The precision that a quantizing recipe gives where nothing else is said."""
    return recipe.rsplit("_", 1)[1] + ("" if per_channel else _PER_TENSOR)


def configure_quantizer(quantizer: ArmQuantizer, everywhere: str, precisions: Mapping[str, str], observer: Any) -> None:
    """Tell a quantizer; the precision of the module "" takes the place of ``everywhere``; ``observer`` see above."""
    quantizer.set_global(quantization_config(precisions.get("", everywhere), observer))
    for module, name in precisions.items():
        if module:
            quantizer.set_module_name(module, quantization_config(name, observer))
