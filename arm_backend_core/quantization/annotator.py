"""Quantization annotator: decides from operator records which tensors are quantized, and with which specs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch.fx import Graph, Node
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    QuantizationSpecBase,
    SharedQuantizationSpec,
)

from arm_backend_core.fusion.plan import FusionPlan
from arm_backend_core.nodes import (
    INTERVAL,
    TIMESTEP_SLOT,
    constant_nodes,
    is_float,
    is_integer_or_bool,
    is_state,
)
from arm_backend_core.ops.catalog import find_record
from arm_backend_core.ops.loop_markers import LOOP_OUT
from arm_backend_core.ops.registry import AnnotationKind, Record
from arm_backend_core.quantization.config import QuantizationConfig

ANNOTATION = "quantization_annotation"
#: {8-bit type: (low, high)}, the range [low, high) of its integers as real numbers. int8 represents it with scale 1.
_RANGES_OF_8_BITS = {torch.int8: (-128.0, 128.0), torch.uint8: (0.0, 256.0)}
ConfigOf = Callable[[Node], QuantizationConfig | None]


class Annotator:
    """Annotates one graph. ``FusionPlan`` decides which results are fused; these need no quantization parameters."""

    def __init__(self, graph: Graph, config_of: ConfigOf) -> None:
        self.loops = [(node, config_of(node)) for node in graph.find_nodes(op="call_function", target=LOOP_OUT)]
        self.nodes = [node for node in graph.nodes if node.op == "call_function" and _has_float_operand_or_result(node)]
        self.constants = constant_nodes(graph)
        self.records: dict[Node, Record] = {}
        self.configs: dict[Node, QuantizationConfig] = {}
        self._scale_source: dict[Node, Node] = {}
        for node in self.nodes:
            record, config = find_record(node), config_of(node)
            if record is None or config is None or node in self.constants or record.kind is AnnotationKind.PASSTHROUGH:
                continue
            sizes = [x.meta["val"].numel() for x in node.all_input_nodes if x in self.constants]
            # A large lookup table stays int8, because int16 would double its bytes.
            if record.kind is AnnotationKind.SHARED and max(sizes, default=0) >= 1 << 20:
                config = replace(config, int16_activation=None)
            if record.kind is not AnnotationKind.CONV or config.weight is not None:
                self.records[node], self.configs[node] = record, config
        self._result_specs: dict[Node, QuantizationSpec] = {}

    def _use_most_precise_config(self, functions: Sequence[Node]) -> None:
        """Give all functions of one TABLE the one of their configurations that has the most activation levels."""
        most_precise = max((self.configs[node] for node in functions), key=lambda c: c.activation.quant_max or 0)
        self.configs |= dict.fromkeys(functions, most_precise)

    def _choose_result_spec(self, node: Node) -> None:
        """Choose for a result the activation spec with the most levels among the configurations of its readers.

        A reader whose configuration has many levels thus gets a result that was rounded to at least as many levels.
        Functions of a chain (``FusionPlan.chain_base``), and results without quantized readers, keep the spec of their
        configuration.
        """
        has_several_results = isinstance(node.meta["val"], (list, tuple))
        users = [user for getitem in node.users for user in getitem.users] if has_several_results else list(node.users)
        specs = [self.configs[user].activation for user in users if user in self.configs]
        spec = max(specs, key=lambda spec: spec.quant_max or 0, default=self.configs[node].activation)
        self._result_specs[node] = self.configs[node].activation if node in self.plan.chain_base else spec
        if self.records[node].kind is AnnotationKind.SHARED:
            self.configs[node] = replace(self.configs[node], activation=spec)

    def make_plan(self) -> FusionPlan:
        """Decide which operators are fused, and which results are int16."""
        states = {state: value for state, value, _ in self._buffer_writes()}
        may_be_int16 = {node for node in self.records if self.configs[node].int16_activation is not None}
        return FusionPlan(self.records, self.constants, may_be_int16.__contains__, self._is_int16, states)

    def run(self) -> None:
        """Write ``quantization_annotation`` into the nodes' metadata."""
        self.plan = self.make_plan()
        for functions in self.plan.fused_chains():
            self._use_most_precise_config(functions)
        for node in reversed(self.records):
            self._choose_result_spec(node)
        for node in self.nodes:
            annotated = node.meta.get(ANNOTATION)
            if node in self.records and not (annotated and annotated._annotated):
                self._annotate(node)
        for state, value, write in self._buffer_writes():
            self._annotate_state(state, value, write)
        for node, config in self.loops:
            if config is not None:
                self._annotate_loop(node, config)

    def _annotate_loop(self, node: Node, config: QuantizationConfig) -> None:
        """Share the parameters of a loop's state between the start, each iteration and the end."""
        _, body_results, loop_states, _ = cast(Any, node.args)
        inputs: dict[Node, QuantizationSpecBase | None] = {x: config.activation for x in loop_states if is_float(x)}
        shared = {x: SharedQuantizationSpec((x, node)) for x in inputs}
        for y, x in zip(body_results, loop_states, strict=True):
            if x in shared:
                inputs.setdefault(y, shared[x])
        node.meta[ANNOTATION] = QuantizationAnnotation(inputs, None, _annotated=True)
        for getitem in filter(is_float, node.users):
            spec = shared[loop_states[cast(int, getitem.args[1])]]
            getitem.meta[ANNOTATION] = QuantizationAnnotation({}, spec, _annotated=True)

    def _buffer_writes(self) -> list[tuple[Node, Node, Node]]:
        """List the writes of whole buffers: (buffer, new value, copy node)."""
        copies = [(*node.args[:2], node) for node in self.nodes if node.target is torch.ops.aten.copy_.default]
        return [(state, value, node) for state, value, node in copies if is_state(state)]

    def _annotate_state(self, state: Node, value: Node, write: Node) -> None:
        """Share the parameters of a buffer and its new value, so that the buffer can hold integers."""
        readers = [user for user in state.users if user in self.records]
        if readers or value in self.records:
            spec = self._input_spec(readers[0], state) if readers else self._output_spec(value)
            state.meta[ANNOTATION] = QuantizationAnnotation({}, spec, _annotated=True)
            write.meta[ANNOTATION] = QuantizationAnnotation({value: SharedQuantizationSpec(state)}, _annotated=True)

    # -- annotation ----------------------------------------------------------------------------------------------

    def _annotate(self, node: Node) -> None:
        record = self.records[node]
        if record.kind is AnnotationKind.SHARED:
            self._annotate_shared(node)
            return
        plan = self.plan
        if not plan.is_computed_in_integers(node):
            return  # the node stays in floating point; lowering to an integer-only target reports the reason
        inputs: dict[Node, QuantizationSpecBase | None] = {
            source: self._input_spec(node, source)
            for source in plan.activation_operands(node)
            if source not in plan.fused
        }
        if record.kind is AnnotationKind.CONV:
            weight = node.args[record.weight]
            spec = self.configs[node].weight
            if weight not in self.constants:
                return  # a computed weight has no per-channel scales; lowering reports what to do
            if isinstance(weight, Node) and spec is not None:
                inputs[weight] = spec if spec.ch_axis is None else replace(spec, ch_axis=record.weight_axis(node))
                inputs |= self._bias_spec(node, weight)
        output = None if node in plan.fused or not is_float(node) else self._output_spec(node)
        node.meta[ANNOTATION] = QuantizationAnnotation(inputs, output, _annotated=True)

    def _is_int16(self, node: Node) -> bool:
        return self.configs[node].activation.dtype is torch.int16

    def _bias_spec(self, node: Node, weight: Node) -> dict[Node, QuantizationSpecBase]:
        """Annotate the bias as int32 with the accumulator's scale, so that PyTorch rounds like the target.

        With int16 activations the bias stays in floating point: at the accumulator's fine scale, it could exceed int32,
        and the target's rounding to this scale is negligible.
        """
        record, config = self.records[node], self.configs[node]
        bias = node.args[record.bias] if len(node.args) > record.bias else node.kwargs.get("bias")
        activation = node.args[0]
        if bias not in self.constants or not isinstance(activation, Node):
            return {}
        assert isinstance(bias, Node)
        if getattr(self._input_spec(node, activation), "dtype", None) is not torch.int8:
            return {}
        channels = weight.meta["val"].shape[record.weight_axis(node)]
        if bias.meta["val"].shape[0] != channels:  # a grouped transposed convolution: channels share scales
            return {}
        assert config.weight is not None
        per_channel = config.weight.ch_axis is not None
        return {
            bias: DerivedQuantizationSpec(
                derived_from=[(activation, node), (weight, node)],
                derive_qparams_fn=_accumulator_scale,
                dtype=torch.int32,
                quant_min=-(2**31),
                quant_max=2**31 - 1,
                qscheme=torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric,
                ch_axis=0 if per_channel else None,
            )
        }

    def _input_spec(self, node: Node, source: Node) -> QuantizationSpecBase:
        """Choose the spec with which ``node`` reads ``source``.

        The first case that applies:

        - The source holds exact integers, which the node can read unchanged: the producer's spec.
        - The source is an int16 result of a recurrent layer, and the node is an operator without weights in such a
          layer: the producer's spec.
        - The node benefits from int16, and it is in a recurrent layer, or the source is int16 or constant:
          ``int16_activation``.
        - Otherwise: ``activation``.
        """
        config, record = self.configs[node], self.records[node]
        has_one_operand = record.is_univariate or (
            record.kind is AnnotationKind.SHARED and len(self.plan.activation_operands(node)) == 1
        )
        interval = _exact_interval(source) if source in self.records else None
        if interval is not None and (has_one_operand or self._can_read_exact_integers(node, source, interval)):
            return self._output_spec(source)
        int16, is_recurrent = self.plan.int16_nodes, TIMESTEP_SLOT in node.meta
        owner = self._scale_owner(source)
        if is_recurrent and record.kind is not AnnotationKind.CONV and TIMESTEP_SLOT in owner.meta and owner in int16:
            return self._output_spec(owner)
        reads_int16 = self.plan.benefits_from_int16(node) or (node in int16 and record.kind is AnnotationKind.SHARED)
        if (
            config.int16_activation is not None
            and reads_int16
            and (is_recurrent or source in int16 or source in self.constants)
        ):
            return config.int16_activation
        return config.activation

    def _can_read_exact_integers(self, node: Node, source: Node, interval: tuple[float, float]) -> bool:
        """Whether ``node`` can read the exact integers of the cast ``source`` at the scale of the cast.

        A calibrated scale would only round the integers. False for data movement: all its operands share one scale, and
        the other operands need a calibrated scale.
        """
        is_exact = interval in _RANGES_OF_8_BITS.values() and self.records[node].kind is not AnnotationKind.SHARED
        return is_exact and self._output_spec(source).dtype is self.configs[node].activation.dtype

    def _output_spec(self, node: Node) -> QuantizationSpecBase:
        config, record = self.configs[node], self.records[node]
        spec = (config.int16_activation if node in self.plan.int16_nodes else None) or self._result_specs[node]
        interval = _exact_interval(node)
        if interval is not None:
            is_exact_in_8_bits = interval in _RANGES_OF_8_BITS.values()
            return _fixed_spec(spec if is_exact_in_8_bits else config.int16_activation or spec, *interval)
        limits = record.fixed_range
        if spec.dtype is torch.int16 and TIMESTEP_SLOT in node.meta:
            if record.is_recurrent_gate:
                limits = (-1.0, 1.0)
            elif config.int16_activation != config.activation and all(map(_is_recurrent_gate, node.users)):
                limits = (-16.0, 16.0)  # gates saturate beyond; a TABLE over a wider range is too coarse
        return spec if limits is None else _fixed_spec(spec, *limits)

    def _scale_owner(self, node: Node) -> Node:
        """Return the representative of the tensors that share the scale of ``node`` through data movement."""
        while node in self._scale_source:
            node = self._scale_source[node]
        return node

    def _annotate_shared(self, node: Node) -> None:
        """Annotate data movement: result and operands share the first float operand's parameters.

        A cast from integers has no float operands. Its result gets separate parameters.
        """
        sources = self.plan.activation_operands(node)
        if is_cast_from_integers(node):
            node.meta[ANNOTATION] = QuantizationAnnotation({}, self._output_spec(node), _annotated=True)
        if not sources or not self.plan.fused.isdisjoint(sources):
            return
        first, *others = sources
        shared = SharedQuantizationSpec((first, node))
        inputs: dict[Node, QuantizationSpecBase | None] = {first: self._input_spec(node, first)}
        for other in others:
            # Operands with the same scale owner share a scale already. A second link would create a cycle.
            if self._scale_owner(other) is self._scale_owner(first):
                inputs[other] = self._input_spec(node, other)
            else:
                inputs[other], self._scale_source[self._scale_owner(other)] = shared, first
        self._scale_source[node] = first
        has_several_results = isinstance(node.meta["val"], (list, tuple))
        node.meta[ANNOTATION] = QuantizationAnnotation(inputs, None if has_several_results else shared, _annotated=True)
        for getitem in filter(is_float, node.users) if has_several_results else ():
            getitem.meta[ANNOTATION] = QuantizationAnnotation({}, shared, _annotated=True)
            self._scale_source[getitem] = node


