"""The quantization part of a recipe, and a quantization stage that captures faster than ExecuTorch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from executorch.export import QuantizationRecipe
from executorch.export.stages import PipelineArtifact, QuantizeStage
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantizer import Quantizer

from arm_backend_core.quantization.shared_observers import observe_together
from arm_recipes._internal.messages import AccuracyError, ExportError
from arm_recipes.recipe.options import ALGORITHMS
from arm_recipes.samples.calibration import Calibration, start_monitor, stop_monitor
from arm_recipes.samples.sample import Inputs
from arm_recipes.stages.capture.capture import Capture

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram

if TYPE_CHECKING:
    from arm_backend_core.quantization.ptq import ObservedProgram, SharedTensors

#: Marks the iteration over the calibration samples of a method with a progress bar, or returns it as it is.
Progress = Callable[[Iterable[Any], str], Iterable[Any]]


#: Attributes of a quantizer, all that ``ExportRecipe.combine`` keeps of a recipe: its improvements, and ``min_sqnr``.
_ALGORITHMS_ATTRIBUTE, _MIN_SQNR_ATTRIBUTE = "arm_recipes_improve", "arm_recipes_min_sqnr"


@dataclass
class AlgorithmRecipe(QuantizationRecipe):
    """A ``QuantizationRecipe`` that names the improvements that its stage makes.

    Attributes:
        algorithms: names, of ``options.ALGORITHMS``.
    """

    algorithms: Collection[str] = ALGORITHMS


def algorithms_of(recipe: QuantizationRecipe) -> Collection[str]:
    """Those that a recipe names; of one that was combined: that all which name some do; one of others has all."""
    if isinstance(recipe, AlgorithmRecipe):
        return recipe.algorithms
    named = [
        getattr(quantizer, _ALGORITHMS_ATTRIBUTE)
        for quantizer in recipe.quantizers or ()
        if hasattr(quantizer, _ALGORITHMS_ATTRIBUTE)
    ]
    return tuple(name for name in (named or [ALGORITHMS])[0] if all(name in names for names in named))


def quantization_recipe(
    quantizer: Quantizer,
    calibration: Any = None,
    algorithms: Collection[str] = ALGORITHMS,
    train: Any = None,
    min_sqnr: float | None = None,
) -> AlgorithmRecipe:
    """Quantization with ``quantizer``.

    Args:
        calibration: samples as ``Calibration`` takes them; None calibrates with the example inputs.
        algorithms: names of improvements.
        train: trains the prepared model that it is given; None quantizes after training.
        min_sqnr: dB that rounding must leave of each result, or None.
    """
    setattr(quantizer, _ALGORITHMS_ATTRIBUTE, algorithms)
    setattr(quantizer, _MIN_SQNR_ATTRIBUTE, min_sqnr)
    asked = {"qat": train, "min_sqnr": min_sqnr}
    refusals: list[Any] = [_Refusal(name) for name, value in asked.items() if value is not None]
    return AlgorithmRecipe(
        algorithms=algorithms,
        quantizers=[quantizer],
        calibration_inputs_fn=None if calibration is None else Calibration(calibration),
        post_prepare_passes=[start_monitor],
        pre_convert_passes=[stop_monitor],
        is_qat=train is not None,
        train_fn=train,
        pre_prepare_passes=refusals or None,
    )


@dataclass(frozen=True)
class _Refusal:
    """Pre-prepare pass that only ExecuTorch's own stage runs.

    It would train without rounding, and other weights, and knows of no signal-to-noise ratio.

    Attributes:
        name: of the option.
    """

    name: str

    def __call__(self, model: GraphModule) -> GraphModule:
        """Refuse.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{self.name}: with the recipe's own quantizer alone, and through arm_recipes.export alone")


