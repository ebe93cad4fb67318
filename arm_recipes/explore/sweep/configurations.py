"""Which configurations a sweep compiles for. Vela says which are possible; nothing here imports PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from arm_recipes.recipe import options
from arm_recipes.recipe.targets import SPECS, recipe_name

if TYPE_CHECKING:
    from executorch.export import ExportRecipe

    from arm_backend_core.targets.compile_spec import EthosUCompileSpec

#: Recipes that Vela gives figures for.
RECIPES = tuple(name for name in SPECS if name.startswith("ETHOSU"))
DEFAULT_RECIPES = tuple(name for name in RECIPES if name.endswith("_INT8"))
ALL = "all"
#: Arguments of ``sweep`` that name what varies, by the option of a recipe that each gives values of.
_ARGUMENTS = {"macs": "macs", "system_config": "system_configs", "memory_mode": "memory_modes"}


@dataclass(frozen=True)
class Configuration:
    """A recipe with all that Vela compiles for.

    Attributes:
        options: of the recipe.
    """

    recipe: str
    spec: EthosUCompileSpec
    options: Mapping[str, Any]

    @property
    def precision(self) -> str:
        """What the recipe quantizes to, for example ``INT8``."""
        return self.recipe.rsplit("_", 1)[1]

    @property
    def macs(self) -> int:
        """Multiplications in a cycle."""
        assert self.spec.target.macs is not None
        return self.spec.target.macs

    def export_recipe(self) -> ExportRecipe:
        """What ``export`` takes. A sweep counts what is on the CPU and warns of none of it."""
        from executorch.export import ExportRecipe

        from arm_recipes.recipe_types import ArmRecipeType

        return ExportRecipe.get_recipe(ArmRecipeType[self.recipe], **self.options, require_runnable=False)


def resolve_recipe_names(recipes: Any) -> tuple[str, ...]:
    """Names of recipes that are given as members of ``ArmRecipeType`` or by name, in any case.

    Raises:
        ValueError: one is unknown, or not for an Ethos-U.
    """
    names = []
    for recipe in _listed("recipes", recipes):
        name = recipe_name(str(getattr(recipe, "name", recipe)))
        if name not in RECIPES:
            raise ValueError(f"{name} has no estimates of cycles and memory (allowed: {', '.join(RECIPES)})")
        names.append(name)
    return tuple(dict.fromkeys(names))


def list_configurations(recipes: Any, varied: Mapping[str, Any], fixed: Mapping[str, Any]) -> tuple[Configuration, ...]:
    """Every possible combination.

    Args:
        recipes: as ``resolve_recipe_names`` takes them; None stands for those for int8.
        varied: values of ``macs``, ``system_config`` and ``memory_mode``. None stands for all that there are, of system
            configurations for that of the recipe: they say what is around the NPU, and "all" stands for all.
        fixed: the other options of the recipes.

    Raises:
        ValueError: a value is possible with none of the others; the message is that of the recipe.
    """
    from arm_backend_core.targets import vela_config
    from arm_backend_core.targets.compile_spec import DEFAULT_CONFIG_INI

    given = {name: None if varied[name] is None else _listed(_ARGUMENTS[name], varied[name]) for name in _ARGUMENTS}
    names = DEFAULT_RECIPES if recipes is None else resolve_recipe_names(recipes)
    for recipe in names:
        options.check(recipe, fixed)
        for name, values in given.items():
            for value in values or ():
                options.check(recipe, {name: value})
    ini = fixed["config_ini"] or DEFAULT_CONFIG_INI
    systems = given["system_config"] or [None]  # that of the recipe
    if systems == [ALL]:
        given["system_config"], systems = None, list(vela_config.sections(ini, vela_config.SYSTEM))
    modes = given["memory_mode"] or vela_config.sections(ini, vela_config.MEMORY)
    found: list[Configuration] = []
    refused: list[tuple[tuple[Any, ...], ValueError]] = []
    specs: dict[tuple[Any, ...], EthosUCompileSpec | ValueError] = {}  # those of a family are the same for its recipes
    for recipe in names:
        family = f"ethos-{recipe.split('_')[1].lower()}"
        for combination in product(given["macs"] or vela_config.macs(family), systems, modes):
            chosen = {**fixed, **dict(zip(_ARGUMENTS, combination, strict=True))}
            spec = specs.get((family, *combination))
            if spec is None:
                spec = specs[family, *combination] = _spec(recipe, chosen)
            if isinstance(spec, ValueError):
                refused.append(((recipe, *combination), spec))
            else:
                found.append(Configuration(recipe, spec, chosen))
    named = [(argument, given[name] or ()) for name, argument in _ARGUMENTS.items()]
    _check_all_used([("recipes", () if recipes is None else names), *named], found, refused)
    return tuple(found)


def _spec(recipe: str, chosen: Mapping[str, Any]) -> EthosUCompileSpec | ValueError:
    try:
        return SPECS[recipe](options.check(recipe, chosen))  # type: ignore[return-value]
    except ValueError as error:
        return error


def _check_all_used(
    named: Iterable[tuple[str, Iterable[Any]]],
    found: Sequence[Configuration],
    refused: Sequence[tuple[tuple[Any, ...], ValueError]],
) -> None:
    """Raise for the first value that was named and is in no configuration."""
    used = {value for c in found for value in (c.recipe, c.macs, c.spec.system_config, c.spec.memory_mode)}
    for argument, values in named:
        for value in values:
            if value not in used:
                # The reason that is about the value itself, where there is one: others are about its company.
                errors = [error for combination, error in refused if value in combination]
                about = [error for error in errors if repr(value) in str(error).split(":")[0]]
                raise ValueError(f"{argument}: {value!r} is possible in no configuration: {(about or errors)[0]}")


def _listed(argument: str, values: Any) -> list[Any]:
    if isinstance(values, (str, int)) or not isinstance(values, Iterable):
        values = [values]
    found = list(dict.fromkeys(values))
    if not found:
        raise ValueError(f"{argument} is empty: name at least one, or leave it out for all")
    return found
