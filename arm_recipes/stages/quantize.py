"""Quantization stage of an export, which replaces ExecuTorch's stage, and the quantization part of a recipe."""

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

from arm_recipes._internal.errors import AccuracyError, ExportError
from arm_recipes.recipe.options import ALGORITHMS
from arm_recipes.samples.calibration import Calibration, input_signature_of, start_monitor, stop_monitor
from arm_recipes.samples.call_inputs import Inputs
from arm_recipes.stages.capture.buffer_aliases import merge_buffer_aliases
from arm_recipes.stages.capture.capture import Capture, mark_shared_state, simplify_graph

if TYPE_CHECKING:
    from torch import Tensor

    from arm_backend_core.quantization.ptq import ObservedProgram, SharedTensors
    from arm_backend_core.quantization.quantizer import ArmQuantizer

#: A function (samples, method name) that wraps calibration samples in a progress bar, or returns them unchanged.
TrackSamples = Callable[[Iterable[Any], str], Iterable[Any]]


@dataclass
class AlgorithmRecipe(QuantizationRecipe):
    """A ``QuantizationRecipe`` with the quantization algorithms that its stage applies.

    Attributes:
        algorithms: names from ``options.ALGORITHMS`` and ``options.OPT_IN_ALGORITHMS``.
    """

    algorithms: Collection[str] = ALGORITHMS


def recipe_algorithms(recipe: QuantizationRecipe) -> Collection[str]:
    """Return the algorithms of a recipe.

    A combined recipe has the algorithms that are common to its quantizers of this package. A recipe without such a
    quantizer has the default algorithms.
    """
    if isinstance(recipe, AlgorithmRecipe):
        return recipe.algorithms
    by_quantizer = [quantizer.algorithms for quantizer in _arm_quantizers(recipe.quantizers or ())]
    selected = [names for names in by_quantizer if names is not None]
    return tuple(name for name in (selected or [ALGORITHMS])[0] if all(name in names for names in selected))


def _arm_quantizers(quantizers: Iterable[Quantizer]) -> list[ArmQuantizer]:
    """Return the quantizers of this package. A recipe may combine them with quantizers of other backends."""
    from arm_backend_core.quantization.quantizer import ArmQuantizer

    return [quantizer for quantizer in quantizers if isinstance(quantizer, ArmQuantizer)]


