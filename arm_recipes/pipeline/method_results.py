"""Results of the stages for one method, its report, and notes on its 64-bit inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram

from arm_recipes.report.cpu_layer_costs import estimate_cpu_layers
from arm_recipes.report.lowered_program import collect_lowered_parts, count_quantized_tensors
from arm_recipes.report.record import MethodReport
from arm_recipes.runtime.tensor_info import TensorInfo
from arm_recipes.samples.call_inputs import InputSignature
from arm_recipes.samples.export_arguments import Examples
from arm_recipes.stages.quantize import FloatProgram

if TYPE_CHECKING:
    from arm_backend_core.compilation_log import RefusedOperator
    from arm_backend_core.targets.cortex_m import Processor

#: 64-bit dtypes, which TOSA does not support, and the names of the dtypes to use instead.
_SUPPORTED_DTYPES = {torch.int64: "int32", torch.float64: "float32"}


@dataclass
class MethodResults:
    """Results of the stages for one method.

    Attributes:
        program: the captured program, quantized if the recipe quantizes; None if the recipe's stages capture nothing.
        input_signature, out_spec: structure of the model's inputs and outputs.
        graph: the lowered graph, before emission edits it.
        inputs, outputs: tensors that the program takes and returns.
        float_program: the program before quantization, if this package quantized it.
        sqnr: SQNR of each output in dB, by name.
    """

    program: ExportedProgram | None = None
    input_signature: InputSignature | None = None
    out_spec: Any = None
    graph: torch.fx.GraphModule | None = None
    inputs: tuple[TensorInfo, ...] = ()
    outputs: tuple[TensorInfo, ...] = ()
    float_program: FloatProgram | None = None
    sqnr: dict[str, float] = field(default_factory=dict)

    def create_report(
        self,
        name: str,
        graph: torch.fx.GraphModule,
        refused: Sequence[RefusedOperator],
        samples: int | None,
        processor: Processor | None,
    ) -> MethodReport:
        """Describe the lowered method.

        Args:
            name: the method's name.
            graph: the lowered graph.
            refused: operators that the partitioner refused.
            samples: number of calibration samples; None if the pipeline did not calibrate.
            processor: the CPU, for estimates of cycles; None: no estimates.
        """
        from arm_recipes.stages.edge.check_kernels import find_not_runnable

        parts = collect_lowered_parts(graph, refused, processor)
        quantization = None if self.program is None else count_quantized_tensors(self.program, samples, self.sqnr)
        tensors, not_runnable = (self.inputs, self.outputs), find_not_runnable(graph.graph)
        return MethodReport(
            name,
            *tensors,
            quantization=quantization,
            not_runnable=not_runnable,
            cpu_layers=estimate_cpu_layers(name, graph, processor),
            **vars(parts),
        )

    def describe_64_bit_tensors(self, name: str, examples: Examples) -> Iterator[str]:
        """Yield a note for each 64-bit input and output, and for each int64 input whose samples have too large values.

        A value is too large if it is outside ``ASSUMED_INTERVAL``, the interval that the compiler assumes.

        Args:
            name: the method's name.
            examples: samples of each method.
        """
        if self.program is None:
            return
        nodes = {node.name: node for node in self.program.graph.nodes}
        signature = self.program.graph_signature
        for side, tensors in (("input", signature.user_inputs), ("output", signature.user_outputs)):
            for index, tensor in enumerate(tensors):
                value = nodes[tensor].meta.get("val") if tensor in nodes else None
                if not isinstance(value, torch.Tensor) or value.dtype not in _SUPPORTED_DTYPES:
                    continue
                is_int64_input = side == "input" and value.dtype is torch.int64
                yield (
                    f"{side} {index} ('{tensor}') of '{name}' is {str(value.dtype).removeprefix('torch.')}, which TOSA "
                    f"does not support: a CPU operator converts it; use {_SUPPORTED_DTYPES[value.dtype]} to avoid the "
                    "conversion" + ("; values are assumed to be below 2**30 in magnitude" if is_int64_input else "")
                )
                if is_int64_input:
                    yield from self._describe_large_values(name, index, tensor, examples)

    def _describe_large_values(self, method: str, index: int, tensor: str, examples: Examples) -> Iterator[str]:
        """Yield a note if the samples of an int64 input have values outside the interval that the compiler assumes."""
        from arm_backend_core.ops.intervals import ASSUMED_INTERVAL

        assert self.input_signature is not None
        values = [self.input_signature.flatten(sample, "a sample")[index] for sample in examples[method]]
        largest = max((int(x) for value in values if value.numel() for x in value.aminmax()), key=abs, default=0)
        if not ASSUMED_INTERVAL[0] <= largest <= ASSUMED_INTERVAL[1]:
            yield (
                f"input {index} ('{tensor}') of '{method}' has the value {largest} in the samples, but the program is "
                "exact only for magnitudes below 2**30: scale or split the values, or pass them in floating point"
            )
