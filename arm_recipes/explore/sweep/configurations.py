"""Configurations of a sweep: combinations of recipe, MACs, system configuration and memory mode that Vela supports.

This module does not import PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from arm_recipes.explore.sweep.cortex_m_configurations import CORTEX_M_RECIPE
from arm_recipes.recipe import options
from arm_recipes.recipe.boards import BOARDS, find_board
from arm_recipes.recipe.compile_specs import SPEC_BUILDERS, normalize_recipe_name

if TYPE_CHECKING:
    from executorch.export import ExportRecipe

    from arm_backend_core.targets.compile_spec import EthosUCompileSpec

#: Recipes for which Vela estimates cycles and memory.
ETHOSU_RECIPES = tuple(name for name in SPEC_BUILDERS if name.startswith("ETHOSU"))
#: Ethos-U recipes of a sweep without the argument ``recipes``.
DEFAULT_RECIPES = tuple(name for name in ETHOSU_RECIPES if name.endswith("_INT8"))
#: Argument of ``sweep`` that selects all system configurations or all boards.
ALL_VALUES = "all"
#: ``{recipe option: argument of sweep that lists values of the option}``.
_SWEEP_ARGUMENTS = {"macs": "macs", "system_config": "system_configs", "memory_mode": "memory_modes"}


@dataclass(frozen=True)
class SweepConfiguration:
    """A recipe with the Vela configuration to compile for.

    Attributes:
        recipe: name of the recipe.
        spec: compile spec.
        options: options of the recipe.
        board: name of the board that determines some of the options; None without a board.
    """

    recipe: str
    spec: EthosUCompileSpec
    options: Mapping[str, Any]
    board: str | None = None

    @property
    def precision(self) -> str:
        """Precision of the recipe, for example ``INT8``."""
        return self.recipe.rsplit("_", 1)[1]

    @property
    def macs(self) -> int:
        """MACs per cycle."""
        assert self.spec.target.macs is not None
        return self.spec.target.macs

    def make_export_recipe(self) -> ExportRecipe:
        """Build the recipe for ``export``. It allows operators that have no kernel on the CPU."""
        from executorch.export import ExportRecipe

        from arm_recipes.recipe_types import ArmRecipeType

        return ExportRecipe.get_recipe(ArmRecipeType[self.recipe], **self.options, require_runnable=False)


def resolve_recipe_names(recipes: Any) -> tuple[str, ...]:
    """Resolve recipes to unique names.

    Args:
        recipes: one or several members of ``ArmRecipeType``, or names in upper or lower case.

    Raises:
        ValueError: a recipe is unknown, or neither for an Ethos-U nor for a Cortex-M.
    """
    names = []
    for recipe in _to_unique_list("recipes", recipes):
        name = normalize_recipe_name(str(getattr(recipe, "name", recipe)))
        if name not in (*ETHOSU_RECIPES, CORTEX_M_RECIPE):
            raise ValueError(
                f"{name}: cycles and memory are estimated for Ethos-U and Cortex-M recipes only "
                f"(allowed: {', '.join((*ETHOSU_RECIPES, CORTEX_M_RECIPE))})"
            )
        names.append(name)
    return tuple(dict.fromkeys(names))


def split_recipes(recipes: Any, cpus: Any) -> tuple[tuple[str, ...], bool]:
    """Return the Ethos-U recipes of a sweep, and whether the sweep has the Cortex-M recipe, too.

    Args:
        recipes: see ``resolve_recipe_names``. None selects the int8 recipes of Ethos-U, and with ``cpus`` also the
            Cortex-M recipe.
        cpus: processors, or None.

    Raises:
        ValueError: a recipe is unknown or has no estimates, or ``cpus`` names processors and ``recipes`` does not
            contain the Cortex-M recipe.
    """
    if recipes is None:
        return DEFAULT_RECIPES, cpus is not None
    names = resolve_recipe_names(recipes)
    if cpus is not None and CORTEX_M_RECIPE not in names:
        raise ValueError(f"cpus: they belong to the recipe {CORTEX_M_RECIPE}, which recipes does not contain")
    return tuple(name for name in names if name != CORTEX_M_RECIPE), CORTEX_M_RECIPE in names


def list_configurations(
    recipes: Any, varied: Mapping[str, Any], fixed: Mapping[str, Any], boards: Any = None
) -> tuple[SweepConfiguration, ...]:
    """List every valid combination of the options, or of recipes and boards.

    Args:
        recipes: as for ``resolve_recipe_names``. None selects the int8 recipes of Ethos-U.
        varied: values of ``macs``, ``system_config`` and ``memory_mode``. None selects all values of ``macs`` and
            ``memory_mode``. For ``system_config``, which describes the clock and the memories around the NPU, None
            selects the recipe's default, and "all" selects all.
        fixed: other options of the recipes.
        boards: names of boards, or "all"; None: ``varied`` determines the configurations.

    Raises:
        ValueError: an option of ``fixed`` is invalid; a value of ``varied`` is valid in no combination (the message
            contains the error of the recipe); or a board does not exist, no recipe is for its NPU, or an option that
            the board determines is given, too.
    """
    if boards is not None:
        return _list_boards(recipes, {**varied, "config_ini": fixed["config_ini"]}, fixed, boards)
    from arm_backend_core.targets import vela_config
    from arm_backend_core.targets.compile_spec import DEFAULT_CONFIG_INI

    requested = {
        name: None if varied[name] is None else _to_unique_list(_SWEEP_ARGUMENTS[name], varied[name])
        for name in _SWEEP_ARGUMENTS
    }
    names = DEFAULT_RECIPES if recipes is None else resolve_recipe_names(recipes)
    for recipe in names:
        options.resolve_options(recipe, fixed)
        for name, values in requested.items():
            for value in values or ():
                options.resolve_options(recipe, {name: value})
    ini = fixed["config_ini"] or DEFAULT_CONFIG_INI
    systems = requested["system_config"] or [None]  # the recipe's default
    if systems == [ALL_VALUES]:
        requested["system_config"], systems = (
            None,
            list(vela_config.list_sections(ini, vela_config.SYSTEM_CONFIG)),
        )
    modes = requested["memory_mode"] or vela_config.list_sections(ini, vela_config.MEMORY_MODE)
    configurations: list[SweepConfiguration] = []
    rejected: list[tuple[tuple[Any, ...], ValueError]] = []
    specs: dict[tuple[Any, ...], EthosUCompileSpec | ValueError] = {}  # recipes of one NPU family share compile specs
    for recipe in names:
        family = f"ethos-{recipe.split('_')[1].lower()}"
        for combination in product(requested["macs"] or vela_config.list_macs(family), systems, modes):
            recipe_options = {**fixed, **dict(zip(_SWEEP_ARGUMENTS, combination, strict=True))}
            spec = specs.get((family, *combination))
            if spec is None:
                spec = specs[family, *combination] = _make_spec(recipe, recipe_options)
            if isinstance(spec, ValueError):
                rejected.append(((recipe, *combination), spec))
            else:
                configurations.append(SweepConfiguration(recipe, spec, recipe_options))
    requested_values = [(argument, requested[name] or ()) for name, argument in _SWEEP_ARGUMENTS.items()]
    _check_all_used([("recipes", () if recipes is None else names), *requested_values], configurations, rejected)
    return tuple(configurations)


def _list_boards(
    recipes: Any, determined: Mapping[str, Any], fixed: Mapping[str, Any], boards: Any
) -> tuple[SweepConfiguration, ...]:
    """List the combinations of boards and recipes.

    A board determines the options in ``determined``, so their values must be None.
    """
    for name, value in determined.items():
        if value is not None:
            argument = _SWEEP_ARGUMENTS.get(name, name)
            raise ValueError(f"{argument}: a board determines it; give boards or {argument}, not both")
    names = DEFAULT_RECIPES if recipes is None else resolve_recipe_names(recipes)
    records = (
        BOARDS.values() if boards == ALL_VALUES else [find_board(name) for name in _to_unique_list("boards", boards)]
    )
    configurations = []
    for board in records:
        matching = [name for name in names if f"ethos-{name.split('_')[1].lower()}" == board.family]
        if not matching and boards != ALL_VALUES:
            raise ValueError(f"boards: {board.name!r} has an {board.family.title()}, but recipes: {', '.join(names)}")
        for recipe in matching:
            spec: Any = SPEC_BUILDERS[recipe](options.resolve_options(recipe, {**fixed, "board": board.name}))
            # Omit memory budgets, so that a program that exceeds one gives a row instead of an error.
            chosen = {name: value for name, value in board.options.items() if not name.endswith("_budget")}
            configurations.append(SweepConfiguration(recipe, spec, {**fixed, **chosen}, board.name))
    return tuple(configurations)


def _make_spec(recipe: str, recipe_options: Mapping[str, Any]) -> EthosUCompileSpec | ValueError:
    try:
        return SPEC_BUILDERS[recipe](options.resolve_options(recipe, recipe_options))  # type: ignore[return-value]
    except ValueError as error:
        return error


def _check_all_used(
    requested: Iterable[tuple[str, Iterable[Any]]],
    configurations: Sequence[SweepConfiguration],
    rejected: Sequence[tuple[tuple[Any, ...], ValueError]],
) -> None:
    """Raise for the first requested value that no configuration uses."""
    used = {value for c in configurations for value in (c.recipe, c.macs, c.spec.system_config, c.spec.memory_mode)}
    for argument, values in requested:
        for value in values:
            if value not in used:
                # Prefer an error about the value itself to an error about another value of the combination.
                errors = [error for combination, error in rejected if value in combination]
                specific = [error for error in errors if repr(value) in str(error).split(":")[0]]
                raise ValueError(f"{argument}: {value!r} is valid in no configuration: {(specific or errors)[0]}")


def _to_unique_list(argument: str, values: Any) -> list[Any]:
    if isinstance(values, (str, int)) or not isinstance(values, Iterable):
        values = [values]
    unique = list(dict.fromkeys(values))
    if not unique:
        raise ValueError(f"{argument} is empty: give at least one value, or omit it for all")
    return unique