@dataclass(frozen=True)
class SetTrainedRanges:
    """Pre-convert pass of a model that was trained: it has the ranges that were found, and no weight is changed.

    Attributes:
        give: gives the ranges to the observers of a calibrated program.
    """

    give: Callable[[ObservedProgram], None]

    def __call__(self, observed: Any) -> Any:
        """Give them."""
        self.give(observed)
        return observed


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
        float_programs: what methods that were quantized by a recipe of ours were before.
        output_sqnr: what rounding leaves of the results of these, see ``stages.output_sqnr``.
        notes: what the user is to be warned of.
    """

    def __init__(self, recipe: QuantizationRecipe, capture: Capture, progress: Progress) -> None:
        super().__init__(recipe)
        self._quantization_recipe: QuantizationRecipe = recipe
        self.capture = capture
        self._progress = progress
        self.float_programs: dict[str, FloatProgram] = {}
        self.output_sqnr: dict[str, dict[str, float]] = {}
        self.notes: list[str] = []

    def run(self, artifact: PipelineArtifact) -> None:
        """Quantize every method; training with another quantizer is left to ExecuTorch's own stage.

        Raises:
            ValueError: the model cannot be trained, or nothing says how.
        """
        recipe, examples = self._quantization_recipe, artifact.get_context("example_inputs")
        if not recipe.quantizers or (recipe.is_qat and not self.is_ours):
            super().run(artifact)
            return
        shapes = artifact.get_context("dynamic_shapes", {})
        quantized, programs = {}, dict[str, ExportedProgram]()
        for method, model in artifact.data.items():
            graph = model.graph if isinstance(model, (ExportedProgram, GraphModule)) else None
            if graph is not None and is_quantized(graph):
                self._require_known(method)
                quantized[method] = model
                continue
            from arm_backend_core.program import copied

            if isinstance(model, ExportedProgram):
                programs[method] = copied(model)
            else:
                programs[method] = self.capture(method, model, examples[method][0], shapes.get(method))
        with torch.no_grad():
            if self.is_ours:
                quantized |= self._quantize(programs, artifact.data, examples)
            else:
                for method, program in programs.items():
                    quantized[method] = self._quantize_by_torchao(method, program, examples[method])
        self._artifact = artifact.copy_with_new_data({method: quantized[method] for method in artifact.data})

    @property
    def recipe(self) -> QuantizationRecipe:
        """What it quantizes by."""
        return self._quantization_recipe

    @property
    def quantizers(self) -> list[Quantizer]:
        """Those of the recipe."""
        return list(self._quantization_recipe.quantizers or [])

    @property
    def is_ours(self) -> bool:
        """Whether the program itself is quantized, by a quantizer of ours alone."""
        from arm_backend_core.quantization.quantizer import ArmQuantizer

        recipe = self._quantization_recipe
        own = all(isinstance(quantizer, ArmQuantizer) for quantizer in self.quantizers)
        passes = [one for one in recipe.pre_prepare_passes or () if not isinstance(one, _Refusal)]
        return own and len(self.quantizers) == 1 and not passes and not recipe.post_convert_passes

    def insert_observers(
        self, program: ExportedProgram, common: SharedTensors | None = None, *, alone: bool = True
    ) -> ObservedProgram:
        """The program, which is edited, with observers where it will be quantized.

        Args:
            alone: it shares no observers with other methods.
        """
        from arm_backend_core.quantization.ptq import ObservedProgram

        (quantizer,) = self.quantizers
        algorithms = set(algorithms_of(self._quantization_recipe)) - (set() if alone else {"concat_scales"})
        return ObservedProgram(program, quantizer, common, algorithms)

    def _quantize(
        self, programs: Mapping[str, ExportedProgram], models: Mapping[str, Any], examples: Mapping[str, list[Inputs]]
    ) -> dict[str, ExportedProgram]:
        """Methods are calibrated one after the other, each going on from the state that the last one left."""
        from arm_backend_core.program import copied
        from arm_backend_core.quantization.algorithms.cross_layer_equalization import equalize
        from arm_backend_core.quantization.diagnostics.calibration_coverage import add_notes
        from arm_backend_core.quantization.ptq import SharedTensors

        common, passes = SharedTensors(), self._quantization_recipe.pre_convert_passes or ()
        algorithms = algorithms_of(self._quantization_recipe)
        trained = any(isinstance(one, SetTrainedRanges) for one in passes)
        if (
            "cross_layer_equalization" in algorithms and not trained and len(programs) == 1
        ):  # methods share their weights
            equalize(next(iter(programs.values())))
        captured = {method: copied(program) for method, program in programs.items()}
        alone = len(programs) == 1
        observed = {method: self.insert_observers(program, common, alone=alone) for method, program in programs.items()}
        if len(observed) > 1:
            observe_together(observed, models)
        corrections = [] if trained else _corrections(list(observed.values()), algorithms)
        for method, model in observed.items():
            self.calibrate(method, model, examples[method])
        for model in observed.values() if not trained else ():
            model.joins.apply()
        for correction in corrections:
            correction.apply()
        add_notes(observer for model in observed.values() for observer in model.observers.values())
        quantized = {}
        for method, model in observed.items():
            quantized[method] = model.quantized(partial(self._measure_sqnr, method))
            _check_results(method, captured[method], quantized[method])
            self.float_programs[method] = FloatProgram(captured[method], model.floats, model.ranges)
        return quantized

    def _measure_sqnr(self, method: str, model: ObservedProgram) -> None:
        from arm_backend_core.quantization.diagnostics.output_sqnr import LEAST, describe_losses, output_sqnr

        with model.last.undone():  # other methods go on from these buffers
            self.output_sqnr[method] = found = output_sqnr(model) if model.samples else {}
            if not found:
                self._require_known(method)
            elif min(found.values()) < max(self._min_sqnr, LEAST):
                text = describe_losses(model, method, found)
                if min(found.values()) < self._min_sqnr:
                    raise AccuracyError(f"min_sqnr={self._min_sqnr:g}: {text}")
                self.notes.append(text)

    @property
    def _min_sqnr(self) -> float:
        """``min_sqnr`` of the recipe; less than any where it has none."""
        return max(getattr(quantizer, _MIN_SQNR_ATTRIBUTE, None) or -math.inf for quantizer in self.quantizers)

    def _require_known(self, method: str) -> None:
        """Raise NoisyError where the recipe has a ``min_sqnr``, which cannot be checked."""
        if self._min_sqnr > 0:
            raise AccuracyError(
                f"min_sqnr={self._min_sqnr:g}: what rounding leaves of the results of '{method}' is not known; it is "
                "where the model is quantized here, results are of floating point, and it has no loops, draws no "
                "random numbers, and finds no indices or sizes in numbers that are rounded: leave min_sqnr out, and "
                "see result.compare(samples)"
            )

    def _quantize_by_torchao(self, method: str, program: ExportedProgram, examples: list[Inputs]) -> GraphModule:
        from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

        from arm_backend_core.quantization.torchao_convert import converted

        recipe = self._quantization_recipe
        model = self._apply_passes(program.module(check_guards=False), recipe.pre_prepare_passes)
        model = prepare_pt2e(model, self._get_quantizer_for_prepare_pt2e(recipe.quantizers))
        model = self.calibrate(method, model, examples)
        return self._apply_passes(converted(model), recipe.post_convert_passes)

    def calibrate(self, method: str, model: Any, examples: list[Inputs]) -> Any:
        """Run the samples through a prepared model."""
        recipe = self._quantization_recipe
        model = self._apply_passes(model, recipe.post_prepare_passes)
        for sample in self._progress(_samples(recipe.calibration_inputs_fn, model, examples), method):
            model(*sample, **getattr(sample, "keywords", {}))
        return self._apply_passes(model, recipe.pre_convert_passes)


def _check_results(method: str, captured: ExportedProgram, quantized: ExportedProgram) -> None:
    """Quantization leaves shapes and dtypes of results as they were.

    Raises:
        ExportError: it does not.
    """
    wanted, made = _results(captured), _results(quantized)
    if wanted != made:
        raise ExportError(
            f"quantizing '{method}' made {made} of its results {wanted}: "
            "a fault of this compiler, which should be reported"
        )


def _results(program: ExportedProgram) -> list[str]:
    nodes = {node.name: node for node in program.graph.nodes}
    values = [nodes[name].meta["val"] for name in program.graph_signature.user_outputs if name in nodes]
    return [f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in values if isinstance(x, torch.Tensor)]


def _corrections(observed: list[Any], algorithms: Collection[str]) -> list[Any]:
    """What edits a program after its samples, in this order; ``observed`` watch for them from now on."""
    from arm_backend_core.quantization.algorithms.bias_correction import BiasCorrection
    from arm_backend_core.quantization.algorithms.gptq import Gptq

    corrections: list[Any] = []
    if "gptq" in algorithms and len(observed) == 1:  # methods share their weights
        corrections = [Gptq(model, centred="bias_correction" in algorithms) for model in observed]
    return corrections + ([BiasCorrection(observed)] if "bias_correction" in algorithms else [])


def _samples(source: Callable[[], Iterable[Any]] | None, model: GraphModule, examples: list[Inputs]) -> Iterable[Any]:
    if source is None:
        return examples
    return source.fit_batches(model) if isinstance(source, Calibration) else source()


@dataclass(frozen=True)
class FloatProgram:
    """A method before it was quantized by us.

    Attributes:
        program: as it was captured.
        floats: constants that are quantized, by the name that the quantized program's signature has for them.
        ranges: the least and the largest value that calibration saw, by the name of the quantize operator.
    """

    program: ExportedProgram
    floats: Mapping[str, Tensor]
    ranges: Mapping[str, tuple[float, float]]
