"""Programs before lowering: captured, and quantized if the recipe quantizes. They are lowered for each target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.export import ExportedProgram

from arm_recipes.pipeline.method_results import MethodResults
from arm_recipes.samples.export_arguments import Examples

if TYPE_CHECKING:
    from arm_recipes.samples.shape_variants import ShapeVariants

#: Maximum number of samples of a method that are kept, for ``verify``. Few, because the reference model takes a second
#: or more for one inference of a large network.
MAX_KEPT_SAMPLES = 4


@dataclass(frozen=True)
class UnloweredPrograms:
    """The programs of an export before lowering, with the data that their report needs.

    Attributes:
        methods: results of the stages before lowering, by method.
        model_names: names of the models' classes.
        examples: first samples of each method, from ``first_samples``.
        sample_counts: number of calibration samples of each method.
        shape_variants: by method, the variants of a method that was exported for several input sizes (``sizes=``).
        constant_methods: methods that return a constant.
        argument_notes: notes about the arguments of the export.
        logged_notes: notes of the log (``arm_backend_core.compilation_log``).
        capture_notes: notes of the capture.
        stage_notes: notes of the stages.
        hardware_dependencies: attributes of ``Hardware`` on which the quantized graphs depend, with their values.
    """

    methods: Mapping[str, MethodResults]
    model_names: str
    examples: Examples
    sample_counts: Mapping[str, int]
    shape_variants: Mapping[str, ShapeVariants]
    constant_methods: dict[str, Any] | None = None
    argument_notes: tuple[str, ...] = ()
    logged_notes: tuple[str, ...] = ()
    capture_notes: tuple[str, ...] = ()
    stage_notes: tuple[str, ...] = ()
    hardware_dependencies: Mapping[str, Any] = field(default_factory=dict)

    @property
    def programs(self) -> dict[str, ExportedProgram]:
        """The captured program of each method, quantized if the recipe quantizes."""
        return {name: method.program for name, method in self.methods.items() if method.program is not None}


def first_samples(examples: Examples) -> Examples:
    """Return the first samples of each method, at most ``MAX_KEPT_SAMPLES``."""
    return {method: list(samples[:MAX_KEPT_SAMPLES]) for method, samples in examples.items()}
