"""The quantization part of a recipe, and a quantization stage that captures faster than ExecuTorch's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from executorch.export import QuantizationRecipe
from executorch.export.stages import PipelineArtifact, QuantizeStage
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantizer import Quantizer

from arm_recipes.comparing.original import Original
from arm_recipes.methods import observe_together
from arm_recipes.sample import Inputs
from arm_recipes.stages.calibration import Calibration, start_monitor, stop_monitor
from arm_recipes.stages.capture import Capture

#: Marks the iteration over the calibration samples of a method with a progress bar, or returns it as it is.
Progress = Callable[[Iterable[Any], str], Iterable[Any]]


def quantization_recipe(quantizer: Quantizer, calibration: Any = None) -> QuantizationRecipe:
    """Post-training quantization with ``quantizer``.

    Args:
        calibration: samples as ``Calibration`` takes them; None calibrates with the example inputs.
    """
    return QuantizationRecipe(
        quantizers=[quantizer],
        calibration_inputs_fn=None if calibration is None else Calibration(calibration),
        post_prepare_passes=[start_monitor],
        pre_convert_passes=[stop_monitor],
    )


def is_quantized(graph: torch.fx.Graph) -> bool:
    """Whether a graph holds quantize or dequantize operators already."""
    return any(
        node.op == "call_function" and getattr(node.target, "namespace", None) == "quantized_decomposed"
        for node in graph.nodes
    )


class FastQuantizeStage(QuantizeStage):
    """ExecuTorch's stage, but faster, for exported programs too, and leaving alone what is quantized already.

    It captures with ``strict=False`` first and calibrates without autograd. With a recipe of ours the captured program
    itself is quantized, so that nothing has to be captured again; torchao's passes do it for other quantizers.

    Attributes:
        originals: what methods that were quantized by a recipe of ours were before.
    """

    def __init__(self, recipe: QuantizationRecipe, capture: Capture, progress: Progress) -> None:
        super().__init__(recipe)
        self._capture = capture
        self._progress = progress
        self.originals: dict[str, Original] = {}

    def run(self, artifact: PipelineArtifact) -> None:
        """Quantize every method; quantization-aware training is left to ExecuTorch's own stage."""
        recipe = self._quantization_recipe
        if not recipe.quantizers or recipe.is_qat:
            super().run(artifact)
            return
        examples = artifact.get_context("example_inputs")
        shapes = artifact.get_context("dynamic_shapes", {})
        quantized, programs = {}, dict[str, ExportedProgram]()
        for method, model in artifact.data.items():
            graph = model.graph if isinstance(model, (ExportedProgram, GraphModule)) else None
            if graph is not None and is_quantized(graph):
                quantized[method] = model
                continue
            from arm_backend_core.program import copied

            if isinstance(model, ExportedProgram):
                programs[method] = copied(model)
            else:
                programs[method] = self._capture(method, model, examples[method][0], shapes.get(method))
        with torch.no_grad():
            if self._is_ours():
                quantized |= self._quantize(programs, artifact.data, examples)
            else:
                for method, program in programs.items():
                    quantized[method] = self._quantize_by_torchao(method, program, examples[method])
        self._artifact = artifact.copy_with_new_data({method: quantized[method] for method in artifact.data})

    def _is_ours(self) -> bool:
        from arm_backend_core.quantizer.quantizer import ArmQuantizer

        recipe = self._quantization_recipe
        own = all(isinstance(quantizer, ArmQuantizer) for quantizer in recipe.quantizers)
        return own and len(recipe.quantizers) == 1 and not recipe.pre_prepare_passes and not recipe.post_convert_passes

    def _quantize(
        self, programs: Mapping[str, ExportedProgram], models: Mapping[str, Any], examples: Mapping[str, list[Inputs]]
    ) -> dict[str, ExportedProgram]:
        """Methods are calibrated one after the other, each going on from the state that the last one left."""
        from arm_backend_core.program import copied
        from arm_recipes.stages.bias import BiasCorrection
        from arm_recipes.stages.post_training import Common, Observed

        (quantizer,), common = list(self._quantization_recipe.quantizers or []), Common()
        captured = {method: copied(program) for method, program in programs.items()}
        observed = {method: Observed(program, quantizer, common) for method, program in programs.items()}
        if len(observed) > 1:
            observe_together(observed, models)
        corrections = [BiasCorrection(model) for model in observed.values()]
        for method, model in observed.items():
            self._calibrated(method, model, examples[method])
        for correction in corrections:
            correction.apply()
        quantized = {method: model.quantized() for method, model in observed.items()}
        for method, model in observed.items():
            self.originals[method] = Original(captured[method], model.floats, model.ranges)
        return quantized

    def _quantize_by_torchao(self, method: str, program: ExportedProgram, examples: list[Inputs]) -> GraphModule:
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

        recipe = self._quantization_recipe
        model = self._apply_passes(program.module(check_guards=False), recipe.pre_prepare_passes)
        model = prepare_pt2e(model, self._get_quantizer_for_prepare_pt2e(recipe.quantizers))
        model = self._calibrated(method, model, examples)
        return self._apply_passes(convert_pt2e(model), recipe.post_convert_passes)

    def _calibrated(self, method: str, model: Any, examples: list[Inputs]) -> Any:
        recipe = self._quantization_recipe
        model = self._apply_passes(model, recipe.post_prepare_passes)
        for sample in self._progress(_samples(recipe.calibration_inputs_fn, model, examples), method):
            model(*sample, **getattr(sample, "keywords", {}))
        return self._apply_passes(model, recipe.pre_convert_passes)


def _samples(source: Callable[[], Iterable[Any]] | None, model: GraphModule, examples: list[Inputs]) -> Iterable[Any]:
    if source is None:
        return examples
    return source.fitted(model) if isinstance(source, Calibration) else source()
