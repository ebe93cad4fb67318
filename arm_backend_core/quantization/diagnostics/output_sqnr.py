"""Output SQNR: signal-to-quantization-noise ratio of each result, measured at every export and reported if it is low.

The quantized graph computes the last calibration sample again, in floating point between quantize and dequantize
operators. That shows unsuitable ranges and scales, not differences in the target's integer arithmetic.
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
from arm_backend_core.nodes import describe_node, is_dequantize, is_quantize, is_random
from arm_backend_core.ops.loop_markers import LOOP_OUT
from arm_backend_core.quantization.diagnostics.error_metrics import ErrorSums
from arm_backend_core.quantization.graph_interpreter import GraphInterpreter, find_branch_conditions

if TYPE_CHECKING:
    from arm_backend_core.quantization.ptq import ObservedProgram

_EMBEDDING = torch.ops.aten.embedding.default
#: SQNR in dB below which the user is warned: the noise amplitude is half of the signal's.
MIN_SQNR_DB = 6.0
#: SQNR in dB at which operands are capped when losses are compared: int16 rounding alone adds as much noise.
_MAX_SQNR_DB = 60.0
#: Maximum number of elements of all tensors that are kept to locate the largest loss.
_MAX_KEPT_ELEMENTS = 1 << 27


@dataclass(frozen=True)
class _QuantizedConstant:
    """A quantized constant. Each reader dequantizes it, so that only one float copy exists at a time."""

    integers: Tensor
    parameters: Sequence[Any]
    floats: Tensor | None

    def __call__(self, rows: Any = ...) -> Tensor:
        """Return the float values: all, or ``rows`` of an embedding table, of which a sample reads few."""
        if self.floats is not None:
            return self.floats[rows]
        scale, zero_point = self.parameters[:2]
        if isinstance(scale, Tensor):
            shape = [1] * self.integers.dim()
            shape[self.parameters[2]] = -1
            scale, zero_point = (x.float().reshape(shape).expand_as(self.integers)[rows] for x in (scale, zero_point))
        return (self.integers[rows].float() - zero_point) * scale


class _FloatInterpreter(GraphInterpreter):
    """Runs the quantized graph in floating point, with fake quantization or without.

    Args:
        fake_quantize: whether quantize operators round; if False, the run gives the float reference.
        watch: called with each node and its float result.
    """

    def __init__(
        self, model: ObservedProgram, *, fake_quantize: bool, watch: Callable[[Node, Any], None] | None = None
    ) -> None:
        super().__init__(model.graph, find_branch_conditions(model.graph))
        self._model, self._rounds, self._watch = model, fake_quantize, watch

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
        if self._watch is not None and _is_float_tensor(value):
            self._watch(node, value)
        return value


def _fake_quantize(x: Tensor, scale: float, zero_point: int, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """Quantize and dequantize; takes the arguments of a quantize operator."""
    return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, low, high)


def measure_output_sqnr(model: ObservedProgram) -> dict[str, float]:
    """Measure the SQNR in dB of each float result of the model on the last calibration sample.

    Args:
        model: has quantize and dequantize operators.

    Returns:
        SQNR by output name. Empty for a model with loops (state is carried over before the operators that quantize it),
        for one with random operators, and where PyTorch rejects indices or sizes that quantization changed.
    """
    if any(node.target is LOOP_OUT or is_random(node) for node in model.graph.nodes):
        return {}
    try:
        results = _FloatInterpreter(model, fake_quantize=True).run(model.last_sample.reset())
    except (RuntimeError, IndexError, ValueError):
        return {}
    return {
        spec.arg.name: sqnr
        for spec, x, y in zip(model.output_specs, model.last_sample.results, results, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT and (sqnr := _sqnr(x, y)) is not None
    }


def _is_float_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and kind_of(value.dtype) is ScalarKind.FLOAT


def _sqnr(exact: Any, actual: Any) -> float | None:
    """Compute the SQNR in dB; None if the reference is not floating point, not finite, 0 or of another shape."""
    if not _is_float_tensor(exact) or exact.shape != actual.shape:
        return None
    sums = ErrorSums.of(exact, actual)
    return sums.metrics.sqnr if sums.signal and math.isfinite(sums.signal + sums.noise) else None


def describe_output_sqnr(model: ObservedProgram, method: str, by_output: Mapping[str, float]) -> str:
    """Describe the output with the lowest SQNR and the operator with the largest loss, for the user."""
    output, sqnr = min(by_output.items(), key=itemgetter(1))
    where = _find_largest_loss(model)
    return (
        f"SQNR of output '{output}' of '{method}' is {sqnr:.1f} dB (last calibration sample)"
        f"{where and '; the largest loss is at ' + where}. Scale tensors with a wide range in the model, set such "
        "modules to A16W8 with precisions=, or compare every layer with result.compare(samples)"
    )


def _find_largest_loss(model: ObservedProgram) -> str:
    """Describe the operator whose SQNR drops most below its operands'; "" if the tensors take too much memory."""
    nodes = [node for node in model.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    if sum(node.meta["val"].numel() for node in nodes) > _MAX_KEPT_ELEMENTS:
        return ""
    exact, sqnrs = dict[Node, Tensor](), dict[Node, float]()

    def compare(node: Node, value: Tensor) -> None:
        sqnr = _sqnr(exact.get(node), value) if node in exact else None
        sqnrs[node] = _MAX_SQNR_DB if sqnr is None else min(sqnr, _MAX_SQNR_DB)

    _FloatInterpreter(model, fake_quantize=False, watch=lambda node, value: exact.update({node: value.clone()})).run(
        model.last_sample.reset()
    )
    _FloatInterpreter(model, fake_quantize=True, watch=compare).run(model.last_sample.reset())

    def loss(node: Node) -> float:
        return (
            min((sqnrs.get(source, _MAX_SQNR_DB) for source in node.all_input_nodes), default=_MAX_SQNR_DB)
            - sqnrs[node]
        )

    node = max((node for node in sqnrs if node.op == "call_function"), key=loss, default=None)
    if node is None:
        return ""
    source = node.all_input_nodes[0] if is_quantize(node) else node
    scale = f", quantized with scale {node.args[1]:.3g}" if is_quantize(node) else ""
    return (
        f"{describe_node(source)}{scale} ({sqnrs[node] + loss(node):.1f} dB before it, {sqnrs[node]:.1f} dB after it)"
    )
