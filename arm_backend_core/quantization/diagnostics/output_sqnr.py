"""What rounding costs each result of a program: known at every export, and told where little of a result is left.

The quantized graph computes the last calibration sample once more, in floating point between its roundings: that shows
ranges and steps that do not fit, not what a target computes in another way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.export.graph_signature import OutputKind
from torch.fx import Node

from arm_backend_core.kinds import ScalarKind, kind_of
from arm_backend_core.nodes import in_words, is_dequantize, is_quantize, is_random
from arm_backend_core.ops.loops import LOOP_OUT
from arm_backend_core.quantization.diagnostics.error_metrics import ErrorSums
from arm_backend_core.quantization.graph_interpreter import GraphInterpreter, find_branch_conditions

if TYPE_CHECKING:
    from arm_backend_core.quantization.ptq import ObservedProgram

_EMBEDDING = torch.ops.aten.embedding.default
#: dB of a result below which its noise is half of its values: the user is told.
MIN_SQNR_DB = 6.0
#: dB above which noise is no more than a step of int16 adds: operands are taken to be no better.
_MAX_SQNR_DB = 60.0
#: Elements of all tensors up to which they are kept to see where most is lost.
_MAX_KEPT_ELEMENTS = 1 << 27


@dataclass(frozen=True)
class _QuantizedConstant:
    """One that is quantized; each reader computes the real numbers, so that they take memory one by one."""

    integers: Tensor
    parameters: Sequence[Any]
    floats: Tensor | None

    def __call__(self, rows: Any = ...) -> Tensor:
        """All, or these rows of a table, of which a sample takes few."""
        if self.floats is not None:
            return self.floats[rows]
        scale, zero_point = self.parameters[:2]
        if isinstance(scale, Tensor):
            shape = [1] * self.integers.dim()
            shape[self.parameters[2]] = -1
            scale, zero_point = (x.float().reshape(shape).expand_as(self.integers)[rows] for x in (scale, zero_point))
        return (self.integers[rows].float() - zero_point) * scale


class _FloatInterpreter(GraphInterpreter):
    """The quantized graph in floating point: with its roundings, or as it was without them."""

    def __init__(self, model: ObservedProgram, *, rounds: bool, see: Callable[[Node, Any], None] | None = None) -> None:
        super().__init__(model.graph, find_branch_conditions(model.graph))
        self._model, self._rounds, self._see = model, rounds, see

    def get_attr(self, node: Node) -> Any:
        return attrgetter(str(node.target))(self._model.model)

    def on_operand(self, source: Node, reader: Node, value: Any) -> Any:
        return value() if isinstance(value, _QuantizedConstant) and reader.target is not _EMBEDDING else value

    def call_function(self, node: Node, args: Any, kwargs: Any) -> Any:
        if is_quantize(node):
            return _fake_quantize(*args) if self._rounds else args[0]
        if is_dequantize(node):
            if _is_float_tensor(args[0]):
                return args[0]
            floats = self._model.float_constants[str(node.all_input_nodes[0].target)] if not self._rounds else None
            return _QuantizedConstant(args[0], args[1:], floats)
        if node.target is _EMBEDDING and isinstance(args[0], _QuantizedConstant):
            return args[0](args[1])
        return super().call_function(node, args, kwargs)

    def on_result(self, node: Node, value: Any) -> Any:
        if self._see is not None and _is_float_tensor(value):
            self._see(node, value)
        return value


def _fake_quantize(x: Tensor, scale: float, zero_point: int, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """The real numbers that the integers stand for."""
    return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, low, high)


def measure_output_sqnr(model: ObservedProgram) -> dict[str, float]:
    """dB of each result of floating point over the noise that rounding adds to it, for the last sample, by its name.

    Args:
        model: with quantize and dequantize operators.

    Returns:
        none of a model with loops, where what starts one again stands before the operators that round it; of one that
        draws random numbers; and where PyTorch refuses what rounding makes of indices and sizes.
    """
    if any(node.target is LOOP_OUT or is_random(node) for node in model.graph.nodes):
        return {}
    try:
        made = _FloatInterpreter(model, rounds=True).run(model.last_sample.reset())
    except (RuntimeError, IndexError, ValueError):
        return {}
    return {
        spec.arg.name: sqnr
        for spec, x, y in zip(model.output_specs, model.last_sample.results, made, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT and (sqnr := _sqnr(x, y)) is not None
    }


def _is_float_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and kind_of(value.dtype) is ScalarKind.FLOAT


def _sqnr(exact: Any, made: Any) -> float | None:
    """None of what is no floating point, not finite, 0 or of another size."""
    if not _is_float_tensor(exact) or exact.shape != made.shape:
        return None
    sums = ErrorSums.of(exact, made)
    return sums.metrics.sqnr if sums.signal and math.isfinite(sums.signal + sums.noise) else None


def describe_output_sqnr(model: ObservedProgram, method: str, found: Mapping[str, float]) -> str:
    """A sentence on the result of which least is left, with what loses most."""
    output, sqnr = min(found.items(), key=itemgetter(1))
    where = _find_largest_loss(model)
    return (
        f"rounding leaves {sqnr:.1f} dB of output '{output}' of '{method}' (signal to noise, last "
        f"calibration sample){where and ': most is lost at ' + where}. Scale what has a wide range in the model, have "
        "precisions= make such modules A16W8, or see every layer with result.compare(samples)"
    )


def _find_largest_loss(model: ObservedProgram) -> str:
    """The operator whose result is worse than its operands by the most."""
    nodes = [node for node in model.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    if sum(node.meta["val"].numel() for node in nodes) > _MAX_KEPT_ELEMENTS:
        return ""
    exact, left = dict[Node, Tensor](), dict[Node, float]()

    def compare(node: Node, value: Tensor) -> None:
        sqnr = _sqnr(exact.get(node), value) if node in exact else None
        left[node] = _MAX_SQNR_DB if sqnr is None else min(sqnr, _MAX_SQNR_DB)

    _FloatInterpreter(model, rounds=False, see=lambda node, value: exact.update({node: value.clone()})).run(
        model.last_sample.reset()
    )
    _FloatInterpreter(model, rounds=True, see=compare).run(model.last_sample.reset())

    def lost(node: Node) -> float:
        return (
            min((left.get(source, _MAX_SQNR_DB) for source in node.all_input_nodes), default=_MAX_SQNR_DB) - left[node]
        )

    node = max((node for node in left if node.op == "call_function"), key=lost, default=None)
    if node is None:
        return ""
    shown = node.all_input_nodes[0] if is_quantize(node) else node
    of = f", which a step of {node.args[1]:.3g} rounds" if is_quantize(node) else ""
    return f"{in_words(shown)}{of} ({left[node] + lost(node):.1f} dB before it, {left[node]:.1f} dB behind it)"
