"""TOSA specifications of the recipes. Importing this module does not import PyTorch."""

from __future__ import annotations

# INT8 recipes need int16 too: softmax and layer_norm use int16 tables and intermediates.
_INT_PROFILE = "TOSA-1.0+INT+int16"
# A VGF target also runs the operators that stay in floating point after quantization.
_INT_AND_FP_PROFILE = "TOSA-1.0+INT+FP+int16"

#: {recipe: version, profiles and extensions of its compile spec, without the extensions that options add}. Recipes of
#: Ethos-U and Cortex-M have no entry, because their targets are fixed.
TOSA_SPECS = {
    "TOSA_FP": "TOSA-1.0+FP",
    "TOSA_INT8": _INT_PROFILE,
    "TOSA_A8W4": f"{_INT_PROFILE}+int4",
    "TOSA_A16W8": _INT_PROFILE,
    "VGF_FP": "TOSA-1.0+FP",
    "VGF_INT8": _INT_AND_FP_PROFILE,
    "VGF_A8W4": f"{_INT_AND_FP_PROFILE}+int4",
    "VGF_A16W8": _INT_AND_FP_PROFILE,
}


def has_fp_profile(recipe: str) -> bool:
    """Whether the recipe's target computes in floating point inside delegates."""
    return "FP" in TOSA_SPECS.get(recipe, "").split("+")
