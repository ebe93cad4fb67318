"""What an export keeps of a model for comparisons: its float tensors, which it shares with the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from arm_recipes.stages.quantize import FloatProgram

if TYPE_CHECKING:
    from executorch.export import ExportRecipe
    from torch import Tensor
    from torch.export import ExportedProgram


@dataclass(frozen=True)
class FloatReference:
    """What an export keeps.

    Attributes:
        float_programs: methods that it quantized.
        partitioners: of the recipe, by method.
        versions: tensors that are the model's own, and how often each had been written.
        states: buffers that programs write, as they were: the model may go on from them.
    """

    float_programs: Mapping[str, FloatProgram] = field(default_factory=dict)
    partitioners: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    versions: Mapping[str, tuple[tuple[str, Tensor, int], ...]] = field(default_factory=dict)
    states: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    def changed_tensors(self, method: str) -> list[str]:
        """Tensors of a method that have been written since."""
        return [name for name, tensor, version in self.versions.get(method, ()) if tensor._version != version]


def float_reference(
    programs: Mapping[str, ExportedProgram], originals: Mapping[str, FloatProgram], recipe: ExportRecipe
) -> FloatReference:
    """What to keep of an export."""
    import torch

    from arm_backend_core.program import written

    lowering = recipe.lowering_recipe
    given = (lowering.partitioners if lowering is not None else None) or []
    versions, states = {}, {}
    for method, program in programs.items():
        original = originals.get(method)
        changing = written(program)
        tables = {**program.state_dict, **program.constants}
        states[method] = {name: tables[name].detach().clone() for name in changing}
        found = tables
        if original is not None:
            found = {**original.program.state_dict, **original.program.constants}
        versions[method] = tuple(
            (name, tensor, tensor._version)
            for name, tensor in found.items()
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference() and name not in changing
        )
    partitioners = {method: tuple(given.get(method, ()) if isinstance(given, dict) else given) for method in programs}
    return FloatReference(originals, partitioners, versions, states)
