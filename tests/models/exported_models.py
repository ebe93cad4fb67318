"""Exported models of the zoo: each is exported once per recipe, and the results are cached for all tests."""

from __future__ import annotations

from functools import cached_property

import torch
from executorch.export import ExportRecipe
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from arm_backend_core.nodes import is_dequantize, is_quantize
from arm_backend_core.program import user_inputs
from arm_backend_core.tosa import reference_model
from arm_recipes import ArmRecipeType, ExportResult, export
from tests.models import quantized_reference, zoo
from tests.models.quantized_reference import OperatorComparison
from tests.sqnr import sqnr

_Q = torch.ops.quantized_decomposed
CALIBRATION_SAMPLES = 4
TEST_SAMPLE_COUNTS = {"resnet18": 2, "ds_cnn": 64, "transformer_encoder": 256, "tiny_vit": 16}
"""Number of test samples, 4 for other models. The models were not calibrated with them. A model with few outputs has
more, so that a single value that is rounded differently changes the SQNR little. A model whose samples take seconds
has fewer."""


def precision(recipe: ArmRecipeType) -> str:
    """Return the precision of a recipe: ``FP``, ``INT8``, ``A8W4`` or ``A16W8``."""
    return recipe.name.rsplit("_", 1)[1]


class ExportedModel:
    """A model of the zoo with the results of its exports. Each result is computed on first use and cached."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entry = zoo.build(name, CALIBRATION_SAMPLES + TEST_SAMPLE_COUNTS.get(name, 4))
        self.test_samples = self.entry.samples[CALIBRATION_SAMPLES:]
        self._results: dict[ArmRecipeType, ExportResult] = {}
        self._outputs: dict[tuple[str | bytes, int], Tensor] = {}
        self._expected: dict[tuple[bytes, int], Tensor] = {}
        self._exact: dict[tuple[str, int], Tensor] = {}
        self._comparers: dict[tuple[str, bool], quantized_reference.OperatorComparer] = {}
        self._comparisons: dict[tuple[str, bool, int], OperatorComparison] = {}

    @cached_property
    def eager(self) -> list[Tensor]:
        """Outputs of the PyTorch model for the test samples."""
        with torch.no_grad():
            return [self.entry.model(*sample) for sample in self.test_samples]

    def result(self, recipe: ArmRecipeType) -> ExportResult:
        """Export the model. It is quantized once per precision, because all targets have the same quantizer."""
        if recipe not in self._results:
            wanted_precision = precision(recipe)
            quantized = next((r for t, r in self._results.items() if precision(t) == wanted_precision != "FP"), None)
            model = self.entry.model if quantized is None else quantized.exported_programs["forward"]
            chosen_recipe = ExportRecipe.get_recipe(recipe)
            self._results[recipe] = export(model, chosen_recipe, self.entry.samples[:CALIBRATION_SAMPLES])
        return self._results[recipe]

    def quantized(self, recipe: ArmRecipeType) -> ExportedProgram:
        """Return PyTorch's quantized graph, which the recipe lowered."""
        return self.result(recipe).exported_programs["forward"]

    def output(self, recipe: ArmRecipeType, sample: int) -> Tensor:
        """Run the program on a test sample in ExecuTorch's runtime, with the TOSA graph as the delegate."""
        result = self.result(recipe)
        flatbuffer = _flatbuffer(result), sample
        is_tosa_recipe = recipe.name.startswith("TOSA")
        key = (
            (recipe.name, sample) if is_tosa_recipe else flatbuffer
        )  # two recipes with the same flatbuffer share the output
        if key not in self._outputs:
            output = result.run(*self.test_samples[sample], backend=None if is_tosa_recipe else "tosa")
            self._outputs[key] = self._outputs[flatbuffer] = output
        return self._outputs[key]

    def sqnr(self, recipe: ArmRecipeType) -> float:
        """Compute the SQNR of the program against the float model over all test samples, in dB."""
        return sqnr(self.eager, [self.output(recipe, i) for i in range(len(self.test_samples))])

    def reference_output(self, recipe: ArmRecipeType, sample: int) -> Tensor:
        """Run the TOSA reference model on a test sample, without ExecuTorch's runtime.

        PyTorch quantizes the inputs and dequantizes the output, as in the quantized graph.
        """
        key = _flatbuffer(self.result(recipe)), sample
        if key not in self._expected:
            program = self.quantized(recipe)
            inputs = zip(user_inputs(program), self.test_samples[sample], strict=True)
            (array,) = reference_model.run(key[0], [_quantize_input(node, x).numpy() for node, x in inputs])
            output = quantized_reference.find_output_node(program)
            result = torch.from_numpy(array)
            self._expected[key] = (
                _Q.dequantize_per_tensor(result, *output.args[1:]) if is_dequantize(output) else result
            )
        return self._expected[key]

    def float64_output(self, recipe: ArmRecipeType, sample: int) -> Tensor:
        """Evaluate PyTorch's quantized graph on a test sample in float64."""
        key = precision(recipe), sample
        if key not in self._exact:
            self._exact[key] = quantized_reference.evaluate(self.quantized(recipe), *self.test_samples[sample])
        return self._exact[key]

    def compare_operators(self, recipe: ArmRecipeType, sample: int, *, last: bool = False) -> OperatorComparison:
        """Compare each operator with PyTorch's quantized graph on a test sample, both with the target's operands.

        Args:
            last: see ``quantized_reference.OperatorComparer``.
        """
        comparer, key = (precision(recipe), last), (precision(recipe), last, sample)
        if comparer not in self._comparers:
            self._comparers[comparer] = quantized_reference.OperatorComparer(self.quantized(recipe), last=last)
        if key not in self._comparisons:
            self._comparisons[key] = self._comparers[comparer](*self.test_samples[sample])
        return self._comparisons[key]


def _flatbuffer(result: ExportResult) -> bytes:
    (delegate,) = result.report.delegates
    return delegate.tosa


def _quantize_input(node: Node, x: Tensor) -> Tensor:
    """Quantize an input if the graph quantizes it."""
    quantize = next((user for user in node.users if is_quantize(user)), None)
    return x if quantize is None else _Q.quantize_per_tensor(x, *quantize.args[1:])


def tosa_spec(recipe: ArmRecipeType) -> str:
    """Return the TOSA profiles and extensions that a delegate of the recipe may use."""
    if precision(recipe) == "FP":
        return "TOSA-1.0+FP"
    extensions = "int16+int4" if precision(recipe) == "A8W4" else "int16"
    return f"TOSA-1.0+INT{'+FP' if recipe.name.startswith('VGF') else ''}+{extensions}"