def _accumulator_scale(observers: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the accumulator's scale, input scale times weight scale(s), with zero point 0."""
    activation, weight = (observer.calculate_qparams()[0] for observer in observers)
    scale = activation * weight
    return scale, torch.zeros_like(scale, dtype=torch.int64)


def _fixed_spec(spec: QuantizationSpec, low: float, high: float) -> FixedQParamsQuantizationSpec:
    """Make fixed parameters that cover [low, high): affine for int8, symmetric for int16."""
    assert spec.quant_min is not None
    assert spec.quant_max is not None
    steps = spec.quant_max - spec.quant_min + 1
    scale, zero_point = max(-low, high) / (steps // 2), 0
    if spec.dtype is not torch.int16:
        scale = (high - low) / steps
        zero_point = spec.quant_min - round(low / scale)
    return FixedQParamsQuantizationSpec(
        dtype=spec.dtype,
        scale=scale,
        zero_point=zero_point,
        quant_min=spec.quant_min,
        quant_max=spec.quant_max,
        qscheme=torch.per_tensor_affine,
    )


def _is_recurrent_gate(node: Node) -> bool:
    record = find_record(node)
    return record is not None and record.is_recurrent_gate


def is_cast_from_integers(node: Node) -> bool:
    """Whether ``node`` casts integers or booleans to floating point."""
    record, sources = find_record(node), node.all_input_nodes
    is_float_movement = record is not None and record.kind is AnnotationKind.SHARED and is_float(node)
    return is_float_movement and bool(sources) and all(map(is_integer_or_bool, sources))


def _exact_interval(node: Node) -> tuple[float, float] | None:
    """Return the range of ``node`` if it casts integers that its quantized type represents exactly, else None.

    The quantized type represents int8, uint8 and integers with a known interval exactly. For other integers, a
    calibrated range is more precise: a function of an int16 tensor is a TABLE with one entry for every 128th value.
    With a scale of 1, small integers would all lie between the same two entries.
    """
    if not is_cast_from_integers(node):
        return None
    dtypes = {source.meta["val"].dtype for source in node.all_input_nodes}
    range_of_8_bits = _RANGES_OF_8_BITS.get(dtypes.pop()) if len(dtypes) == 1 else None
    return node.meta.get(INTERVAL, range_of_8_bits)


def _has_float_operand_or_result(node: Node) -> bool:
    """Whether ``node`` has a float result, or is an elementwise operator (a comparison) with a float operand."""
    record = find_record(node)
    is_comparison = (
        record is not None and record.kind is AnnotationKind.ELEMENTWISE and any(map(is_float, node.all_input_nodes))
    )
    return is_float(node) or is_comparison
