"""Builds an ``ExportRecipe`` for each recipe type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from executorch.export import BackendRecipeProvider, ExportRecipe, RecipeType

from arm_recipes import options
from arm_recipes.messages import quiet
from arm_recipes.recipe_types import BACKEND_NAME, ArmRecipeType

if TYPE_CHECKING:
    from arm_backend_core.targets.compile_spec import ArmCompileSpec

Options = dict[str, Any]


def _ethos_u(family: str, default_macs: int) -> Callable[[Options], ArmCompileSpec]:
    def build(given: Options) -> ArmCompileSpec:
        from arm_backend_core.targets import vela_config
        from arm_backend_core.targets.compile_spec import EthosUCompileSpec

        macs, allowed = given["macs"] or default_macs, vela_config.macs(family)
        if macs not in allowed:
            nearest = min(allowed, key=lambda count: abs(count - macs))
            raise ValueError(
                f"macs={macs}: no {family} has that many; did you mean {nearest}? "
                f"(allowed: {', '.join(map(str, allowed))})"
            )
        return EthosUCompileSpec(
            f"{family}-{macs}",
            system_config=given["system_config"],
            memory_mode=given["memory_mode"],
            extra_flags=list(given["extra_flags"] or []) or None,
            config_ini=None if given["config_ini"] is None else str(given["config_ini"]),
        )

    return build


def _tosa(tosa_spec: str, given: Options) -> ArmCompileSpec:
    from arm_backend_core.targets.compile_spec import TosaCompileSpec

    return TosaCompileSpec(tosa_spec)


def _vgf(tosa_spec: str, given: Options) -> ArmCompileSpec:
    from arm_backend_core.targets.compile_spec import VgfCompileSpec

    return VgfCompileSpec(tosa_spec)


_U55 = _ethos_u("ethos-u55", 128)
_U65 = _ethos_u("ethos-u65", 256)
_U85 = _ethos_u("ethos-u85", 256)
# int16 is needed in INT8 recipes too: softmax and layer_norm keep int16 tables and intermediates inside.
_INT = "TOSA-1.0+INT+int16"

#: What the recipe compiles for: its options -> a compile spec. The recipes that are supported are the keys.
SPECS: dict[ArmRecipeType, Callable[[Options], ArmCompileSpec]] = {
    ArmRecipeType.ETHOSU_U55_INT8: _U55,
    ArmRecipeType.ETHOSU_U65_INT8: _U65,
    ArmRecipeType.ETHOSU_U85_INT8: _U85,
    ArmRecipeType.ETHOSU_U55_A16W8: _U55,
    ArmRecipeType.ETHOSU_U65_A16W8: _U65,
    ArmRecipeType.ETHOSU_U85_A16W8: _U85,
    ArmRecipeType.TOSA_FP: partial(_tosa, "TOSA-1.0+FP"),
    ArmRecipeType.TOSA_INT8: partial(_tosa, _INT),
    ArmRecipeType.TOSA_A16W8: partial(_tosa, _INT),
    ArmRecipeType.VGF_FP: partial(_vgf, "TOSA-1.0+FP"),
    # VGF runs what quantization left in floating point too.
    ArmRecipeType.VGF_INT8: partial(_vgf, "TOSA-1.0+INT+FP+int16"),
}


class ArmRecipeProvider(BackendRecipeProvider):
    """ExecuTorch asks it for the recipes of ``ArmRecipeType``."""

    @property
    def backend_name(self) -> str:
        """Name in ExecuTorch's registry."""
        return BACKEND_NAME

    def get_supported_recipes(self) -> Sequence[RecipeType]:
        """Every ``ArmRecipeType``."""
        return list(SPECS)

    def create_recipe(self, recipe_type: RecipeType, **kwargs: Any) -> ExportRecipe | None:
        """Build a recipe; None if it is not one of ours.

        Raises:
            ValueError: an argument is unknown, ill-typed, or unknown to the installed Vela and the ``.ini``.
                Everything is checked before anything is built.
        """
        if not isinstance(recipe_type, ArmRecipeType):
            return None
        given = options.check(recipe_type, kwargs)
        spec = SPECS[recipe_type](given)
        if given["dump_dir"] is not None:
            spec.dump_intermediate_artifacts_to(str(given["dump_dir"]))
        with quiet():
            return _recipe(recipe_type, spec, given)


def _recipe(recipe_type: ArmRecipeType, spec: ArmCompileSpec, given: Options) -> ExportRecipe:
    from executorch.exir.capture import ExecutorchBackendConfig

    from arm_backend_core import partitioner, quantizer
    from arm_recipes.stages import edge_manager
    from arm_recipes.stages.lowering import lowering_recipe
    from arm_recipes.stages.quantization import quantization_recipe

    target, precision = recipe_type.name.split("_")[0], recipe_type.name.rsplit("_", 1)[1]
    prefix = {"ETHOSU": "EthosU", "TOSA": "TOSA", "VGF": "Vgf"}[target]
    quantization = None
    boundary: list[Any] = []
    if precision != "FP":
        configs = {
            "INT8": quantizer.get_symmetric_quantization_config,
            "A16W8": quantizer.get_symmetric_a16w8_quantization_config,
        }
        chosen = getattr(quantizer, f"{prefix}Quantizer")(spec)
        chosen.set_global(configs[precision](is_per_channel=given["per_channel"]))
        quantization = quantization_recipe(chosen, given["calibration"])
        if given["quantized_io"]:
            boundary.append(edge_manager.quantized_io)
        if target != "VGF":  # VGF runtimes have ExecuTorch's own kernels, which the partitioner loads
            boundary.append(edge_manager.cortex_m_boundary)
    delegating = getattr(partitioner, f"{prefix}Partitioner")(
        spec, require_full_delegation=given["require_full_delegation"]
    )
    return ExportRecipe(
        name=recipe_type.value,
        quantization_recipe=quantization,
        lowering_recipe=lowering_recipe(delegating, boundary),
        # Arm's runtime reads the payload inside the program, not in a segment of its own.
        executorch_backend_config=ExecutorchBackendConfig(extract_delegate_segments=False),
    )
