"""A recipe that can be written down, and made again from what was written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack, cast

from executorch.export import ExportRecipe

from arm_recipes._internal.files import check_writable, write
from arm_recipes.recipe.targets import recipe_name
from arm_recipes.recipe.typed_options import (
    EthosU85Options,
    EthosUOptions,
    IntPrecision,
    Precision,
    TosaOptions,
    VgfOptions,
)
from arm_recipes.recipe_types import ArmRecipeType


@dataclass(repr=False)
class ArmRecipe(ExportRecipe):
    """What ``ExportRecipe.get_recipe`` returns for an ``ArmRecipeType``.

    Attributes:
        options: the keyword arguments that it was made with.
        type_name: of the ``ArmRecipeType``, for example ``ETHOSU_U85_INT8``.
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
    def tosa(cls, precision: Precision = "INT8", **options: Unpack[TosaOptions]) -> ArmRecipe:
        """The recipe ``TOSA_<precision>``; options as for ``ExportRecipe.get_recipe``."""
        return make_recipe(f"TOSA_{precision}", options)

    @classmethod
    def vgf(cls, precision: Precision = "INT8", **options: Unpack[VgfOptions]) -> ArmRecipe:
        """The recipe ``VGF_<precision>``; options as for ``ExportRecipe.get_recipe``."""
        return make_recipe(f"VGF_{precision}", options)

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"ExportRecipe.get_recipe(ArmRecipeType.{self.type_name}{options})"

    def with_options(self, **changed: Any) -> ArmRecipe:
        """A recipe made anew, with other values of some options.

        Raises:
            ValueError: as ``get_recipe``.
        """
        return make_recipe(self.type_name, {**self.options, **changed})

    def to_dict(self) -> dict[str, Any]:
        """The recipe's name and options, ready for JSON.

        Calibration samples, and what trains, are no text: they are left out and have to be given again.
        """
        options = {name: _to_jsonable(value) for name, value in self.options.items() if name not in NOT_SERIALIZABLE}
        return {"recipe": self.type_name, "options": options}

    def save(self, path: str | Path) -> Path:
        """Write ``to_dict()`` as a JSON file, which ``load_recipe`` and ``arm-recipes export --tuned`` take.

        Raises:
            ValueError: nothing can be written there.
        """
        target = check_writable(path)
        write(target, json.dumps(self.to_dict(), indent=1).encode())
        return target


#: Options that are given anew.
NOT_SERIALIZABLE = frozenset({"calibration_samples", "qat"})


def make_recipe(name: str, options: Mapping[str, Any]) -> ArmRecipe:
    """The recipe of an ``ArmRecipeType``, by its name. The provider must be registered.

    Raises:
        ValueError: as ``ExportRecipe.get_recipe``; or there is no recipe of that name.
    """
    name = recipe_name(name)
    return cast(ArmRecipe, ExportRecipe.get_recipe(ArmRecipeType[name], **options))


def build_recipe(recipe_type: ArmRecipeType, options: Mapping[str, Any], **parts: Any) -> ArmRecipe:
    """A recipe of these parts, which are ``ExportRecipe``'s fields."""
    return ArmRecipe(name=recipe_type.value, type_name=recipe_type.name, options=options, **parts)


def _to_jsonable(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _to_jsonable(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return [_to_jsonable(item) for item in value] if isinstance(value, (list, tuple)) else value
