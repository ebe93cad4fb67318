"""Output SQNR: signal-to-quantization-noise ratio of each result, measured at every export and reported if it is low.

The quantized graph runs on the last calibration sample with fake quantization: operators compute in floating point, and
quantize operators round. The SQNR reflects ranges and scales, but not rounding inside the target's integer arithmetic.
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

from arm_backend_core.kinds import is_float_tensor
from arm_backend_core.nodes import describe_node, is_dequantize, is_quantize, is_random
from arm_backend_core.ops.loop_markers import LOOP_OUT
from arm_backend_core.quantization.diagnostics.error_metrics import ErrorSums
from arm_backend_core.quantization.graph_interpreter import GraphInterpreter, find_branch_conditions

if TYPE_CHECKING:
    from arm_backend_core.quantization.ptq import ObservedProgram

_EMBEDDING = torch.ops.aten.embedding.default
#: SQNR in dB below which the user is warned. At this SQNR, the noise amplitude is half of the signal's.
MIN_SQNR_DB = 6.0
#: Higher SQNRs in dB count as this one: int16 rounding alone limits the SQNR to about this value.
_MAX_SQNR_DB = 60.0
#: Maximum number of elements of all intermediate results together. All are stored to find the largest SQNR drop.
_MAX_STORED_ELEMENTS = 1 << 27


@dataclass(frozen=True)
class _QuantizedConstant:
    """A quantized constant. Each reader dequantizes it, so that only one float copy exists at a time.

    Attributes:
        integers: quantized values.
        parameters: scale and zero point, then the channel dimension if they are per channel.
        floats: the original float values in a run of the float reference, else None.
    """

    integers: Tensor
    parameters: Sequence[Any]
    floats: Tensor | None

    def dequantize(self, rows: Any = ...) -> Tensor:
        """Return all float values, or only ``rows``: a sample reads few rows of an embedding table."""
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
        on_float: called with each node and its float result.
    """

    def __init__(
        self, model: ObservedProgram, *, fake_quantize: bool, on_float: Callable[[Node, Any], None] | None = None
    ) -> None:
        super().__init__(model.graph, find_branch_conditions(model.graph))
        self._model, self._fake_quantize, self._on_float = model, fake_quantize, on_float

    def get_attr(self, node: Node) -> Any:
        return attrgetter(str(node.target))(self._model.model)

    def on_operand(self, source: Node, reader: Node, value: Any) -> Any:
        return (
            value.dequantize() if isinstance(value, _QuantizedConstant) and reader.target is not _EMBEDDING else value
        )

    def call_function(self, node: Node, args: Any, kwargs: Any) -> Any:
        if is_quantize(node):
            return _fake_quantize(*args) if self._fake_quantize else args[0]
        if is_dequantize(node):
            if is_float_tensor(args[0]):
                return args[0]
            name = str(node.all_input_nodes[0].target)
            floats = None if self._fake_quantize else self._model.float_constants[name]
            return _QuantizedConstant(args[0], args[1:], floats)
        if node.target is _EMBEDDING and isinstance(args[0], _QuantizedConstant):
            return args[0].dequantize(args[1])
        return super().call_function(node, args, kwargs)

    def on_result(self, node: Node, value: Any) -> Any:
        if self._on_float is not None and is_float_tensor(value):
            self._on_float(node, value)
        return value


def _fake_quantize(x: Tensor, scale: float, zero_point: int, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """Quantize and dequantize; takes the arguments of a quantize operator."""
    return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, low, high)


def measure_output_sqnr(model: ObservedProgram) -> dict[str, float]:
    """Measure the SQNR in dB of each float result of the model on the last calibration sample.

    Args:
        model: has quantize and dequantize operators.

    Returns:
        SQNR by output name. Empty for a model with loops: they carry their state from step to step before it is
        quantized, so that the SQNR would lack the rounding of the state. Also empty for a model with random operators,
        and if PyTorch rejects indices or sizes that quantization changed.
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


def _sqnr(reference: Any, actual: Any) -> float | None:
    """Compute the SQNR in dB; None if the reference is not floating point, not finite, 0 or of another shape."""
    if not is_float_tensor(reference) or reference.shape != actual.shape:
        return None
    sums = ErrorSums.of(reference, actual)
    return sums.metrics.sqnr if sums.signal and math.isfinite(sums.signal + sums.noise) else None


def describe_output_sqnr(model: ObservedProgram, method: str, by_output: Mapping[str, float]) -> str:
    """Describe the output with the lowest SQNR and the operator with the largest SQNR drop, for the user."""
    output, sqnr = min(by_output.items(), key=itemgetter(1))
    location = _find_largest_sqnr_drop(model)
    return (
        f"SQNR of output '{output}' of '{method}' is {sqnr:.1f} dB (last calibration sample)"
        f"{location and '; the largest loss is at ' + location}. Scale tensors with a wide range in the model, set "
        "such modules to A16W8 with precisions=, or compare every layer with result.compare(samples)"
    )


def _find_largest_sqnr_drop(model: ObservedProgram) -> str:
    """Describe the operator whose SQNR drops most below its operands'; "" if the tensors take too much memory."""
    nodes = [node for node in model.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    if sum(node.meta["val"].numel() for node in nodes) > _MAX_STORED_ELEMENTS:
        return ""
    float_results, sqnrs = dict[Node, Tensor](), dict[Node, float]()

    def compare(node: Node, value: Tensor) -> None:
        sqnr = _sqnr(float_results.get(node), value) if node in float_results else None
        sqnrs[node] = _MAX_SQNR_DB if sqnr is None else min(sqnr, _MAX_SQNR_DB)

    _FloatInterpreter(
        model, fake_quantize=False, on_float=lambda node, value: float_results.update({node: value.clone()})
    ).run(model.last_sample.reset())
    _FloatInterpreter(model, fake_quantize=True, on_float=compare).run(model.last_sample.reset())

    def sqnr_drop(node: Node) -> float:
        return (
            min((sqnrs.get(source, _MAX_SQNR_DB) for source in node.all_input_nodes), default=_MAX_SQNR_DB)
            - sqnrs[node]
        )

    node = max((node for node in sqnrs if node.op == "call_function"), key=sqnr_drop, default=None)
    if node is None:
        return ""
    source = node.all_input_nodes[0] if is_quantize(node) else node
    scale = f", quantized with scale {node.args[1]:.3g}" if is_quantize(node) else ""
    before, after = sqnrs[node] + sqnr_drop(node), sqnrs[node]
    return f"{describe_node(source)}{scale} ({before:.1f} dB before it, {after:.1f} dB after it)"
