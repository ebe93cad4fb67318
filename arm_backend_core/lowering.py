"""fx graph -> TOSA graph, reading quantize/dequantize pairs as parameters of the operators between them.

Every node is lowered once, in program order. A node that cannot be lowered becomes ``Unsupported`` data, and what
reads it sees a fresh graph input: so the walk tells which nodes a target can run. The graph of each delegate is cut
out of the graph of the program.
"""

from __future__ import annotations

import operator
import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from arm_backend_core.aten.int64 import INT32, Intervals
from arm_backend_core.dtype import DType
from arm_backend_core.errors import InternalError, Unsupported, fault
from arm_backend_core.fusion import Univariate, before_reader, is_term, merging_reader, univariate
from arm_backend_core.kinds import ScalarKind, kind_of
from arm_backend_core.nodes import (
    DECOMPOSITION_REFUSAL,
    boundary_order,
    evaluated,
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
from arm_backend_core.ops.operands import Context, Tensor, dtype_of, has_tosa_dtype
from arm_backend_core.ops.registry import Kind, Record
from arm_backend_core.permutation import Layout, identity, inverse
from arm_backend_core.qparams import QParams
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Origin, Value, constant

Result = Tensor | Univariate | list[Any] | Unsupported


class Lowering:
    """One walk over the nodes of a program.

    Attributes:
        target: what may be used.
        floats: nodes that are computed in floating point, although what they read is quantized.
        constants: arrays of the nodes that are parameters, buffers or computed from these.
        graph: TOSA operators of all nodes; those of a node that was lowered again, or refused, are dead.
        results: what every node visited became.
    """

    def __init__(self, target: Target, constants: Mapping[Node, torch.Tensor], floats: Set[Node] = frozenset()) -> None:
        self.target, self.floats = target, floats
        self.constants: dict[Node, Any] = dict(constants)
        self.graph = Graph()
        self.results: dict[Node, Result] = {}
        self.builder = Builder(self.graph, target, splits=True)
        self._entered: dict[Node, tuple[Value, Tensor]] = {}  # a node outside: the graph's input, and what it is here
        self._dequantized: dict[Value, list[Tensor]] = {}
        self._tabulated: dict[Univariate, Tensor] = {}  # beside waves of many turns
        self._functions: dict[Node, Counter[Origin]] = {}  # that wait for the operator that computes them
        self._intervals = Intervals(self.constants)

    def run(self, nodes: Iterable[Node], outside: Collection[Node]) -> None:
        """Lower ``nodes``, which are in program order, except those in ``outside``."""
        for node in nodes:
            if node not in outside:
                self.results[node] = self._guarded(node)

    def exclude(self, nodes: Iterable[Node], outside: Collection[Node]) -> None:
        """Lower anew what reads a node that was put ``outside`` since, directly or not.

        Args:
            nodes: those of ``run``.
        """
        stale = {node for node in outside if node in self.results}
        for node in stale:
            del self.results[node]
        for node in nodes:
            if node not in outside and any(source in stale for source in node.all_input_nodes):
                stale.add(node)
                self.results[node] = self._guarded(node)

    def _guarded(self, node: Node) -> Result:
        mark = len(self.graph.ops)
        *_, module = ("", *modules_of(node))
        origin = Origin(node.name, operator_name(node), source_line(node), module)
        self.builder.origins = {origin: 1}
        try:
            result = self._lower(node)
            self._trace(node, origin, result, self.graph.ops[mark:])
            # A constant is held in a type that TOSA has: float64 as FP32.
            return result if node in self.constants else self._checked(node, result)
        except Unsupported as reason:
            refusal = reason
        except InternalError:
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}: {error}"
            refusal = fault(f"lowering {operator_name(node)} raised {what}", error)
        dead = set(self.graph.ops[mark:])
        del self.graph.ops[mark:]
        self._entered = {source: kept for source, kept in self._entered.items() if kept[1].value.producer not in dead}
        return refusal

    def _trace(self, node: Node, origin: Origin, result: Result, made: Sequence[Op]) -> None:
        """Tell ``made`` of the work that it does, and of the functions that are computed with it."""
        functions = sum((self._functions.get(source, Counter()) for source in node.all_input_nodes), Counter[Origin]())
        own = Counter({origin: result.base.value.size}) if isinstance(result, Univariate) else None
        self._functions[node] = Counter() if own is None else functions + own
        for op in made:
            alone = not functions or not is_quantize(node)
            op.origins = functions + Counter(dict.fromkeys(op.origins, op.work) if alone else {})

    def _checked(self, node: Node, result: Result) -> Result:
        """``result`` if it is what PyTorch says that the node gives: number, shape and dtype of the results.

        Raises:
            Fault: it is not.
        """
        meta = node.meta.get("val")
        several = isinstance(meta, (list, tuple))
        made, expected = (x if isinstance(x, (list, tuple)) else [x] for x in (result, meta))
        if len(made) != len(expected) or isinstance(result, list) != several:
            raise fault(f"{operator_name(node)} was lowered to {len(made)} results in place of {len(expected)}")
        for item, wanted in zip(made, expected, strict=True):
            if isinstance(wanted, torch.Tensor) and not isinstance(item, Unsupported) and not _agrees(item, wanted):
                what = f"{item.base.value if isinstance(item, Univariate) else item.value}"
                raise fault(
                    f"{operator_name(node)} was lowered to {what} in place of {wanted.dtype}{list(wanted.shape)}"
                )
        return result

    # -- operands ------------------------------------------------------------------------------------------------

    def read(self, node: Node) -> Tensor | Univariate | list[Any]:
        """What ``node`` became; a node outside is a graph input."""
        if node in self.constants:
            _require_held(node.name, self.constants[node])
        result = self.results.get(node)
        if result is not None and not isinstance(result, Unsupported):
            return result
        if node in self.constants:
            self.results[node] = tensor = _constant(node.name, self.constants[node])
            return tensor
        if node not in self._entered:
            self._entered[node] = self._input(node)
        return self._entered[node][1]

    def entry(self, node: Node) -> tuple[Value, Layout]:
        """What a delegate that reads ``node`` and does not compute it is given, and in which order it lies."""
        result = self.results.get(node)
        if isinstance(result, Tensor):
            return result.value, identity(result.rank)
        return self._entered[node][0], boundary_order(node)

    def is_internal(self, node: Node) -> bool:
        """Whether ``node``'s result cannot leave a delegate: several tensors, real numbers as integers, a function."""
        result = self.results[node]
        return not isinstance(result, Tensor) or result.q is not None

    def _input(self, node: Node) -> tuple[Value, Tensor]:
        meta = node.meta.get("val")
        if not isinstance(meta, torch.Tensor):
            raise Unsupported(f"'{node.name}' is not a tensor")
        _require_static(node)
        # The target takes memory as it lies: the graph's input has the dimensions in that order.
        order = boundary_order(node)
        shape, dtype = tuple(meta.shape[axis] for axis in order), dtype_of(meta.dtype)
        if dtype.is_float and not self.target.floating:
            raise Unsupported(f"it is not quantized, and {self.target.name} runs integers only")
        # Where no operator reads it as it is, it must yet have a type and rank that the target knows.
        reason = self.builder.refusal("IDENTITY", [Value(shape, dtype, node.name)], shape, dtype)
        if reason:
            raise Unsupported(reason)
        value = self.graph.add_input(shape, dtype, node.name)
        return value, Tensor(self.builder.transpose(value, inverse(order)))

    def _operand(self, x: Any) -> Any:
        if isinstance(x, Node):
            return self.read(x)
        if isinstance(x, (list, tuple)):
            return [self._operand(item) for item in x]
        return x

    # -- nodes ---------------------------------------------------------------------------------------------------

    def _lower(self, node: Node) -> Result:
        if is_dequantize(node) or is_quantize(node):
            _require_static(node)
            return self._dequantize(node) if is_dequantize(node) else self._quantize(node)
        if is_constant(node, self.constants):
            self.constants[node] = value = evaluated(node, self.constants.__getitem__)
            return _constant(node.name, value)
        if node.target is operator.getitem:
            items = self.read(_node(node.args[0]))
            if not isinstance(items, list):
                raise Unsupported("the operator that it picks a result of stays on the CPU")
            item: Result = items[_int(node.args[1])]
            return self._to_float(item) if node in self.floats else item
        if is_random(node) and find_record(node) is None and DECOMPOSITION_REFUSAL not in node.meta:
            raise Unsupported("it draws random numbers, which no target does; give them as an input")
        wide = getattr(first_result(node), "dtype", None) is torch.int64  # others are known to what reads them
        if is_integer(node) and not self._intervals.fits(node) and wide:
            raise Unsupported(
                "its int64 result may exceed int32, which is all that TOSA has; compute with .to(torch.int32) values"
            )
        if misread := self._intervals.misread(node):
            raise Unsupported(f"it reads '{misread.name}', whose int64 values may exceed int32, all that TOSA has")
        for tensor in (node, *node.all_input_nodes):
            _require_static(tensor)
        record = find_record(node)
        if record is None:
            missing = f"there is no lowering for {operator_name(node)}; build it of operators that have one"
            raise node.meta.get(DECOMPOSITION_REFUSAL) or Unsupported(missing)
        args = [self._operand(arg) for arg in node.args]
        kwargs = {name: self._operand(arg) for name, arg in node.kwargs.items()}
        operands = list(_flatten([*args, *kwargs.values()]))
        chosen = record.is_select and self.result_qparams(node) is not None
        if chosen or any(isinstance(x, Univariate) or x.q is not None for x in operands):
            return self._lower_quantized(node, record, args, kwargs)
        return self._lower_plain(node, record, args, kwargs)

    def _lower_plain(self, node: Node, record: Record, args: list[Any], kwargs: dict[str, Any]) -> Result:
        tensors = [x.value.dtype for x in _flatten([*args, *kwargs.values()])]
        if is_float(node) and tensors and not any(dtype.is_float for dtype in tensors) and record.lower_integer:
            out = self.result_qparams(node)
            if out is not None:  # integers become real numbers
                return _tensors(record.lower_integer(Context(self.builder, node, out), *args, **kwargs), out)
        if not self.target.floating and (is_float(node) or any(dtype.is_float for dtype in tensors)):
            raise Unsupported(f"it is not quantized, and {self.target.name} runs integers only")
        return _tensors(record.lower(Context(self.builder, node), *args, **kwargs), None)

    def _lower_quantized(self, node: Node, record: Record, args: list[Any], kwargs: dict[str, Any]) -> Result:
        whole = [x.composed or x if isinstance(x, Univariate) else x for x in args]
        function = None if node in self.floats else univariate(node, record, whole, kwargs)
        if function is not None and any(isinstance(x, Univariate) and (x.oscillates or x.composed) for x in args):
            parts = [self._tabulated_once(x) if isinstance(x, Univariate) and x.oscillates else x for x in args]
            apart = univariate(node, record, parts, kwargs)
            if apart is not None:
                function = replace(apart, composed=function)
            elif self.result_qparams(node) is not None:
                function = None
                args = [self._tabulated_once(x) if isinstance(x, Univariate) and not x.factor else x for x in args]
        if function is not None and not (function.is_discontinuous and self.result_qparams(node) is not None):
            return function
        args = [_settle(arg) for arg in args]
        kwargs = {name: _settle(arg) for name, arg in kwargs.items()}
        if record.lower_integer is None or node in self.floats:
            return self._in_float(node, record, args, kwargs, f"{overload_of(node.target)} has no integer lowering")
        if record.kind is Kind.SHARED:
            out = next(x.q for x in _flatten(args) if x.q is not None)
        else:
            out = self.result_qparams(node)
            exact = is_term(node) and all(isinstance(x, Tensor) and x.value.dtype is DType.INT16 for x in args)
            if out is None and is_float(node) and not exact:
                return self._in_float(node, record, args, kwargs, "its result is not quantized")
        rule = record.lower_integer
        return _tensors(rule(Context(self.builder, node, out), *args, **kwargs), out if is_float(node) else None)

    def _tabulated_once(self, function: Univariate) -> Tensor:
        if function not in self._tabulated:
            self._tabulated[function] = function.tabulated(self.builder)
        return self._tabulated[function]

    def _in_float(self, node: Node, record: Record, args: list[Any], kwargs: dict[str, Any], reason: str) -> Result:
        """Where floating point may be mixed in (VGF), dequantize the operands and use the plain rule."""
        if not self.target.floating:
            raise Unsupported(f"{reason}, and {self.target.name} runs integers only")
        args = [self._to_float(arg) for arg in args]
        kwargs = {name: self._to_float(arg) for name, arg in kwargs.items()}
        return _tensors(record.lower(Context(self.builder, node), *args, **kwargs), None)

    def _to_float(self, x: Any) -> Any:
        if isinstance(x, list):
            return [self._to_float(item) for item in x]
        if not isinstance(x, Tensor) or x.q is None:
            return x
        b = self.builder
        if x.is_constant:
            return Tensor(b.const(x.real, DType.FP32))
        steps = b.sub(b.cast(x.value, DType.FP32), b.const(float(x.q.zero_point), DType.FP32))
        return Tensor(b.mul(steps, b.const(float(x.q.scale), DType.FP32)))

    # -- quantize and dequantize ---------------------------------------------------------------------------------

    def _dequantize(self, node: Node) -> Tensor:
        source = self.read(_node(node.args[0]))
        assert isinstance(source, Tensor)
        q = self.node_qparams(node)
        known = self._dequantized.setdefault(source.value, [])
        for tensor in known:  # every reader has a node of its own, but a function of one tensor must be seen as such
            if q.same(tensor.q):
                return tensor
        known.append(Tensor(source.value, q))
        return known[-1]

    def _quantize(self, node: Node) -> Tensor:
        source = self.read(_node(node.args[0]))
        q = self.node_qparams(node)
        context = Context(self.builder, node, q)
        if isinstance(source, Univariate):
            return Tensor(source.quantized(self.builder, q))
        assert isinstance(source, Tensor)
        if source.q is not None:
            return Tensor(context.requantize(source, q))
        if _node(node.args[0]) in self.constants:  # PyTorch divides in float32, which shows beside a half
            return Tensor(self.builder.const(evaluated(node, self.constants.__getitem__).numpy(), q.dtype))
        if source.is_constant:
            return Tensor(self.builder.const(q.quantize(source.real), q.dtype))
        if not self.target.floating:
            raise Unsupported(f"it quantizes a floating-point tensor, and {self.target.name} runs integers only")
        # As PyTorch does it, bit by bit: multiply, round (CAST does, to nearest even), and only then add the zero
        # point: in float32 the sum would be rounded too.
        b = self.builder
        steps = b.clamp(
            b.mul(source.value, b.const(1.0 / float(q.scale), DType.FP32)), q.qmin - q.zero_point, q.qmax - q.zero_point
        )
        if q.zero_point:
            rounded = b.cast(b.cast(steps, DType.INT32), DType.FP32)
            steps = b.add(rounded, b.const(float(q.zero_point), DType.FP32))
        return Tensor(b.cast(steps, q.dtype))

    def node_qparams(self, node: Node) -> QParams:
        """Parameters that a quantize or dequantize node carries."""
        if overload_of(node.target).name().split(".")[0].endswith("per_channel"):  # type: ignore[union-attr]
            _, scales, zero_points, axis, qmin, qmax, dtype = node.args[:7]
            scale = self._array(scales).astype(np.float64)
            if np.any(self._array(zero_points)):
                raise Unsupported("per-channel parameters with a zero point other than 0")
            return QParams(scale, 0, dtype_of(_dtype(dtype)), _int(qmin), _int(qmax), _int(axis))
        _, scale_arg, zero_point, qmin, qmax, dtype = node.args[:6]
        scale, zero = self._array(scale_arg), self._array(zero_point)
        return QParams(float(scale), int(zero), dtype_of(_dtype(dtype)), _int(qmin), _int(qmax))

    def _array(self, x: Any) -> np.ndarray[Any, Any]:
        if isinstance(x, Node):
            if x not in self.constants:
                raise Unsupported("quantization parameters are computed while the program runs")
            return np.asarray(self.constants[x].detach().cpu().numpy())
        return np.asarray(x)

    def result_qparams(self, node: Node) -> QParams | None:
        """Parameters that ``node``'s result is quantized with: by its users, or through one that merges into it."""
        readers: list[Node] = []
        while not node.users or not all(is_quantize(user) for user in node.users):
            reader = merging_reader(node)
            if reader is None:
                return None
            readers.append(node := reader)
        first, *others = (self.node_qparams(user) for user in node.users)
        if not all(first.same(other) for other in others):
            return None
        return reduce(lambda q, reader: before_reader(reader, q), reversed(readers), first)


