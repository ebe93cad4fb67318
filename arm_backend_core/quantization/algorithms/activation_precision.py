"""Activation precision (mixed precision): finer quantization of attention weights, model outputs and angles.

The pass changes annotations, before the quantizer inserts observers.

- ``attention_scales``: softmax results that only products or sums read (attention weights, soft-argmax) stay int8, with
  a calibrated scale. The fixed scale 1/256 of a softmax would lose most of their information, because many attention
  weights are small.
- ``int16_outputs``: a model output becomes int16 if no operator reads it and its producer ends in a RESCALE. A
  RESCALE to int16 takes as many cycles as a RESCALE to int8, and model outputs are converted to float anyway.
- ``int16_angles``: operands of sine and cosine that are products with constant frequencies become int16, and so do
  the two factors. Such angles (timesteps of diffusion models, positional embeddings) span many periods, and 256
  levels cannot represent a range of a thousand radians.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torchao.quantization.pt2e.quantizer import (
    FixedQParamsQuantizationSpec,
    QuantizationSpec,
)

from arm_backend_core.aten.constant_folding import Constants
from arm_backend_core.fusion.rules import find_consumer_fused_into_accumulator
from arm_backend_core.nodes import INTERVAL, is_float, overload_of
from arm_backend_core.ops.catalog import find_record, has_shared_qparams, is_sinusoid
from arm_backend_core.quantization import get_symmetric_a16w8_quantization_config
from arm_backend_core.quantization.annotator import ANNOTATION
from arm_backend_core.quantization.observer import RangeObserver

_PRODUCT_OPS = {getattr(torch.ops.aten, name).default for name in ("matmul", "bmm", "mm", "einsum")}
_PRODUCT_OPS |= {torch.ops.aten.mul.Tensor, torch.ops.aten.sum.dim_IntList}
#: Smallest upper bound of the range of attention weights. With this bound, the int8 scale is 2**-14, four times the
#: error of the integer softmax.
_MIN_UPPER_BOUND = 2.0**-6
#: A constant is treated as the frequencies of an embedding if the ratio of its largest to its smallest magnitude is at
#: least this.
_MIN_FREQUENCY_RATIO = 64.0


class ProbabilityObserver(RangeObserver):
    """Observer with the range [0, 1.25 * maximum], at least [0, ``_MIN_UPPER_BOUND``] and at most [0, 1]."""

    def _range(self, statistics: Any) -> tuple[float, float]:
        return 0.0, min(max(1.25 * statistics.high, _MIN_UPPER_BOUND), 1.0) if statistics.count else 1.0


def choose_activation_precision(graph: Graph, algorithms: Collection[str]) -> None:
    """Change the annotations of an annotated graph.

    "int16_outputs" has no effect if the output node is annotated (``ArmQuantizer.set_io``).

    Args:
        algorithms: names of algorithms. Only "int16_angles", "attention_scales" and "int16_outputs" have an effect.
    """
    if "int16_angles" in algorithms:
        _use_int16_for_angles(graph)
    for node in graph.nodes:
        annotation = node.meta.get(ANNOTATION)
        spec = getattr(annotation, "output_qspec", None)
        if annotation is None or not is_float(node) or getattr(spec, "dtype", None) is not torch.int8:
            continue
        if isinstance(spec, FixedQParamsQuantizationSpec):
            if "attention_scales" in algorithms and _has_unit_range(spec) and _is_attention_weight(node):
                qscheme = torch.per_tensor_affine
                annotation.output_qspec = QuantizationSpec(torch.int8, ProbabilityObserver, -128, 127, qscheme)
        elif "int16_outputs" in algorithms and _can_return_int16(node):
            annotation.output_qspec = get_symmetric_a16w8_quantization_config().activation


def _has_unit_range(spec: FixedQParamsQuantizationSpec) -> bool:
    return (spec.scale, spec.zero_point) == (1 / 256, -128)


def _is_attention_weight(node: Node) -> bool:
    """Whether only products and sums read the node, directly or through data movement, and it has readers."""
    movement = [user for user in node.users if has_shared_qparams(user)]
    other_ops = {overload_of(user.target) for user in node.users if user not in movement}
    return bool(node.users) and other_ops <= _PRODUCT_OPS and all(map(_is_attention_weight, movement))


def _can_return_int16(node: Node) -> bool:
    """Whether only the model's output reads the node and its operator can produce int16 without more cycles."""
    record = find_record(node)
    if record is None or any(user.op != "output" or user.meta.get(ANNOTATION) for user in node.users):
        return False
    producer = node.all_input_nodes[0] if node.all_input_nodes else node
    return (
        record.absorbs_activation
        or record.prefers_int16_input
        or find_consumer_fused_into_accumulator(producer) is node
    )


def _use_int16_for_angles(graph: Graph) -> None:
    """Annotate the angles of embeddings, their operands and the data movement around them as int16."""
    sine_nodes = [node for node in graph.nodes if is_sinusoid(node)]
    if not sine_nodes:
        return
    constants = Constants(cast(GraphModule, graph.owning_module))
    for sine in sine_nodes:
        *movement, angle = _trace_movement(sine)
        if _is_product_with_frequencies(angle, constants):
            *sources, _ = _trace_movement(angle, next(x for x in angle.all_input_nodes if x not in constants))
            for reader in (sine, *movement, angle, *sources):
                _annotate_int16(reader, include_result=reader is angle)


def _trace_movement(reader: Node, source: Node | None = None) -> Iterator[Node]:
    """Yield the data-movement nodes before ``reader``, the last one first, then the node whose result they move.

    Args:
        source: the operand of ``reader`` at which to start; None for the first operand.
    """
    source = source or reader.all_input_nodes[0]
    while has_shared_qparams(source) and len(source.all_input_nodes) == 1:
        yield source
        (source,) = source.all_input_nodes
    yield source


def _is_product_with_frequencies(angle: Node, constants: Constants) -> bool:
    """Whether ``angle`` is a product of floats and constant frequencies (``_MIN_FREQUENCY_RATIO``)."""
    if angle.target is not torch.ops.aten.mul.Tensor or len(angle.all_input_nodes) != 2:
        return False
    frequencies = [x for x in angle.all_input_nodes if x in constants]
    if len(frequencies) != 1 or any(INTERVAL in x.meta for x in angle.all_input_nodes):
        return False
    magnitudes = constants.value(frequencies[0]).abs()
    return magnitudes.numel() > 1 and float(magnitudes.max()) >= _MIN_FREQUENCY_RATIO * float(magnitudes.min()) > 0


def _annotate_int16(reader: Node, *, include_result: bool) -> None:
    """Replace int8 by int16 in the annotations of the operands of ``reader``, and of its result if requested."""
    annotation = reader.meta.get(ANNOTATION)
    if annotation is None:
        return
    int16, inputs = get_symmetric_a16w8_quantization_config().activation, annotation.input_qspec_map
    inputs |= {node: int16 for node, spec in inputs.items() if getattr(spec, "dtype", None) is torch.int8}
    if include_result and getattr(annotation.output_qspec, "dtype", None) is torch.int8:
        annotation.output_qspec = int16
