"""Lowering: convert an fx graph to a TOSA graph.

Quantize and dequantize nodes become quantization parameters: a dequantize node sets the parameters of an operand, a
quantize node the parameters of a result.

``Lowering.run`` lowers each node once, in program order. If a node cannot be lowered, its lowering result is an
``Unsupported`` object, and readers of the node read a new graph input instead. The target can run all other nodes. If a
node is excluded later, its direct and indirect readers are lowered again (``Lowering.exclude``). The graph of each
delegate is a subgraph of the program's graph.
"""

from __future__ import annotations

import operator
import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, cast

import torch
from torch.fx import Node

from arm_backend_core.aten.int64_range_analysis import IntervalAnalysis
from arm_backend_core.dtype import DType
from arm_backend_core.errors import InternalError, Unsupported, compiler_fault
from arm_backend_core.fusion.rules import is_summed_product
from arm_backend_core.fusion.univariate import Univariate, fuse_into_univariate
from arm_backend_core.lowering.checks import LoweringResult, check_result, require_static
from arm_backend_core.lowering.constant_operands import constant_operand, require_representable
from arm_backend_core.lowering.qparams_reader import QParamsReader
from arm_backend_core.lowering.uint8_inputs import is_uint8, require_signed_operands, uint8_to_int8
from arm_backend_core.nodes import (
    DECOMPOSITION_REFUSAL,
    boundary_dim_order,
    evaluate_node,
    first_result,
    is_constant,
    is_dequantize,
    is_float,
    is_integer,
    is_quantize,
    is_random,
    modules_of,
    operator_name,
    overload_of,
    source_line,
)
from arm_backend_core.ops.catalog import find_record
from arm_backend_core.ops.operands import Context, Operand, to_tosa_dtype
from arm_backend_core.ops.registry import AnnotationKind, Record
from arm_backend_core.permutation import Layout, identity, inverse
from arm_backend_core.qparams import QParams
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op, Origin, Value
from arm_backend_core.tosa.legalize import FloatProfileBuilder, LegalizingBuilder


