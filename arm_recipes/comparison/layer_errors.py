"""Errors of each layer in a comparison, from the error sums of all samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from arm_backend_core.quantization.diagnostics.error_metrics import (
    ErrorSums,
    IsolatedErrorSums,
    decibels,
    sum_errors,
    sum_isolated_errors,
)
from arm_recipes.comparison.compared_tensors import ComparedTensor
from arm_recipes.comparison.diagnosis import LayerDiagnosis, QuantizedConstant
from arm_recipes.comparison.interpreter_plan import InterpreterPlan, dequantize_constant
from arm_recipes.comparison.result import WORST_COUNT, IsolatedError, LayerComparison
from arm_recipes.comparison.worker_job import ProgramSpec, SampleResult, measure_layer_sensitivity
from arm_recipes.stages.quantize import FloatProgram

#: Maximum number of samples for measuring layer sensitivity: the SQNR of the model's output with only one layer
#: quantized.
_MAX_SENSITIVITY_SAMPLES = 4


def _compare_layer(
    tensor: ComparedTensor, error_sums: Sequence[ErrorSums], provided: frozenset[str]
) -> LayerComparison:
    return LayerComparison(
        name=tensor.node,
        operator=tensor.operator,
        module=tensor.module,
        source=tensor.source,
        dtype=tensor.dtype,
        scale=tensor.qparams.scale if tensor.qparams else None,
        zero_point=tensor.qparams.zero_point if tensor.qparams else None,
        moves=tensor.is_lossless,
        value_source="program" if tensor.name in provided else "PyTorch",
        gap=sum_errors(error_sums).metrics,
    )


def compute_layer_errors(
    spec: ProgramSpec,
    results: Sequence[SampleResult],
    original: FloatProgram | None,
    inputs: Sequence[Sequence[torch.Tensor]],
    higher_precision: str,
) -> list[LayerComparison]:
    """Compute the errors of a program's layers against the floating-point model, with causes and remedies.

    Args:
        spec: the program.
        results: results of the samples.
        original: the model before quantization; None if this export did not quantize it.
        inputs: input tensors of each sample for which layers are compared.
        higher_precision: the precision above int8 that the advice suggests, for example "A16W8".
    """
    plan = spec.plan
    if plan is None:
        return []
    output_sqnr = _measure_sensitivities(plan, results, inputs)
    provided, ranges = spec.provided_tensors, original.ranges if original is not None else {}
    gaps = []
    for compared in plan.tensors:
        error_sums = [result.layers[compared.name] for result in results if compared.name in result.layers]
        if not error_sums:
            continue
        gap = _compare_layer(compared, error_sums, provided)
        errors = _isolated_errors(compared, results)
        if compared.qparams is not None and errors.count:
            weights = tuple(_describe_constant(plan, name, original) for name in compared.weights)
            calibrated = ranges.get(compared.name)
            isolated = IsolatedError(
                sqnr=decibels(errors.signal, errors.noise),
                max_error=errors.max_error,
                clipped=errors.clipped / errors.count,
                range=compared.qparams.bounds,
                values=(errors.low, errors.high),
                calibrated=calibrated,
                p999=errors.p999,
                output=output_sqnr.get(compared.name),
                advice=LayerDiagnosis(
                    *(errors, compared.qparams, compared.has_fixed_qparams, calibrated, weights, compared.consumers),
                    higher_precision,
                ).advice,
            )
            gap = replace(gap, isolated=isolated, weights=weights)
        gaps.append(gap)
    return gaps


def _isolated_errors(tensor: ComparedTensor, results: Sequence[SampleResult]) -> IsolatedErrorSums:
    return sum_isolated_errors(result.isolated[tensor.name] for result in results if tensor.name in result.isolated)


def _measure_sensitivities(
    plan: InterpreterPlan, results: Sequence[SampleResult], inputs: Sequence[Sequence[torch.Tensor]]
) -> dict[str, float]:
    """Measure the SQNR of the first floating-point output with only one layer quantized at a time.

    Returns:
        ``{tensor name: SQNR in dB}`` for the layers with the lowest isolated SQNR. Empty if the model has state or no
        floating-point output.
    """
    if plan.has_state:
        return {}
    errors_by_tensor = {compared: _isolated_errors(compared, results) for compared in plan.tensors}
    sqnr_by_tensor = {
        compared: decibels(errors.signal, errors.noise) for compared, errors in errors_by_tensor.items() if errors.count
    }
    worst = sorted(sqnr_by_tensor, key=lambda compared: sqnr_by_tensor[compared])[:WORST_COUNT]
    sums: dict[str, list[ErrorSums]] = {compared.name: [] for compared in worst}
    for sample in inputs[:_MAX_SENSITIVITY_SAMPLES]:
        for name, part in measure_layer_sensitivity(plan, worst, sample).items():
            sums[name].append(part)
    return {name: sum_errors(parts).metrics.sqnr for name, parts in sums.items() if parts}


def _describe_constant(plan: InterpreterPlan, name: str, original: FloatProgram | None) -> QuantizedConstant:
    step, dequantized = dequantize_constant(plan, name)
    original_values = plan.float_constants[name]
    quant_min, quant_max = step.args[-3:-1]
    parameters = {} if original is None else original.program.graph_signature.inputs_to_parameters
    node = name.removesuffix("_quantized")
    # Folding a batch normalization into a layer appends "_" to the name of the weight.
    node = node if node in parameters else node.rstrip("_")
    return QuantizedConstant(
        parameters.get(node, node),
        quant_max - quant_min + 1,
        "per_channel" in str(step.target),
        ErrorSums.of(original_values, dequantized).metrics.sqnr,
    )


def compute_program_layer_errors(spec: ProgramSpec, results: Sequence[SampleResult]) -> list[LayerComparison]:
    """Compute the errors of a program's layers against those of another program with the same node name and shape."""
    gaps, provided = {}, spec.provided_tensors
    for compared in spec.plan.tensors if spec.plan is not None else ():
        error_sums = [result.layers[compared.node] for result in results if compared.node in result.layers]
        if error_sums:
            gaps[compared.node] = _compare_layer(compared, error_sums, provided)
    return list(gaps.values())
