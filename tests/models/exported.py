"""The zoo's models, exported once per recipe and kept while their tests run."""

from __future__ import annotations

from functools import cached_property

import torch
from executorch.export import ExportRecipe
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from arm_backend_core.nodes import is_dequantize, is_quantize
from arm_backend_core.program import user_inputs
from arm_backend_core.tosa import reference
from arm_recipes import ArmRecipeType, ExportResult, export
from tests.models import quantized_reference, zoo
from tests.models.quantized_reference import Judgement
from tests.sqnr import sqnr

_Q = torch.ops.quantized_decomposed
CALIBRATION = 4
HELD_OUT = {"resnet18": 2, "ds_cnn": 64, "transformer_encoder": 64, "tiny_vit": 16}
"""Samples that results are compared on if not 4: more where a model has few outputs, so that single values which are
rounded the other way move a ratio little, fewer where a sample takes seconds. The model was not calibrated with
them."""


def precision(recipe: ArmRecipeType) -> str:
    """``FP``, ``INT8``, ``A8W4`` or ``A16W8``."""
    return recipe.name.rsplit("_", 1)[1]


class Exported:
    """A model of the zoo with the results of its exports, each made when it is first asked for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entry = zoo.build(name, CALIBRATION + HELD_OUT.get(name, 4))
        self.held_out = self.entry.samples[CALIBRATION:]
        self._results: dict[ArmRecipeType, ExportResult] = {}
        self._outputs: dict[tuple[str | bytes, int], Tensor] = {}
        self._expected: dict[tuple[bytes, int], Tensor] = {}
        self._exact: dict[tuple[str, int], Tensor] = {}
        self._judges: dict[tuple[str, bool], quantized_reference.Judge] = {}
        self._judgements: dict[tuple[str, bool, int], Judgement] = {}

    @cached_property
    def eager(self) -> list[Tensor]:
        """What the model returns for each held-out sample."""
        with torch.no_grad():
            return [self.entry.model(*sample) for sample in self.held_out]

    def result(self, recipe: ArmRecipeType) -> ExportResult:
        """The export. The model is quantized once per precision: the quantizers are the same for all targets."""
        if recipe not in self._results:
            wanted = precision(recipe)
            quantized = next((r for t, r in self._results.items() if precision(t) == wanted != "FP"), None)
            model = self.entry.model if quantized is None else quantized.exported_programs["forward"]
            chosen = ExportRecipe.get_recipe(recipe)
            self._results[recipe] = export(model, chosen, self.entry.samples[:CALIBRATION])
        return self._results[recipe]

    def quantized(self, recipe: ArmRecipeType) -> ExportedProgram:
        """What the recipe lowered: PyTorch's own quantized graph."""
        return self.result(recipe).exported_programs["forward"]

    def output(self, recipe: ArmRecipeType, sample: int) -> Tensor:
        """What the program returns for a held-out sample in ExecuTorch's runtime, its delegate as TOSA graph."""
        result = self.result(recipe)
        flatbuffer = _flatbuffer(result), sample
        as_it_is = recipe.name.startswith("TOSA")
        key = (
            (recipe.name, sample) if as_it_is else flatbuffer
        )  # a reference program's flatbuffer need not be run twice
        if key not in self._outputs:
            output = result.run(*self.held_out[sample], backend=None if as_it_is else "tosa")
            self._outputs[key] = self._outputs[flatbuffer] = output
        return self._outputs[key]

    def sqnr(self, recipe: ArmRecipeType) -> float:
        """Signal to noise of the program against the model in floating point, in dB over all held-out samples."""
        return sqnr(self.eager, [self.output(recipe, i) for i in range(len(self.held_out))])

    def expected(self, recipe: ArmRecipeType, sample: int) -> Tensor:
        """What Arm's reference model computes for a held-out sample, without ExecuTorch's runtime.

        PyTorch's operators quantize the inputs and dequantize the output, as the quantized graph has them there.
        """
        key = _flatbuffer(self.result(recipe)), sample
        if key not in self._expected:
            program = self.quantized(recipe)
            given = zip(user_inputs(program), self.held_out[sample], strict=True)
            (array,) = reference.run(key[0], [_as_the_graph_has_it(node, x).numpy() for node, x in given])
            output = quantized_reference.output_node(program)
            result = torch.from_numpy(array)
            self._expected[key] = (
                _Q.dequantize_per_tensor(result, *output.args[1:]) if is_dequantize(output) else result
            )
        return self._expected[key]

    def exact(self, recipe: ArmRecipeType, sample: int) -> Tensor:
        """What PyTorch's quantized graph gives for a held-out sample when it is evaluated in float64."""
        key = precision(recipe), sample
        if key not in self._exact:
            self._exact[key] = quantized_reference.evaluate(self.quantized(recipe), *self.held_out[sample])
        return self._exact[key]

    def judgement(self, recipe: ArmRecipeType, sample: int, *, last: bool = False) -> Judgement:
        """What PyTorch's quantized graph says to a held-out sample, given the target's operands at every operator.

        Args:
            last: see ``quantized_reference.Judge``.
        """
        judge, key = (precision(recipe), last), (precision(recipe), last, sample)
        if judge not in self._judges:
            self._judges[judge] = quantized_reference.Judge(self.quantized(recipe), last=last)
        if key not in self._judgements:
            self._judgements[key] = self._judges[judge](*self.held_out[sample])
        return self._judgements[key]


def _flatbuffer(result: ExportResult) -> bytes:
    (delegate,) = result.report.delegates
    return delegate.tosa


def _as_the_graph_has_it(node: Node, x: Tensor) -> Tensor:
    """An input of the graph, quantized if the graph quantizes it."""
    quantize = next((user for user in node.users if is_quantize(user)), None)
    return x if quantize is None else _Q.quantize_per_tensor(x, *quantize.args[1:])


def tosa_spec(recipe: ArmRecipeType) -> str:
    """The profiles and extensions that a delegate of the recipe may use."""
    if precision(recipe) == "FP":
        return "TOSA-1.0+FP"
    extensions = "int16+int4" if precision(recipe) == "A8W4" else "int16"
    return f"TOSA-1.0+INT{'+FP' if recipe.name.startswith('VGF') else ''}+{extensions}"
