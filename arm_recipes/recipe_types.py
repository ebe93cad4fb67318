"""``ArmRecipeType``: the names of the recipes."""

from __future__ import annotations

from typing import Any, NoReturn

from executorch.export import RecipeType
from executorch.export.recipe import RecipeTypeMeta

from arm_backend_core.similar_names import suggest_name

#: Name of this provider in ExecuTorch's registry. ExecuTorch's own Arm provider is "arm", so both can be registered.
BACKEND_NAME = "arm_recipes"


def _describe_unknown(name: object) -> str:
    names = ArmRecipeType.__members__
    return f"ArmRecipeType has no {name}{suggest_name(str(name), names)} (allowed: {', '.join(names)})"


class _SuggestingMeta(RecipeTypeMeta):
    """Metaclass that suggests the nearest member for an unknown name."""

    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(name if name.startswith("_") else _describe_unknown(name))

    def __getitem__(cls, name: str) -> Any:
        if name not in cls.__members__:
            raise KeyError(_describe_unknown(name))
        return cls.__members__[name]


class ArmRecipeType(RecipeType, metaclass=_SuggestingMeta):
    """One member for each supported pair of Arm target and precision.

    ``INT8``: int8 weights and activations. ``A8W4``: int4 weights, int8 activations. ``A16W8``: int8 weights, int16
    activations. ``FP``: float32.
    """

    ETHOSU_U55_INT8 = "arm_recipes_ethosu_u55_int8"
    ETHOSU_U65_INT8 = "arm_recipes_ethosu_u65_int8"
    ETHOSU_U85_INT8 = "arm_recipes_ethosu_u85_int8"
    ETHOSU_U55_A8W4 = "arm_recipes_ethosu_u55_a8w4"
    ETHOSU_U65_A8W4 = "arm_recipes_ethosu_u65_a8w4"
    ETHOSU_U85_A8W4 = "arm_recipes_ethosu_u85_a8w4"
    ETHOSU_U55_A16W8 = "arm_recipes_ethosu_u55_a16w8"
    ETHOSU_U65_A16W8 = "arm_recipes_ethosu_u65_a16w8"
    ETHOSU_U85_A16W8 = "arm_recipes_ethosu_u85_a16w8"
    CORTEX_M_INT8 = "arm_recipes_cortex_m_int8"
    TOSA_FP = "arm_recipes_tosa_fp"
    TOSA_INT8 = "arm_recipes_tosa_int8"
    TOSA_A8W4 = "arm_recipes_tosa_a8w4"
    TOSA_A16W8 = "arm_recipes_tosa_a16w8"
    VGF_FP = "arm_recipes_vgf_fp"
    VGF_INT8 = "arm_recipes_vgf_int8"
    VGF_A8W4 = "arm_recipes_vgf_a8w4"
    VGF_A16W8 = "arm_recipes_vgf_a16w8"

    @classmethod
    def get_backend_name(cls) -> str:
        """Name of the provider in ExecuTorch's registry."""
        return BACKEND_NAME

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise ValueError(_describe_unknown(value))
