"""Parts of a model that get a precision each: groups of modules, as fine as their share of the error asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executorch.export import ExportRecipe
    from torch.export import ExportedProgram

#: Precisions by module; every module that quantizes something is in it.
PrecisionPlan = dict[str, str]


@dataclass(frozen=True)
class Region:
    """Modules that have one precision.

    Attributes:
        name: of the module that holds them all, or that is the only one.
        modules: that quantize what they read.
        parts: regions that it can be divided into; none for a single module.
    """

    name: str
    modules: tuple[str, ...]
    parts: tuple[Region, ...] = field(default=(), compare=False, repr=False)


def quantized_modules(program: ExportedProgram, recipe: ExportRecipe) -> tuple[str, ...]:
    """Modules with operators that read quantized tensors, in the order in which they run; "" is the model itself."""
    from arm_backend_core.nodes import modules_of
    from arm_backend_core.ops.catalog import find
    from arm_backend_core.ops.registry import Kind
    from arm_backend_core.program import copied
    from arm_backend_core.quantization.annotator import ANNOTATION
    from arm_backend_core.quantization.ptq import ObservedProgram
    from arm_recipes.stages.quantize import algorithms_of

    assert recipe.quantization_recipe is not None
    quantizers: Any = recipe.quantization_recipe.quantizers
    observed = ObservedProgram(copied(program), quantizers[0], algorithms=algorithms_of(recipe.quantization_recipe))
    found: dict[str, None] = {}
    for node in observed.graph.nodes:
        annotation, record = node.meta.get(ANNOTATION), find(node)
        reads = annotation is not None and annotation.input_qspec_map
        if reads and record is not None and record.kind is not Kind.SHARED:
            found[next(reversed(modules_of(node)), "")] = None
    return tuple(found)


def build_region_tree(modules: Iterable[str], name: str = "") -> Region:
    """All modules as one region, that can be divided along the names: ``layers.0`` from ``layers.1`` and so on."""
    members = tuple(modules)
    below: dict[str, list[str]] = {}
    for module in members:
        depth = name.count(".") + 2 if name else 1
        below.setdefault(module if module == name else ".".join(module.split(".")[:depth]), []).append(module)
    if len(members) == 1:
        return Region(members[0], members)
    if len(below) == 1:
        return build_region_tree(members, next(iter(below)))
    own = {name: Region(name, (name,))} if name in below else {}
    parts = tuple(own.get(key) or build_region_tree(inner, key) for key, inner in below.items())
    return Region(name, members, parts)


def subdivide(whole: Region, noise_of: Callable[[Region], float], *, share: float, most: int) -> dict[Region, float]:
    """Regions that each make at most ``share`` of the error, or are single modules; and the error of each.

    Args:
        noise_of: the error of the output that a region makes by itself; each costs a run.
        most: regions; the noisiest are divided first.
    """
    found = {part: noise_of(part) for part in whole.parts or (whole,)}
    while True:
        total = sum(found.values())
        coarse = [part for part in found if part.parts and found[part] > share * total]
        coarse = [part for part in coarse if len(found) - 1 + len(part.parts) <= most]
        if not coarse:
            return found
        noisiest = max(coarse, key=found.__getitem__)
        del found[noisiest]
        found |= {part: noise_of(part) for part in noisiest.parts}


def with_region(plan: Mapping[str, str], region: Region, precision: str) -> PrecisionPlan:
    """The plan with another precision for one region."""
    return {**plan, **dict.fromkeys(region.modules, precision)}


def minimal_settings(plan: Mapping[str, str], everywhere: str) -> PrecisionPlan:
    """The fewest settings that give every module its precision; a module's setting holds for all in it.

    Args:
        everywhere: the precision of what no setting is for.
    """
    usual = max(dict.fromkeys(plan.values()), key=list(plan.values()).count)
    settings: PrecisionPlan = {} if usual == everywhere else {"": usual}
    for module in sorted(plan, key=_depth):
        above = module
        inherited = settings.get("", everywhere)
        while above:
            above = above.rpartition(".")[0]
            if above and above in settings:
                inherited = settings[above]
                break
        if plan[module] != inherited:
            settings[module] = plan[module]
    return settings


def _depth(module: str) -> tuple[int, str]:
    return module.count(".") + bool(module), module
