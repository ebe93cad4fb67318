"""Regions of a precision search: groups of modules with one precision, subdivided by their share of the noise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executorch.export import ExportRecipe
    from torch.export import ExportedProgram

#: Precision of every module with quantized inputs, by module name: ``{"encoder.0": "INT8", "head": "A16W8"}``.
PrecisionPlan = dict[str, str]


@dataclass(frozen=True)
class Region:
    """Modules that share a precision.

    Attributes:
        name: name of the module that contains all modules of the region.
        modules: names of the region's modules. Modules without quantized inputs are not listed.
        parts: regions into which the region can be divided; empty for a single module.
    """

    name: str
    modules: tuple[str, ...]
    parts: tuple[Region, ...] = field(default=(), compare=False, repr=False)


def quantized_modules(program: ExportedProgram, recipe: ExportRecipe) -> tuple[str, ...]:
    """List the modules with operators that read quantized tensors, in execution order; "" is the top-level model.

    A module is omitted if in all its quantized operators, input and result share the quantization parameters, as in
    reshapes (``AnnotationKind.SHARED``).
    """
    from arm_backend_core.nodes import modules_of
    from arm_backend_core.ops.catalog import find_record
    from arm_backend_core.ops.registry import AnnotationKind
    from arm_backend_core.program import copy_program
    from arm_backend_core.quantization.annotator import ANNOTATION
    from arm_backend_core.quantization.ptq import ObservedProgram
    from arm_recipes.stages.quantize import recipe_algorithms

    assert recipe.quantization_recipe is not None
    quantizers: Any = recipe.quantization_recipe.quantizers
    observed = ObservedProgram(
        copy_program(program), quantizers[0], algorithms=recipe_algorithms(recipe.quantization_recipe)
    )
    modules: dict[str, None] = {}
    for node in observed.graph.nodes:
        annotation, record = node.meta.get(ANNOTATION), find_record(node)
        is_quantized = annotation is not None and annotation.input_qspec_map
        if is_quantized and record is not None and record.kind is not AnnotationKind.SHARED:
            modules[next(reversed(modules_of(node)), "")] = None
    return tuple(modules)


def build_region_tree(modules: Iterable[str], name: str = "") -> Region:
    """Build the region of all modules. Its tree of parts follows the hierarchy of the module names."""
    members = tuple(modules)
    children: dict[str, list[str]] = {}
    for module in members:
        depth = name.count(".") + 2 if name else 1
        children.setdefault(module if module == name else ".".join(module.split(".")[:depth]), []).append(module)
    if len(members) == 1:
        return Region(members[0], members)
    if len(children) == 1:
        return build_region_tree(members, next(iter(children)))
    own = {name: Region(name, (name,))} if name in children else {}
    parts = tuple(own.get(key) or build_region_tree(child_modules, key) for key, child_modules in children.items())
    return Region(name, members, parts)


def subdivide_by_noise(
    whole: Region, noise_of: Callable[[Region], float], *, share: float, max_regions: int
) -> dict[Region, float]:
    """Divide a region into its parts, and divide parts further until each causes at most ``share`` of the total noise.

    Regions of a single module are not divided.

    Args:
        whole: region of all modules.
        noise_of: measures the output noise that a region causes by itself; each call runs the model.
        share: maximum share of the total noise.
        max_regions: maximum number of regions. A division that would exceed it is skipped, except the first division
            (into ``whole.parts``). The noisiest regions are divided first.

    Returns:
        The regions with their noise.
    """
    noise = {part: noise_of(part) for part in whole.parts or (whole,)}
    while True:
        total = sum(noise.values())
        divisible = [part for part in noise if part.parts and noise[part] > share * total]
        divisible = [part for part in divisible if len(noise) - 1 + len(part.parts) <= max_regions]
        if not divisible:
            return noise
        noisiest = max(divisible, key=noise.__getitem__)
        del noise[noisiest]
        noise |= {part: noise_of(part) for part in noisiest.parts}


def with_region_precision(plan: Mapping[str, str], region: Region, precision: str) -> PrecisionPlan:
    """Return the plan with another precision for one region."""
    return {**plan, **dict.fromkeys(region.modules, precision)}


def minimal_settings(plan: Mapping[str, str], default_precision: str) -> PrecisionPlan:
    """Return a value of the option ``precisions``, with few entries, that gives every module its precision.

    An entry applies to a module and its submodules, except those with an entry of their own.

    Args:
        plan: precision by module.
        default_precision: precision of modules to which no entry applies.
    """
    most_common = max(dict.fromkeys(plan.values()), key=list(plan.values()).count)
    settings: PrecisionPlan = {} if most_common == default_precision else {"": most_common}
    for module in sorted(plan, key=_depth):
        ancestor = module
        inherited = settings.get("", default_precision)
        while ancestor:
            ancestor = ancestor.rpartition(".")[0]
            if ancestor and ancestor in settings:
                inherited = settings[ancestor]
                break
        if plan[module] != inherited:
            settings[module] = plan[module]
    return settings


def _depth(module: str) -> tuple[int, str]:
    return module.count(".") + bool(module), module
