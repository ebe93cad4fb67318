"""Lowering to kernels: replace the quantized operators of an ATen program by int8 kernels of the Cortex-M.

A region consists of the operators between dequantize nodes and the next quantize node. Regions are lowered in program
order. If a region computes an elementwise function of one tensor, it becomes a look-up table. Otherwise, if there is a
rule for its operators, it becomes kernel calls. Otherwise, its operators stay in floating point, between dequantize and
quantize operators. A tensor keeps the memory layout in which a kernel wrote it until a reader needs another layout.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload
from torch._prims_common import is_contiguous_or_false
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.passes.tools_common import stable_topological_sort

from arm_backend_core.cortex_m.cast_to_dequantize import is_cast_from_8_bits, replace_casts_by_dequantize
from arm_backend_core.cortex_m.emitter import Emitter
from arm_backend_core.cortex_m.lookup_tables import match_univariate
from arm_backend_core.cortex_m.quantized_value import QuantizedValue
from arm_backend_core.cortex_m.rules import (  # noqa: F401  (register rules)
    bilinear_interpolation,
    convolution,
    convolution_3d,
    elementwise,
    linear,
    movement,
    pooling,
    softmax,
    where,
)
from arm_backend_core.cortex_m.rules.context import (
    MULTI_RESULT_RULES,
    KernelContext,
    ResultQuantization,
    apply_table,
    find_rule,
    read_operand,
    requantize,
)
from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported, compiler_fault
from arm_backend_core.fusion.rules import get_scale_factor
from arm_backend_core.graph_edits import eliminate_dead_code
from arm_backend_core.lowering.qparams_reader import QParamsReader
from arm_backend_core.nodes import (
    evaluate_node,
    first_result,
    is_constant,
    is_dequantize,
    is_float,
    is_quantize,
    operator_name,
    overload_of,
)
from arm_backend_core.ops.catalog import find_record
from arm_backend_core.program import constants_of, eliminate_dead_constants, lift_constants
from arm_backend_core.qparams import QParams
from arm_backend_core.targets.cortex_m import Isa

aten = torch.ops.aten
_LOG_SOFTMAX_ADVICE = (
    ": results of the softmax kernel are multiples of 1/256, so logarithms below ln(1/256) = -5.5 are lost. Return the "
    "result of softmax, or the input of log_softmax, which has the same order"
)
#: For operators without a kernel: why int8 kernels cannot compute them exactly, and what to do instead.
_ADVICE: dict[Any, str] = dict.fromkeys((aten.log_softmax.int, aten._log_softmax.default), _LOG_SOFTMAX_ADVICE)

_UNQUANTIZED_DTYPES = (torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64)


def lower_to_kernels(program: ExportedProgram, isa: Isa) -> dict[Node, Unsupported]:
    """Replace quantized operators by kernel calls, in place.

    Args:
        program: ATen program, functional and decomposed, with quantize and dequantize operators.
        isa: instruction set of the kernels.

    Returns:
        {operator that stays in floating point: reason}. The reason is that the lowering failed, or that there is no
        kernel. An operator that has a kernel, but that the quantizer left in floating point, has no entry.
    """
    replace_casts_by_dequantize(program.graph, Emitter(program.graph_module, isa))
    lowering = _KernelLowering(program, isa)
    for node in list(program.graph.nodes):
        if node.op != "call_function" or is_dequantize(node):
            continue
        if is_quantize(node):
            lowering.lower(node)
        elif is_constant(node, lowering.constants):
            lowering.constants[node] = evaluate_node(node, lowering.constants.__getitem__)
    lowering.replace_quantize_nodes()
    refusals = {node.name: reason for node, reason in lowering.refusals.items()}
    stable_topological_sort(program.graph_module)  # a reader may precede the conversion of its operand's layout
    eliminate_dead_code(program.graph)
    lift_constants(program)
    eliminate_dead_constants(program)
    program.graph_module.recompile()
    for node in filter(_is_left_in_float, program.graph.nodes):
        advice = _ADVICE.get(node.target, "")
        refusals.setdefault(node.name, Unsupported(f"there is no int8 kernel for {operator_name(node)}{advice}"))
    # By name, because sorting has replaced the nodes by copies.
    return {node: refusals[node.name] for node in program.graph.nodes if node.name in refusals}


def find_unquantized_operators(program: ExportedProgram) -> dict[Node, str]:
    """{operator: why no kernel computes it}, for operators whose first result is boolean or an integer other than int8.

    These operators need no quantization, so they are not reported as refusals.
    """
    reasons = {}
    for node in program.graph.nodes:
        dtype = getattr(first_result(node), "dtype", None)
        if isinstance(node.target, OpOverload) and node.target.namespace == "aten" and dtype in _UNQUANTIZED_DTYPES:
            reasons[node] = f"the kernels compute int8, and its result is {str(dtype).removeprefix('torch.')}"
    return reasons


def has_kernel(node: Node) -> bool:
    """Whether an operator may become a kernel call, a table or data movement, depending on its operands."""
    record = find_record(node)
    is_function = record is not None and (record.is_univariate or is_cast_from_8_bits(node))
    return find_rule(node) is not None or is_function or _has_multi_result_rule(node)


def _is_left_in_float(node: Node) -> bool:
    """Whether a node is an operator that the quantizer left in floating point because it has no kernel."""
    is_operator = isinstance(node.target, OpOverload) and node.all_input_nodes and is_float(node)
    return bool(is_operator) and not (is_quantize(node) or is_dequantize(node) or has_kernel(node))


def _has_multi_result_rule(node: Node) -> bool:
    return overload_of(node.target) in MULTI_RESULT_RULES


class _KernelLowering:
    """Lowers the quantize nodes of a program, in program order, and collects the refusals."""

    def __init__(self, program: ExportedProgram, isa: Isa) -> None:
        self.constants: dict[Node, Any] = dict(constants_of(program))
        self.refusals: dict[Node, Unsupported] = {}
        self._isa, self._graph = isa, program.graph
        self._values: dict[Node, QuantizedValue] = {}
        self._emit = Emitter(program.graph_module, isa)
        self._qparams = QParamsReader(self.constants)

    def lower(self, quantize: Node) -> None:
        """Compute a quantize node by kernels. ``refusals`` gets the reason if that fails."""
        source = quantize.all_input_nodes[0]
        if source.op == "placeholder" and source not in self.constants:
            self._make_contiguous(quantize)
            return  # it quantizes a model input
        anchor, _ = _split_activation(source)
        self._emit.set_insertion_point(
            quantize, anchor.all_input_nodes[0] if anchor.target is operator.getitem else anchor
        )
        try:
            self._values[quantize] = self._compute(quantize, source)
        except Unsupported as refusal:
            self.refusals[anchor] = refusal
            self._make_contiguous(quantize)
        except Exception as error:
            description = f"lowering {operator_name(source)} to kernels raised {type(error).__name__}: {error}"
            self.refusals[source] = compiler_fault(description, error)
            self._make_contiguous(quantize)

    def _make_contiguous(self, quantize: Node) -> None:
        """Convert the integers of a remaining quantize node to contiguous memory format, which the kernels need."""
        if is_contiguous_or_false(quantize.meta["val"]) or not all(map(is_dequantize, quantize.users)):
            return  # it is contiguous, or a delegate reads the integers in their present format
        self._emit.set_insertion_point(quantize.next, quantize)
        copied = self._emit.call(aten.clone.default, quantize, memory_format=torch.contiguous_format)
        quantize.replace_all_uses_with(copied, delete_user_cb=lambda user: user is not copied)

    def _compute(self, quantize: Node, source: Node) -> QuantizedValue:
        q = self._qparams.read(quantize)
        if source in self.constants:
            return QuantizedValue.from_constant(
                q.quantize(self.constants[source].detach().double().numpy()).astype(q.dtype.numpy), q
            )
        if q.dtype is not DType.INT8:
            raise Unsupported(f"the kernels compute int8, and its result is {q.dtype.value}")
        if is_dequantize(source):
            return requantize(self._emit, self._int8_operand(source), q)
        anchor, activation = _split_activation(source)
        try:
            function = match_univariate(source, self.constants)
        except Unsupported as no_table:
            rule = find_rule(anchor)
            if rule is None:
                raise no_table from None
            result = _quantization_before_activation(activation, q)
            value = rule(KernelContext(self._emit, self._isa, self._values, self.constants, anchor, result))
            return QuantizedValue(q, value.shape, value.layout, value.node, value.data)
        operand = self._int8_operand(function.source)
        return apply_table(self._emit, operand, function.tabulate(quantize, self.constants), q)

    def _int8_operand(self, dequantize: Node) -> QuantizedValue:
        operand = read_operand(dequantize, self._values, self.constants, self._qparams)
        operand.require_int8()
        return operand

    def replace_quantize_nodes(self) -> None:
        """Redirect the remaining readers of lowered quantize nodes, such as float operators, to kernel results."""
        for quantize, value in self._values.items():
            if not quantize.users:
                continue
            self._emit.set_insertion_point(quantize, value.node or quantize)
            quantize.replace_all_uses_with(self._emit.materialize(value))
        for node in self._graph.nodes:
            if is_dequantize(node) and node.all_input_nodes[0].meta["val"].is_contiguous():
                node.meta["val"] = node.meta["val"].contiguous()


def _split_activation(node: Node) -> tuple[Node, list[Node]]:
    """Split the operators that end with ``node`` into an operator and its activation.

    The activation consists of the clamps and the multiplications by a number that follow the operator.

    Returns:
        The operator, and its activation in program order; ``(node, [])`` if ``node`` belongs to no activation.
    """
    activation: list[Node] = []
    while True:
        record = find_record(node) if node.op == "call_function" else None
        if record is None or (record.clamp_bounds is None and get_scale_factor(node, record) is None):
            return node, activation
        operand = node.args[0]
        if not isinstance(operand, Node) or len(operand.users) != 1 or is_dequantize(operand):
            return node, activation
        activation.insert(0, node)
        node = operand


def _quantization_before_activation(activation: list[Node], q: QParams) -> ResultQuantization:
    """Quantization and limits of an operator's result before ``activation``, if ``q`` is the quantization after it."""
    low, high, factor = float(q.qmin), float(q.qmax), 1.0
    for node in reversed(activation):
        record = find_record(node)
        assert record is not None
        if record.clamp_bounds is None:
            factor *= get_scale_factor(node, record) or 1.0
            continue
        bounds = np.array(record.clamp_bounds(*node.args, **node.kwargs), np.float64) * factor
        limits = q.quantize(bounds)
        low, high = max(low, float(limits[0])), min(high, float(limits[1]))
    scaled = QParams(float(q.scale) / factor, q.zero_point, q.dtype, q.qmin, q.qmax)
    return ResultQuantization(scaled, int(low), int(high))