def _settle(x: Any) -> Any:
    """An operand as a tensor, where it is a function that only scales one."""
    if isinstance(x, list):
        return [_settle(item) for item in x]
    return x.settled() if isinstance(x, Univariate) else x


def _flatten(items: Iterable[Any]) -> Iterable[Any]:
    for item in items:
        if isinstance(item, (list, tuple)):
            yield from _flatten(item)
        elif isinstance(item, (Tensor, Univariate)):
            yield item


def _tensors(result: Any, q: QParams | None) -> Result:
    if isinstance(result, (list, tuple)):
        return [_tensors(item, q) for item in result]
    return result if isinstance(result, Tensor) else Tensor(result, q)


def _constant(name: str, value: Any) -> Any:
    """A constant's tensor, or several; ``name`` is for the error. One that TOSA cannot hold is no operand."""
    if isinstance(value, (list, tuple)):
        return [_constant(name, item) for item in value]
    tensor = value.detach()
    if tensor.dtype is torch.float64:
        tensor = tensor.float()
    elif tensor.dtype is torch.int64:
        tensor = tensor.clamp(*INT32)
    elif not has_tosa_dtype(tensor.dtype):
        tensor = torch.zeros_like(tensor, dtype=torch.bool)
    dtype = dtype_of(tensor.dtype)
    array = tensor.float() if dtype.is_float and dtype is not DType.FP16 else tensor
    return Tensor(constant(array.cpu().contiguous().numpy(), dtype, name))


