"""Float reference: the model before quantization, for ``compare``. It shares its tensors with the user's model."""

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
    """The floating-point model of an export, with data to detect that the user changed it after the export.

    Attributes:
        float_programs: program of each method before quantization. Methods that this export did not quantize are
            missing.
        partitioners: partitioners of the recipe for each method.
        tensor_versions: by method, (name, tensor, ``tensor._version`` at the export) of each tensor that the program
            shares with the user's model, except buffers that the program mutates.
        initial_states: by method, copies of the initial values of the buffers that the program mutates:
            ``{"forward": {"hidden": tensor}}``.
    """

    float_programs: Mapping[str, FloatProgram] = field(default_factory=dict)
    partitioners: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    tensor_versions: Mapping[str, tuple[tuple[str, Tensor, int], ...]] = field(default_factory=dict)
    initial_states: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    def changed_tensors(self, method: str) -> list[str]:
        """Names of the tensors of a method that were modified after the export."""
        return [name for name, tensor, version in self.tensor_versions.get(method, ()) if tensor._version != version]

    def changed_states(self, method: str, program: ExportedProgram) -> list[str]:
        """Names of the mutated buffers of a method whose values in ``program`` are no longer the initial ones."""
        states, tables = self.initial_states.get(method, {}), {**program.state_dict, **program.constants}
        return [name for name, initial in states.items() if not tables[name].equal(initial)]


def create_float_reference(
    programs: Mapping[str, ExportedProgram], float_programs: Mapping[str, FloatProgram], recipe: ExportRecipe
) -> FloatReference:
    """Create the float reference of an export."""
    import torch

    from arm_backend_core.program import mutated_buffers

    lowering = recipe.lowering_recipe
    partitioners = (lowering.partitioners if lowering is not None else None) or []
    tensor_versions, states = {}, {}
    for method, program in programs.items():
        float_program = float_programs.get(method)
        mutated = mutated_buffers(program)
        tables = {**program.state_dict, **program.constants}
        states[method] = {name: tables[name].detach().clone() for name in mutated}
        tensors = tables
        if float_program is not None:
            tensors = {**float_program.program.state_dict, **float_program.program.constants}
        tensor_versions[method] = tuple(
            (name, tensor, tensor._version)
            for name, tensor in tensors.items()
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference() and name not in mutated
        )
    partitioners_by_method = {
        method: tuple(partitioners.get(method, ()) if isinstance(partitioners, dict) else partitioners)
        for method in programs
    }
    return FloatReference(float_programs, partitioners_by_method, tensor_versions, states)
