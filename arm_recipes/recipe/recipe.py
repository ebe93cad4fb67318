"""``ArmRecipe``: an ``ExportRecipe`` that stores its options and can be saved as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack, cast, overload

import executorch.export
from executorch.export import RecipeType

from arm_recipes._internal.files import check_writable, write_file_atomically
from arm_recipes.recipe.compile_specs import normalize_recipe_name
from arm_recipes.recipe.typed_options import (
    CortexMOptions,
    EthosU85Options,
    EthosUOptions,
    IntPrecision,
    Precision,
    TosaOptions,
    VgfOptions,
)
from arm_recipes.recipe_types import ArmRecipeType


class ExportRecipe(executorch.export.ExportRecipe):
    """ExecuTorch's ``ExportRecipe``, whose ``get_recipe`` also takes the name of an ``ArmRecipeType``."""

    @overload
    @classmethod
    def get_recipe(cls, recipe: ArmRecipeType | str, **kwargs: Any) -> ArmRecipe: ...

    @overload
    @classmethod
    def get_recipe(cls, recipe: RecipeType, **kwargs: Any) -> executorch.export.ExportRecipe: ...

    @classmethod
    def get_recipe(cls, recipe: RecipeType | str, **kwargs: Any) -> executorch.export.ExportRecipe:
        """Get a recipe by its type, or by the name of an ``ArmRecipeType``.

        The case of the name does not matter, and ``-`` may replace ``_``.

        Raises:
            ValueError: there is no such recipe, or an option is invalid.
        """
        if isinstance(recipe, str):
            recipe = ArmRecipeType[normalize_recipe_name(recipe)]
        return cast(executorch.export.ExportRecipe, super().get_recipe(recipe, **kwargs))


@dataclass(repr=False)
class ArmRecipe(ExportRecipe):
    """The recipe that ``ExportRecipe.get_recipe`` returns for an ``ArmRecipeType``.

    Attributes:
        options: the keyword arguments that the user passed to ``get_recipe``.
        type_name: name of the ``ArmRecipeType``, for example ``ETHOSU_U85_INT8``.
    """

    type_name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def ethosu_u55(cls, precision: IntPrecision = "INT8", **options: Unpack[EthosUOptions]) -> ArmRecipe:
        """The recipe ``ETHOSU_U55_<precision>``; options as for ``ExportRecipe.get_recipe``."""
        return make_recipe(f"ETHOSU_U55_{precision}", options)

    @classmethod
    def ethosu_u65(cls, precision: IntPrecision = "INT8", **options: Unpack[EthosUOptions]) -> ArmRecipe:
        """The recipe ``ETHOSU_U65_<precision>``; options as for ``ExportRecipe.get_recipe``."""
        return make_recipe(f"ETHOSU_U65_{precision}", options)

    @classmethod
    def ethosu_u85(cls, precision: IntPrecision = "INT8", **options: Unpack[EthosU85Options]) -> ArmRecipe:
        """The recipe ``ETHOSU_U85_<precision>``; options as for ``ExportRecipe.get_recipe``."""
        return make_recipe(f"ETHOSU_U85_{precision}", options)

    @classmethod
    def cortex_m(cls, **options: Unpack[CortexMOptions]) -> ArmRecipe:
        """The recipe ``CORTEX_M_INT8``; options as for ``ExportRecipe.get_recipe``."""
        return make_recipe("CORTEX_M_INT8", options)

    @classmethod
    def tosa(cls, precision: Precision = "INT8", **options: Unpack[TosaOptions]) -> ArmRecipe:
        """The recipe ``TOSA_<precision>``; options as for ``ExportRecipe.get_recipe``."""
        return make_recipe(f"TOSA_{precision}", options)

    @classmethod
    def vgf(cls, precision: Precision = "INT8", **options: Unpack[VgfOptions]) -> ArmRecipe:
        """The recipe ``VGF_<precision>``; options as for ``ExportRecipe.get_recipe``."""
        return make_recipe(f"VGF_{precision}", options)

    def __repr__(self) -> str:
        """Return the call that builds the recipe. Samples and functions are shown as ``...``."""
        options = "".join(f", {name}={_literal(name, value)}" for name, value in self.options.items())
        return f"ExportRecipe.get_recipe(ArmRecipeType.{self.type_name}{options})"

    def with_options(self, **changed: Any) -> ArmRecipe:
        """Build a new recipe with some options changed.

        Raises:
            ValueError: as ``get_recipe``.
        """
        return make_recipe(self.type_name, {**self.options, **changed})

    def with_npu_sram(self, available: int) -> ArmRecipe:
        """Build a new recipe that limits the SRAM of each delegate.

        The option ``sram_budget`` still limits the whole program.

        Args:
            available: bytes of SRAM for a delegate.
        """
        recipe = self.with_options()
        lowering = recipe.lowering_recipe
        for partitioner in (lowering.partitioners if lowering is not None else None) or []:
            partitioner.compile_spec.sram_budget = available
        return recipe

    def to_dict(self) -> dict[str, Any]:
        """The recipe's name and options, ready for JSON.

        ``calibration_samples`` and ``qat`` cannot be serialized and are omitted. Pass them again to ``load_recipe``.
        """
        options = {name: _to_jsonable(value) for name, value in self.options.items() if name not in NOT_SERIALIZABLE}
        return {"recipe": self.type_name, "options": options}

    def save(self, path: str | Path) -> Path:
        """Write ``to_dict()`` as a JSON file, which ``load_recipe`` and ``arm-recipes export --tuned`` read.

        Raises:
            ValueError: ``path`` is not writable.
        """
        target = check_writable(path)
        write_file_atomically(target, json.dumps(self.to_dict(), indent=1).encode())
        return target


#: Options that JSON cannot represent. The caller of ``load_recipe`` passes them again.
NOT_SERIALIZABLE = frozenset({"calibration_samples", "qat"})


def make_recipe(name: str, options: Mapping[str, Any]) -> ArmRecipe:
    """Build the recipe of an ``ArmRecipeType``, by its name. The provider must be registered.

    Raises:
        ValueError: as ``ExportRecipe.get_recipe``, or there is no recipe with that name.
    """
    name = normalize_recipe_name(name)
    return ExportRecipe.get_recipe(ArmRecipeType[name], **options)


def build_recipe(recipe_type: ArmRecipeType, options: Mapping[str, Any], **recipe_fields: Any) -> ArmRecipe:
    """Construct an ``ArmRecipe``. ``recipe_fields`` are the fields of ExecuTorch's ``ExportRecipe``."""
    return ArmRecipe(name=recipe_type.value, type_name=recipe_type.name, options=options, **recipe_fields)


def _literal(name: str, value: Any) -> str:
    if name in NOT_SERIALIZABLE and value is not None:
        return "..."
    return repr(str(value) if isinstance(value, Path) else value)


def _to_jsonable(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _to_jsonable(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return [_to_jsonable(item) for item in value] if isinstance(value, (list, tuple)) else value