def _require_held(name: str, value: Any) -> None:
    """Raise ``Unsupported`` where TOSA cannot hold a tensor, ``name`` for the error; other constants may read it."""
    if isinstance(value, torch.Tensor) and value.dtype is torch.int64 and not value.equal(value.clamp(*INT32)):
        raise Unsupported(f"int64 constant '{name}' has values that int32 cannot hold")
    if isinstance(value, torch.Tensor) and value.dtype is not torch.float64:
        dtype_of(value.dtype)


def _agrees(item: Tensor | Univariate, wanted: torch.Tensor) -> bool:
    """Whether a result has this shape and element type; real numbers may be held as integers."""
    tensor = item.base if isinstance(item, Univariate) else item
    if tensor.shape != tuple(wanted.shape):
        return False
    if tensor.q is not None:
        return tensor.value.dtype is tensor.q.dtype and kind_of(wanted.dtype) is ScalarKind.FLOAT
    return tensor.value.dtype is dtype_of(wanted.dtype)


def _require_static(node: Node) -> None:
    """Raise ``Unsupported`` where ``node``'s (first) result is of unknown size, or has no elements."""
    first = first_result(node)
    shape = () if first is None else tuple(first.shape)
    if not all(isinstance(size, int) for size in shape):
        raise Unsupported(
            f"'{node.name}' has the shape {list(shape)}, which is not known before the program runs; the target is "
            "compiled for fixed shapes: export without dynamic_shapes, and choose by torch.where in place of indexing"
        )
    if 0 in shape:
        raise Unsupported("TOSA has no tensors without elements")


def _node(x: Any) -> Node:
    assert isinstance(x, Node), x
    return x


def _int(x: Any) -> int:
    assert isinstance(x, int), x
    return x


def _dtype(x: Any) -> torch.dtype:
    assert isinstance(x, torch.dtype), x
    return x
