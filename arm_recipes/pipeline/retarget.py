"""Lower the programs of an export for another target: ``ExportResult.for_target``.

Capture and quantization depend on the model, the samples and the options of quantization. Most other options (MACs,
memory mode, board, optimization goal, budgets) affect only lowering and later stages. If only such options change, this
module lowers the captured and quantized programs of the earlier export again. The result equals that of a complete
export.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from arm_recipes.pipeline.export import export_unlowered
from arm_recipes.recipe import options
from arm_recipes.recipe.boards import find_board
from arm_recipes.recipe.compile_specs import normalize_recipe_name
from arm_recipes.recipe.recipe import ArmRecipe, make_recipe

if TYPE_CHECKING:
    from executorch.export import ExportRecipe, RecipeType

    from arm_recipes.pipeline.artifact import Artifact
    from arm_recipes.pipeline.unlowered_programs import UnloweredPrograms

#: Groups (``Option.group``) of the options that affect capture or quantization.
_QUANTIZATION_GROUPS = ("int", "tosa-fp")
#: Options that describe one NPU and its board. Another NPU or board does not inherit them.
_NPU_OPTIONS = ("board", "macs", "system_config", "memory_mode", "config_ini")
_USE_EXPORT = "call export with the model and the new recipe"


def export_for_target(
    artifact: Artifact,
    recipe: RecipeType | str | None,
    changed: Mapping[str, Any],
    *,
    verify: bool,
    progress: bool,
) -> Artifact:
    """Lower the programs of an export with another recipe of the same quantization.

    Args:
        artifact: the export.
        recipe: type or name of the new recipe. None: the recipe of the export; with a changed ``board``, the recipe of
            the same precision for the board's NPU.
        changed: options to change.
        verify: as in ``export``.
        progress: as in ``export``.

    Raises:
        ValueError: as ``retarget_recipe``; the quantized graph would differ for the new NPU; the model has changed
            since the export; the recipe of the export is not of this package, or its stages do not capture the model.
        ExportError, ArmBackendError, RunError: as ``export``.
    """
    current = artifact.requested_recipe or artifact.recipe
    if not isinstance(current, ArmRecipe):
        raise ValueError(f"for_target: the recipe of this export is not one of ArmRecipeType; {_USE_EXPORT}")
    new_recipe = retarget_recipe(current, recipe, changed)
    unlowered = artifact.export_objects.unlowered
    if unlowered is None:
        raise ValueError(f"for_target: this export has not captured the model; {_USE_EXPORT}")
    reason = find_quantization_difference(unlowered, new_recipe)
    if reason is not None:
        raise ValueError(f"for_target: {reason}; {_USE_EXPORT}")
    _check_unchanged(artifact)
    return export_unlowered(unlowered, new_recipe, verify=verify, progress=progress)


def retarget_recipe(current: ArmRecipe, recipe: RecipeType | str | None, changed: Mapping[str, Any]) -> ArmRecipe:
    """Build the recipe for another target.

    Args:
        current: the recipe of the export.
        recipe: as in ``export_for_target``.
        changed: options to change. The new recipe inherits its other options from ``current``. For another NPU or
            board, it does not inherit the options that describe an NPU or board (``_NPU_OPTIONS``).

    Raises:
        ValueError: the new recipe has another quantizer, quantization reads a changed option, or an option is invalid.
    """
    name = _choose_recipe(current.type_name, recipe, changed.get("board"))
    if _quantizer_name(name) != _quantizer_name(current.type_name):
        raise ValueError(f"for_target: {name} quantizes in another way than {current.type_name}; {_USE_EXPORT}")
    is_other_npu = name != current.type_name or changed.get("board") is not None
    known = set(options.option_names(name)) - set(_NPU_OPTIONS if is_other_npu else ())
    inherited = {option: value for option, value in current.options.items() if option in known}
    new_recipe = make_recipe(name, {**inherited, **changed})
    for option, value in changed.items():
        before = current.options.get(option, options.OPTIONS[option].default)
        if options.OPTIONS[option].group in _QUANTIZATION_GROUPS and not _is_equal(value, before):
            raise ValueError(
                f"for_target: {option} is an option of quantization, and for_target reuses the quantized model; "
                f"{_USE_EXPORT}"
            )
    return new_recipe


def _is_equal(value: Any, before: Any) -> bool:
    """Whether an option has the same value as before. Samples are equal only if they have the same tensor objects."""
    try:
        return value is before or bool(value == before)
    except (RuntimeError, ValueError):  # comparison of tensors or arrays of several elements
        return False


def find_quantization_difference(unlowered: UnloweredPrograms, recipe: ExportRecipe) -> str | None:
    """Find the reason why a recipe with the same quantizer would quantize the model differently.

    Returns:
        The reason; None if the quantized programs are the same.
    """
    from arm_backend_core.quantization.hardware_dependencies import find_changed_dependencies

    partitioners: Any = recipe.lowering_recipe.partitioners if recipe.lowering_recipe is not None else None
    target = partitioners[0].compile_spec.target
    differing = find_changed_dependencies(unlowered.hardware_dependencies, target.hardware)
    if not differing:
        return None
    return (
        f"the model has operators that are quantized in another way for {target.name}: matrix products with a "
        f"constant, or scatter operators (differing properties of the NPUs: {', '.join(differing)})"
    )


def _choose_recipe(current: str, recipe: RecipeType | str | None, board: str | None) -> str:
    """Return the name of the new recipe."""
    if recipe is not None:
        return normalize_recipe_name(str(getattr(recipe, "name", recipe)))
    if board is None or not current.startswith("ETHOSU"):
        return current
    family = find_board(board).family.removeprefix("ethos-").upper()
    return f"ETHOSU_{family}_{current.rsplit('_', 1)[1]}"


def _quantizer_name(recipe: str) -> tuple[str, str]:
    """The part of a recipe's name that determines the quantizer: kind of target, and precision."""
    return recipe.split("_", 1)[0], recipe.rsplit("_", 1)[1]


def _check_unchanged(artifact: Artifact) -> None:
    """Check that the tensors of the model still have the values that they had at the export.

    Raises:
        ValueError: a tensor was written; the message names it.
    """
    reference = artifact.float_reference
    for method, program in artifact.exported_programs.items():
        changed = [*reference.changed_tensors(method), *reference.changed_states(method, program)]
        if changed:
            raise ValueError(
                f"for_target: the model has changed since the export: '{changed[0]}' of '{method}' was written; "
                f"{_USE_EXPORT}"
            )
