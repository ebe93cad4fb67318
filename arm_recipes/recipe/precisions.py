"""Precisions of modules: the option ``precisions``. Importing this Python module does not import PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from arm_backend_core.similar_names import format_suggestion, suggest_name
from arm_recipes.recipe.profiles import has_fp_profile

if TYPE_CHECKING:
    from arm_backend_core.quantization.config import QuantizationConfig
    from arm_backend_core.quantization.quantizer import ArmQuantizer

_QUANTIZED_PRECISIONS = ("A16W8", "INT8", "A8W4")
_PER_TENSOR_SUFFIX = "_PER_TENSOR"
#: Precision of a module that stays in floating point, between quantized modules.
FLOAT = "FP"
#: All precisions, by decreasing number of bits. With equal bits, per-channel weight scales precede per-tensor scales.
PRECISION_NAMES = (FLOAT, *(name + end for name in _QUANTIZED_PRECISIONS for end in ("", _PER_TENSOR_SUFFIX)))


def allowed_precisions(recipe: str) -> tuple[str, ...]:
    """Return the precisions that a recipe accepts.

    A recipe accepts "FP" if its target also computes in floating point: VGF, whose TOSA specification has the profile
    FP, and Cortex-M. The other precisions of a Cortex-M recipe are the int8 ones, because its kernels have int8 weights
    and activations.
    """
    if recipe.startswith("CORTEX_M"):
        return (FLOAT, "INT8", "INT8" + _PER_TENSOR_SUFFIX)
    return PRECISION_NAMES if has_fp_profile(recipe) else PRECISION_NAMES[1:]


def higher_precision(recipe: str) -> str:
    """Return a higher precision than INT8 that a recipe accepts: "A16W8" if the recipe accepts it, otherwise "FP"."""
    return next(name for name in ("A16W8", FLOAT) if name in allowed_precisions(recipe))


#: {type of activations or weights that a user may pass instead of a precision: the precision to suggest}.
_NAMES_BY_TYPE = {"int16": "A16W8", "int4": "A8W4", "float": FLOAT, "float32": FLOAT}


def find_problem(value: Any) -> str | None:
    """Describe the problem of a value of the option ``precisions``; None if the value is valid."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return "not a dict"
    for module, name in value.items():
        if not isinstance(module, str):
            return f"{module!r} is not the name of a module"
        if name not in PRECISION_NAMES:
            meant = _NAMES_BY_TYPE.get(str(name).lower())
            suggestion = format_suggestion([meant]) if meant else suggest_name(str(name), PRECISION_NAMES)
            return f"there is no precision {name!r}{suggestion} (allowed: {', '.join(PRECISION_NAMES)})"
    return None


def check_precisions(recipe: str, names: Iterable[str]) -> None:
    """Check that the recipe's target supports the precisions.

    Raises:
        ValueError: the target does not support one of them.
    """
    for name in names:
        if name not in allowed_precisions(recipe):
            reason = f"is for VGF and Cortex-M recipes: the target of {recipe} computes integers only"
            if name != FLOAT:
                reason = "has no Cortex-M kernels: these have int8 weights and activations"
            raise ValueError(
                f"{recipe}: precisions: {name!r} {reason} (allowed: {', '.join(allowed_precisions(recipe))})"
            )


def quantization_config(name: str, observer: Any) -> QuantizationConfig | None:
    """Create the quantizer's configuration for a precision; None for floating point.

    Args:
        name: one of ``PRECISION_NAMES``.
        observer: observer class of int8 activations.
    """
    from arm_backend_core import quantization

    kind, per_channel = name.removesuffix(_PER_TENSOR_SUFFIX), not name.endswith(_PER_TENSOR_SUFFIX)
    if kind == FLOAT:
        return None
    if kind == "A16W8":
        return quantization.get_symmetric_a16w8_quantization_config(per_channel)
    has_int4_weights = kind == "A8W4"
    create_config = (
        quantization.get_symmetric_a8w4_quantization_config
        if has_int4_weights
        else quantization.get_symmetric_quantization_config
    )
    return create_config(per_channel, observer=observer)


def default_precision(recipe: str, *, per_channel: bool) -> str:
    """The precision of modules that the option ``precisions`` does not list."""
    return recipe.rsplit("_", 1)[1] + ("" if per_channel else _PER_TENSOR_SUFFIX)


def configure_quantizer(quantizer: ArmQuantizer, default: str, precisions: Mapping[str, str], observer: Any) -> None:
    """Set the precision of each module in a quantizer.

    Args:
        quantizer: the quantizer, which is modified.
        default: the default precision. An entry of ``precisions`` for the module "" overrides it.
        precisions: precision of each module path: ``{"encoder.0": "A16W8"}``.
        observer: observer class of int8 activations.
    """
    quantizer.set_global(quantization_config(precisions.get("", default), observer))
    for module, name in precisions.items():
        if module:
            quantizer.set_module_name(module, quantization_config(name, observer), option="precisions")