class Lowering:
    """One lowering walk over the nodes of a program.

    Attributes:
        target: the operators, types and extensions that may be used.
        float_nodes: nodes that are computed in floating point although their operands are quantized.
        constants: values of the nodes that are parameters, buffers, or computed from these alone.
        graph: TOSA operators of all nodes. If a node was lowered again or excluded, the operators of its earlier
            lowering are dead.
        results: the lowering results of the nodes, and the operands of constants that were read.
        qparams: reads the program's quantization parameters.
    """

    def __init__(
        self, target: Target, constants: Mapping[Node, torch.Tensor], float_nodes: Set[Node] = frozenset()
    ) -> None:
        self.target, self.float_nodes = target, float_nodes
        self.constants: dict[Node, Any] = dict(constants)
        self.graph = Graph()
        self.results: dict[Node, LoweringResult] = {}
        builder = LegalizingBuilder if target.has_int_profile else FloatProfileBuilder
        self.builder = builder(self.graph, target)
        self._graph_inputs: dict[Node, tuple[Value, Operand]] = {}  # {node: (graph input, operand of readers)}
        self._dequantized: dict[Value, list[Operand]] = {}
        self._int16_tensors: dict[Univariate, Operand] = {}  # int16 results of functions
        self._pending_origins: dict[Node, Counter[Origin]] = {}  # origins of functions not yet emitted
        self._intervals = IntervalAnalysis(self.constants)
        self.qparams = QParamsReader(self.constants)

    def run(self, nodes: Iterable[Node], outside: Collection[Node]) -> None:
        """Lower ``nodes``, which are in program order, except those in ``outside``."""
        for node in nodes:
            if node not in outside:
                self.results[node] = self._lower_or_refuse(node)

    def exclude(self, nodes: Iterable[Node], outside: Collection[Node]) -> None:
        """Lower again every direct or indirect reader of a node that was added to ``outside`` since the last walk.

        Args:
            nodes: the nodes that were passed to ``run``.
            outside: all nodes that now stay outside of the graph.
        """
        affected = {node for node in outside if node in self.results}
        for node in affected:
            del self.results[node]
        for node in nodes:
            if node not in outside and any(source in affected for source in node.all_input_nodes):
                affected.add(node)
                self.results[node] = self._lower_or_refuse(node)

    def _lower_or_refuse(self, node: Node) -> LoweringResult:
        first_op = len(self.graph.ops)
        *_, module = ("", *modules_of(node))
        origin = Origin(node.name, operator_name(node), source_line(node), module)
        self.builder.origins = {origin: 1}
        try:
            result = self._lower(node)
            self._record_origins(node, origin, result, self.graph.ops[first_op:])
            # Constants are not checked: TOSA may hold them in another type (float64 as FP32).
            return result if node in self.constants else check_result(node, result)
        except Unsupported as reason:
            refusal = reason
        except InternalError:
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            description = f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}: {error}"
            refusal = compiler_fault(f"lowering {operator_name(node)} raised {description}", error)
        dropped = set(self.graph.ops[first_op:])
        del self.graph.ops[first_op:]
        self._graph_inputs = {
            source: entry for source, entry in self._graph_inputs.items() if entry[1].value.producer not in dropped
        }
        return refusal

    def _record_origins(self, node: Node, origin: Origin, result: LoweringResult, ops: Sequence[Op]) -> None:
        """Set the origins of ``ops``: the node itself, and the pending functions that they compute.

        An elementwise function of one tensor is pending: it emits no operator until its result is quantized. Its origin
        is then added to the emitted operators.
        """
        pending = sum(
            (self._pending_origins.get(source, Counter()) for source in node.all_input_nodes), Counter[Origin]()
        )
        own_origins = Counter({origin: result.base.value.size}) if isinstance(result, Univariate) else None
        self._pending_origins[node] = Counter() if own_origins is None else pending + own_origins
        for op in ops:
            counts_own_work = not pending or not is_quantize(node)
            op.origins = pending + Counter(dict.fromkeys(op.origins, op.work) if counts_own_work else {})

    # -- operands ------------------------------------------------------------------------------------------------

    def read(self, node: Node) -> Operand | Univariate | list[Any]:
        """The lowering result of ``node``. A node outside of the graph becomes a graph input."""
        if node in self.constants:
            require_representable(node.name, self.constants[node])
        result = self.results.get(node)
        if result is not None and not isinstance(result, Unsupported):
            return result
        if node in self.constants:
            self.results[node] = tensor = constant_operand(node.name, self.constants[node])
            return tensor
        if node not in self._graph_inputs:
            self._graph_inputs[node] = self._add_graph_input(node)
        return self._graph_inputs[node][1]

    def boundary_value(self, node: Node) -> tuple[Value, Layout]:
        """The TOSA value and memory layout of ``node`` as an input of a delegate that does not compute ``node``."""
        result = self.results.get(node)
        if isinstance(result, Operand):
            return result.value, identity(result.rank)
        return self._graph_inputs[node][0], boundary_dim_order(node)

    def graph_inputs(self) -> dict[Node, Value]:
        """{node outside of the graph that the graph reads: its graph input}."""
        return {node: value for node, (value, _) in self._graph_inputs.items()}

    def is_internal(self, node: Node) -> bool:
        """Whether ``node``'s result cannot leave a delegate.

        Such results are lists of tensors, tensors with quantization parameters, and functions not yet emitted.
        """
        result = self.results[node]
        return not isinstance(result, Operand) or result.q is not None

    def _add_graph_input(self, node: Node) -> tuple[Value, Operand]:
        meta = node.meta.get("val")
        if not isinstance(meta, torch.Tensor):
            raise Unsupported(f"'{node.name}' is not a tensor")
        require_static(node)
        # The target reads memory in its physical order, so the graph input has its dimensions in that order.
        order = boundary_dim_order(node)
        is_unsigned = meta.dtype is torch.uint8
        shape, dtype = (
            tuple(meta.shape[axis] for axis in order),
            DType.INT8 if is_unsigned else to_tosa_dtype(meta.dtype),
        )
        if dtype.is_float and not self.target.has_fp_profile:
            raise Unsupported(f"it is not quantized, and {self.target.name} runs integers only")
        # Even if no operator reads the input directly, the target must support its type and rank.
        reason = self.builder.refusal("IDENTITY", [Value(shape, dtype, node.name)], dtype)
        if reason:
            raise Unsupported(reason)
        value = self.graph.add_input(shape, dtype, node.name)
        ordered = self.builder.transpose(value, inverse(order))
        return value, uint8_to_int8(self.builder, ordered) if is_unsigned else Operand(ordered)

    def _operand(self, x: Any) -> Any:
        if isinstance(x, Node):
            return self.read(x)
        if isinstance(x, (list, tuple)):
            return [self._operand(item) for item in x]
        return x

    # -- nodes ---------------------------------------------------------------------------------------------------

    def _lower(self, node: Node) -> LoweringResult:
        if is_dequantize(node) or is_quantize(node):
            require_static(node)
            return self._dequantize(node) if is_dequantize(node) else self._quantize(node)
        if is_constant(node, self.constants):
            self.constants[node] = value = evaluate_node(node, self.constants.__getitem__)
            return constant_operand(node.name, value)
        if node.target is operator.getitem:
            items = self.read(_as_node(node.args[0]))
            if not isinstance(items, list):
                raise Unsupported("the operator whose result it selects stays on the CPU")
            item: LoweringResult = items[cast(int, node.args[1])]
            return self._to_float(item) if node in self.float_nodes else item
        if is_random(node) and find_record(node) is None and DECOMPOSITION_REFUSAL not in node.meta:
            raise Unsupported("it draws random numbers, which no target does; give them as an input")
        is_int64 = getattr(first_result(node), "dtype", None) is torch.int64  # narrower types wrap around
        if is_integer(node) and not self._intervals.fits_int32(node) and is_int64:
            raise Unsupported(
                "its int64 result may exceed int32, and TOSA has no int64; compute with .to(torch.int32) values"
            )
        if overflowing := self._intervals.find_overflowing_operand(node):
            name = overflowing.name
            raise Unsupported(f"it reads '{name}', whose int64 values may exceed int32, and TOSA has no int64")
        for tensor in (node, *node.all_input_nodes):
            require_static(tensor)
        record = find_record(node)
        if record is None:
            reason = f"there is no lowering for {operator_name(node)}; express it with operators that have one"
            raise node.meta.get(DECOMPOSITION_REFUSAL) or Unsupported(reason)
        require_signed_operands(node, record, self.target)
        args = [self._operand(arg) for arg in node.args]
        kwargs = {name: self._operand(arg) for name, arg in node.kwargs.items()}
        operands = list(_flatten([*args, *kwargs.values()]))
        selects_quantized = record.is_select and self.qparams.read_result(node) is not None
        if selects_quantized or any(isinstance(x, Univariate) or x.q is not None for x in operands):
            return self._lower_quantized(node, record, args, kwargs)
        return self._lower_unquantized(node, record, args, kwargs)

    def _lower_unquantized(self, node: Node, record: Record, args: list[Any], kwargs: dict[str, Any]) -> LoweringResult:
        tensors = [x.value.dtype for x in _flatten([*args, *kwargs.values()])]
        if is_float(node) and tensors and not any(dtype.is_float for dtype in tensors) and record.lower_integer:
            out = self.qparams.read_result(node)
            if out is not None:  # integer operands, quantized result
                return _wrap_results(record.lower_integer(Context(self.builder, node, out), *args, **kwargs), out)
        if not self.target.has_fp_profile and (is_float(node) or any(dtype.is_float for dtype in tensors)):
            raise Unsupported(f"it is not quantized, and {self.target.name} runs integers only")
        return _wrap_results(record.lower(Context(self.builder, node), *args, **kwargs), None)

    def _lower_quantized(self, node: Node, record: Record, args: list[Any], kwargs: dict[str, Any]) -> LoweringResult:
        if node not in self.float_nodes:
            function, args = fuse_into_univariate(
                node, record, args, kwargs, self._int16_tensor_of, lambda: self.qparams.read_result(node)
            )
            if function is not None:
                return function
        args = [_apply_pending_scale(arg) for arg in args]
        kwargs = {name: _apply_pending_scale(arg) for name, arg in kwargs.items()}
        if record.lower_integer is None or node in self.float_nodes:
            return self._lower_in_float(
                node, record, args, kwargs, f"{overload_of(node.target)} has no integer lowering"
            )
        if record.kind is AnnotationKind.SHARED:
            out = next(x.q for x in _flatten(args) if x.q is not None)
        else:
            out = self.qparams.read_result(node)
            is_exact_product = is_summed_product(node) and all(
                isinstance(x, Operand) and x.value.dtype is DType.INT16 for x in args
            )
            if out is None and is_float(node) and not is_exact_product:
                return self._lower_in_float(node, record, args, kwargs, "its result is not quantized")
        rule = record.lower_integer
        return _wrap_results(rule(Context(self.builder, node, out), *args, **kwargs), out if is_float(node) else None)

    def _int16_tensor_of(self, function: Univariate) -> Operand:
        if function not in self._int16_tensors:
            self._int16_tensors[function] = function.to_int16_tensor(self.builder)
        return self._int16_tensors[function]

    def _lower_in_float(
        self, node: Node, record: Record, args: list[Any], kwargs: dict[str, Any], reason: str
    ) -> LoweringResult:
        """Dequantize the operands and apply the floating-point rule, if the target supports floating point (VGF).

        Raises:
            Unsupported: the target runs integers only.
        """
        if not self.target.has_fp_profile:
            raise Unsupported(f"{reason}, and {self.target.name} runs integers only")
        args = [self._to_float(arg) for arg in args]
        kwargs = {name: self._to_float(arg) for name, arg in kwargs.items()}
        return _wrap_results(record.lower(Context(self.builder, node), *args, **kwargs), None)

    def _to_float(self, x: Any) -> Any:
        if isinstance(x, list):
            return [self._to_float(item) for item in x]
        if not isinstance(x, Operand) or x.q is None:
            return x
        b = self.builder
        if x.is_constant:
            return Operand(b.const(x.float_values, DType.FP32))
        offset = b.sub(b.cast(x.value, DType.FP32), b.const(float(x.q.zero_point), DType.FP32))
        return Operand(b.mul(offset, b.const(float(x.q.scale), DType.FP32)))

    # -- quantize and dequantize ---------------------------------------------------------------------------------

    def _dequantize(self, node: Node) -> Operand:
        reads_uint8 = is_uint8(_as_node(node.args[0])) and self.target.has_int_profile
        q = self.qparams.read_uint8_as_int8(node) if reads_uint8 else self.qparams.read(node)
        source = self.read(_as_node(node.args[0]))
        assert isinstance(source, Operand)
        tensors = self._dequantized.setdefault(source.value, [])
        # Every reader has its own dequantize node. All dequantize nodes of a tensor with equal parameters share one
        # Operand, so that elementwise functions of this tensor have the same base.
        for tensor in tensors:
            if q.is_equivalent(tensor.q):
                return tensor
        tensors.append(Operand(source.value, q))
        return tensors[-1]

    def _quantize(self, node: Node) -> Operand:
        source = self.read(_as_node(node.args[0]))
        q = self.qparams.read(node)
        context = Context(self.builder, node, q)
        if isinstance(source, Univariate):
            return Operand(source.quantize(self.builder, q))
        assert isinstance(source, Operand)
        if source.q is not None:
            return Operand(context.requantize(source, q))
        # PyTorch quantizes the constant: its float32 product of constant and 1 / scale decides the rounding near ties.
        if _as_node(node.args[0]) in self.constants:
            return Operand(self.builder.const(evaluate_node(node, self.constants.__getitem__).numpy(), q.dtype))
        if source.is_constant:
            return Operand(self.builder.const(q.quantize(source.float_values), q.dtype))
        if not self.target.has_fp_profile:
            raise Unsupported(f"it quantizes a floating-point tensor, and {self.target.name} runs integers only")
        # Bit-exact to PyTorch: multiply, round (CAST rounds to nearest even), and only then add the zero point.
        # A float32 sum before rounding would itself be rounded.
        b = self.builder
        scaled = b.clamp(
            b.mul(source.value, b.const(1.0 / float(q.scale), DType.FP32)), q.qmin - q.zero_point, q.qmax - q.zero_point
        )
        if q.zero_point:
            rounded = b.cast(b.cast(scaled, DType.INT32), DType.FP32)
            scaled = b.add(rounded, b.const(float(q.zero_point), DType.FP32))
        return Operand(b.cast(scaled, q.dtype))


def _apply_pending_scale(x: Any) -> Any:
    """Convert an operand that is a function c * x, not yet emitted, to the tensor x with its scale multiplied by c.

    Raises:
        Unsupported: the operand is a function of another form.
    """
    if isinstance(x, list):
        return [_apply_pending_scale(item) for item in x]
    return x.to_scaled_tensor() if isinstance(x, Univariate) else x


def _flatten(items: Iterable[Any]) -> Iterable[Any]:
    for item in items:
        if isinstance(item, (list, tuple)):
            yield from _flatten(item)
        elif isinstance(item, (Operand, Univariate)):
            yield item


def _wrap_results(result: Any, q: QParams | None) -> LoweringResult:
    if isinstance(result, (list, tuple)):
        return [_wrap_results(item, q) for item in result]
    return result if isinstance(result, Operand) else Operand(result, q)


def _as_node(x: Any) -> Node:
    assert isinstance(x, Node), x
    return x