def make_quantization_recipe(
    quantizer: ArmQuantizer,
    calibration: Any = None,
    algorithms: Collection[str] = ALGORITHMS,
    train: Any = None,
    min_sqnr: float | None = None,
) -> AlgorithmRecipe:
    """Build the quantization part of a recipe.

    Args:
        quantizer: the quantizer, which also stores the algorithms and ``min_sqnr``.
        calibration: samples as in ``Calibration``; None calibrates with the export's samples.
        algorithms: names of quantization algorithms.
        train: function that trains the prepared model; None for post-training quantization.
        min_sqnr: minimum SQNR of each output in dB, or None.
    """
    quantizer.algorithms, quantizer.min_sqnr = algorithms, min_sqnr
    options = {"qat": train, "min_sqnr": min_sqnr}
    refusals: list[Any] = [_RejectOption(name) for name, value in options.items() if value is not None]
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
class _RejectOption:
    """Pre-prepare pass that rejects an option: ``qat`` or ``min_sqnr``.

    With a single ``ArmQuantizer``, ``FastQuantizeStage`` supports these options and skips this pass. Otherwise the pass
    runs, because ExecuTorch's stage and torchao support neither this package's training nor an SQNR limit.

    Attributes:
        name: name of the option.
    """

    name: str

    def __call__(self, model: GraphModule) -> GraphModule:
        """Reject the option.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{self.name}: needs arm_recipes.export, and the recipe's quantizer as the only quantizer")


@dataclass(frozen=True)
class SetTrainedRanges:
    """Pre-convert pass of a trained model: set the trained ranges. The weights are not changed.

    Attributes:
        apply: function that sets the ranges of the observers of a calibrated program.
    """

    apply: Callable[[ObservedProgram], None]

    def __call__(self, observed: Any) -> Any:
        """Set the ranges."""
        self.apply(observed)
        return observed


def is_quantized(graph: torch.fx.Graph) -> bool:
    """Whether a graph contains quantize or dequantize operators."""
    return any(
        node.op == "call_function" and getattr(node.target, "namespace", None) == "quantized_decomposed"
        for node in graph.nodes
    )


class FastQuantizeStage(QuantizeStage):
    """A faster replacement of ExecuTorch's quantization stage. It accepts exported programs and skips quantized models.

    The stage captures models with ``Capture`` and calibrates without autograd. With a quantizer of this package, the
    captured program itself is quantized, so no second capture is needed. Other quantizers use torchao's passes.

    Attributes:
        float_programs: programs before quantization, for the methods that this package's quantizer quantized.
        output_sqnr: SQNR of each output in dB, by method (``quantization.diagnostics.output_sqnr``).
        notes: warnings for the user.
    """

    def __init__(self, recipe: QuantizationRecipe, capture: Capture, progress: TrackSamples) -> None:
        super().__init__(recipe)
        self._quantization_recipe: QuantizationRecipe = recipe
        self.capture = capture
        self._progress = progress
        self.float_programs: dict[str, FloatProgram] = {}
        self.output_sqnr: dict[str, dict[str, float]] = {}
        self.notes: list[str] = []

    def run(self, artifact: PipelineArtifact) -> None:
        """Quantize every method.

        ExecuTorch's own stage runs instead if there are no quantizers, or for training with other quantizers.

        Raises:
            ValueError: the recipe has ``qat`` or ``min_sqnr``, and its quantizers do not support this option; or a
                recipe of another package trains without ``train_fn``.
            AccuracyError: an output has a lower SQNR than ``min_sqnr``, or its SQNR cannot be computed.
            ExportError: the methods cannot share a buffer.
        """
        recipe, examples = self._quantization_recipe, artifact.get_context("example_inputs")
        if not recipe.quantizers or (recipe.is_qat and not self.has_single_arm_quantizer):
            super().run(artifact)
            return
        shapes = artifact.get_context("dynamic_shapes", {})
        quantized, programs = {}, dict[str, ExportedProgram]()
        for method, model in artifact.data.items():
            graph = model.graph if isinstance(model, (ExportedProgram, GraphModule)) else None
            if graph is not None and is_quantized(graph):
                self._reject_min_sqnr(method)
                quantized[method] = model
                continue
            from arm_backend_core.program import copy_program

            if isinstance(model, ExportedProgram):
                program = copy_program(model)
                simplify_graph(program)
                programs[method] = merge_buffer_aliases(program)
            else:
                programs[method] = self.capture(method, model, examples[method][0], shapes.get(method))
        programs = mark_shared_state(programs)  # needs the modules' own buffers; calibration copies them
        with torch.no_grad():
            if self.has_single_arm_quantizer:
                quantized |= self._quantize(programs, artifact.data, examples)
            else:
                for method, program in programs.items():
                    quantized[method] = self._quantize_by_torchao(method, program, examples[method])
        self._artifact = artifact.copy_with_new_data({method: quantized[method] for method in artifact.data})

    @property
    def recipe(self) -> QuantizationRecipe:
        """The quantization recipe of the stage."""
        return self._quantization_recipe

    @property
    def quantizers(self) -> list[Quantizer]:
        """The quantizers of the recipe."""
        return list(self._quantization_recipe.quantizers or [])

    @property
    def has_single_arm_quantizer(self) -> bool:
        """Whether this package quantizes the captured program itself.

        The only quantizer must be an ``ArmQuantizer``. The recipe must not have pre-prepare passes other than
        ``_RejectOption``, and no post-convert passes.
        """
        from arm_backend_core.quantization.quantizer import ArmQuantizer

        recipe = self._quantization_recipe
        are_arm_quantizers = all(isinstance(quantizer, ArmQuantizer) for quantizer in self.quantizers)
        passes = [pass_ for pass_ in recipe.pre_prepare_passes or () if not isinstance(pass_, _RejectOption)]
        return are_arm_quantizers and len(self.quantizers) == 1 and not passes and not recipe.post_convert_passes

    def insert_observers(
        self, program: ExportedProgram, shared_tensors: SharedTensors | None = None, *, is_single_method: bool = True
    ) -> ObservedProgram:
        """Insert observers into a program.

        Args:
            program: the program, which is edited.
            shared_tensors: tensors that several methods share.
            is_single_method: False disables ``concat_scales``, because several methods may share observers.
        """
        from arm_backend_core.quantization.ptq import ObservedProgram

        (quantizer,) = self.quantizers
        algorithms = set(recipe_algorithms(self._quantization_recipe)) - (
            set() if is_single_method else {"concat_scales"}
        )
        return ObservedProgram(program, quantizer, shared_tensors, algorithms)

    def _quantize(
        self, programs: Mapping[str, ExportedProgram], models: Mapping[str, Any], examples: Mapping[str, list[Inputs]]
    ) -> dict[str, ExportedProgram]:
        """Calibrate the methods in order, each with the buffer values that its predecessor left, and quantize them."""
        from arm_backend_core import compilation_log
        from arm_backend_core.aten.constant_folding import fold_constant_weights_of_program
        from arm_backend_core.program import copy_program
        from arm_backend_core.quantization.algorithms.cross_layer_equalization import equalize
        from arm_backend_core.quantization.cross_method_observers import share_observers_across_methods
        from arm_backend_core.quantization.diagnostics.calibration_coverage import find_coverage_problems
        from arm_backend_core.quantization.ptq import SharedTensors
        from arm_backend_core.quantization.state_observers import InterleavedCalibration

        for program in programs.values():
            fold_constant_weights_of_program(program)
        shared_tensors, passes = SharedTensors(), self._quantization_recipe.pre_convert_passes or ()
        algorithms = recipe_algorithms(self._quantization_recipe)
        is_trained = any(isinstance(pass_, SetTrainedRanges) for pass_ in passes)
        if (
            "cross_layer_equalization" in algorithms and not is_trained and len(programs) == 1
        ):  # several methods may share their weights
            equalize(next(iter(programs.values())))
        captured = {method: copy_program(program) for method, program in programs.items()}
        is_single_method = len(programs) == 1
        observed = {
            method: self.insert_observers(program, shared_tensors, is_single_method=is_single_method)
            for method, program in programs.items()
        }
        if len(observed) > 1:
            share_observers_across_methods(observed, models)
        corrections = [] if is_trained else _create_corrections(list(observed.values()), algorithms)
        interleaved = InterleavedCalibration({method: (model, examples[method]) for method, model in observed.items()})
        for method, model in observed.items():
            self.calibrate(
                method, model, examples[method], partial(interleaved.run, method) if not is_single_method else None
            )
        for model in observed.values() if not is_trained else ():
            model.concat_scales.apply()
        for correction in corrections:
            correction.apply()
        observers = (observer for model in observed.values() for observer in model.observers.values())
        compilation_log.current_log().notes += find_coverage_problems(observers)
        quantized = {}
        for method, model in observed.items():
            quantized[method] = model.convert(partial(self._measure_sqnr, method))
            _check_output_types(method, captured[method], quantized[method])
            self.float_programs[method] = FloatProgram(captured[method], model.float_constants, model.ranges)
        return quantized

    def _measure_sqnr(self, method: str, model: ObservedProgram) -> None:
        from arm_backend_core.quantization.diagnostics import output_sqnr

        with model.preserve_states():  # restores the buffers, because other methods start from their values
            self.output_sqnr[method] = sqnr = output_sqnr.measure_output_sqnr(model) if model.sample_count else {}
            if not sqnr:
                self._reject_min_sqnr(method)
            elif min(sqnr.values()) < max(self._min_sqnr, output_sqnr.MIN_SQNR_DB):
                text = output_sqnr.describe_output_sqnr(model, method, sqnr)
                if min(sqnr.values()) < self._min_sqnr:
                    raise AccuracyError(f"min_sqnr={self._min_sqnr:g}: {text}")
                self.notes.append(text)

    @property
    def _min_sqnr(self) -> float:
        """``min_sqnr`` of the recipe in dB; minus infinity if it is not set."""
        return max(
            (quantizer.min_sqnr or -math.inf for quantizer in _arm_quantizers(self.quantizers)), default=-math.inf
        )

    def _reject_min_sqnr(self, method: str) -> None:
        """Raise ``AccuracyError`` if the recipe has a ``min_sqnr``, because the SQNR cannot be computed."""
        if self._min_sqnr > 0:
            raise AccuracyError(
                f"min_sqnr={self._min_sqnr:g}: the SQNR of the outputs of '{method}' cannot be computed. This needs a "
                "model that this export quantizes, with floating-point outputs, and without loops, random numbers, "
                "or indices or sizes computed from quantized values: remove min_sqnr, and use result.compare(samples)"
            )

    def _quantize_by_torchao(self, method: str, program: ExportedProgram, examples: list[Inputs]) -> GraphModule:
        from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

        from arm_backend_core.quantization.torchao_convert import convert

        recipe = self._quantization_recipe
        model = self._apply_passes(program.module(check_guards=False), recipe.pre_prepare_passes)
        model = prepare_pt2e(model, self._get_quantizer_for_prepare_pt2e(recipe.quantizers))
        model = self.calibrate(method, model, examples)
        return self._apply_passes(convert(model), recipe.post_convert_passes)

    def calibrate(
        self, method: str, model: Any, examples: list[Inputs], after_sample: Callable[[], None] | None = None
    ) -> Any:
        """Run the samples through a prepared model, and call ``after_sample`` after each sample."""
        recipe = self._quantization_recipe
        model = self._apply_passes(model, recipe.post_prepare_passes)
        for sample in self._progress(_calibration_samples(recipe.calibration_inputs_fn, model, examples), method):
            model(*sample, **getattr(sample, "keywords", {}))
            if after_sample is not None:
                after_sample()
        return self._apply_passes(model, recipe.pre_convert_passes)


def _check_output_types(method: str, captured: ExportedProgram, quantized: ExportedProgram) -> None:
    """Check that quantization preserves shapes and dtypes of the outputs.

    Raises:
        ExportError: an output has another shape or dtype.
    """
    expected, actual = _output_types(captured), _output_types(quantized)
    if expected != actual:
        raise ExportError(
            f"quantizing '{method}' changed its outputs from {expected} to {actual}: "
            "this is a bug of the compiler, please report it"
        )


def _output_types(program: ExportedProgram) -> list[str]:
    nodes = {node.name: node for node in program.graph.nodes}
    values = [nodes[name].meta["val"] for name in program.graph_signature.user_outputs if name in nodes]
    return [f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in values if isinstance(x, torch.Tensor)]


def _create_corrections(observed: list[Any], algorithms: Collection[str]) -> list[Any]:
    """Create the algorithms to apply after calibration, in order. Their observers are inserted into ``observed``."""
    from arm_backend_core.quantization.algorithms.bias_correction import BiasCorrection
    from arm_backend_core.quantization.algorithms.gptq import Gptq

    corrections: list[Any] = []
    if "gptq" in algorithms and len(observed) == 1:  # several methods may share their weights
        corrections = [Gptq(model, centered="bias_correction" in algorithms) for model in observed]
    return corrections + ([BiasCorrection(observed)] if "bias_correction" in algorithms else [])


def _calibration_samples(
    source: Callable[[], Iterable[Any]] | None, model: GraphModule, examples: list[Inputs]
) -> Iterable[Any]:
    if source is None:
        return examples
    return source.rebatch(input_signature_of(model)) if isinstance(source, Calibration) else source()


@dataclass(frozen=True)
class FloatProgram:
    """A method before quantization.

    Attributes:
        program: the captured program.
        float_constants: values of constants before quantization, by name in the quantized program's signature.
        ranges: minimum and maximum of the calibration values, by the name of the quantize operator.
    """

    program: ExportedProgram
    float_constants: Mapping[str, Tensor]
    ranges: Mapping[str, tuple[float, float]]
