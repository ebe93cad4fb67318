"""SHA-256 digests of the zoo's programs: ``python -m tests.models.digests [FILE]``.

A change that must not change programs is checked with this: run it before the change with the output in a file, and
after it with the file as argument. It then lists the programs that differ and ends with status 1.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from arm_recipes import ArmRecipeType
from tests.models import zoo
from tests.models.exported_models import ExportedModel

R = ArmRecipeType
RECIPES = (
    R.TOSA_FP,
    R.TOSA_INT8,
    R.TOSA_A16W8,
    R.VGF_INT8,
    R.ETHOSU_U55_INT8,
    R.ETHOSU_U55_A16W8,
    R.ETHOSU_U65_INT8,
    R.ETHOSU_U85_INT8,
    R.ETHOSU_U85_A16W8,
    R.ETHOSU_U85_A8W4,
)


def digests(name: str) -> dict[str, str]:
    """Digests of the ``.pte`` files of one model, by recipe."""
    model = ExportedModel(name)
    return {recipe.name: hashlib.sha256(model.result(recipe).buffer).hexdigest() for recipe in RECIPES}


def main(arguments: list[str]) -> int:
    """Print the digests as JSON, or compare them with those of a file."""
    current = {}
    for name in zoo.NAMES:
        current[name] = digests(name)
        print(f"{name}: {len(current[name])} programs", file=sys.stderr)
    if not arguments:
        print(json.dumps(current, indent=2))
        return 0
    expected = json.loads(Path(arguments[0]).read_text())
    differing = [
        f"{name} {recipe}"
        for name, by_recipe in expected.items()
        for recipe, digest in by_recipe.items()
        if current.get(name, {}).get(recipe) != digest
    ]
    print(f"{sum(map(len, expected.values()))} programs, {len(differing)} differ", *differing, sep="\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
