"""Output SQNR: signal-to-quantization-noise ratio of each result, measured after calibration for the report.

If the SQNR is low, the report gets a note. If the SQNR is below the option ``min_sqnr``, the export fails.

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

from arm_backend_core.nodes import describe_node, is_dequantize, is_quantize, is_random
from arm_backend_core.ops.loop_markers import LOOP_OUT
from arm_backend_core.quantization.diagnostics.error_metrics import ErrorSums
from arm_backend_core.quantization.graph_interpreter import GraphInterpreter, find_branch_conditions
from arm_backend_core.scalar_kind import is_float_tensor

if TYPE_CHECKING:
    from arm_backend_core.quantization.ptq import ObservedProgram

_EMBEDDING = torch.ops.aten.embedding.default
#: SQNR in dB below which the user is warned. At this SQNR, the noise amplitude is half of the signal's.
MIN_SQNR_DB = 6.0
#: Maximum number of elements of all results of the graph together. ``_find_noisiest_operator`` stores all results. If
#: they have more elements, it returns no operator.
_MAX_STORED_ELEMENTS = 1 << 27


@dataclass(frozen=True)
class _QuantizedConstant:
    """A quantized constant. Each reader dequantizes it, so that only one float copy exists at a time.

    Attributes:
        integers: quantized values.
        parameters: scale and zero point, then the channel dimension if they are per channel.
        floats: the original float values if the interpreter computes the float reference, else None.
    """

    integers: Tensor
    parameters: Sequence[Any]
    floats: Tensor | None

    def dequantize(self, rows: Any = ...) -> Tensor:
        """Return the float values of ``rows`` (default: all rows). An embedding reads only few rows of its table."""
        if self.floats is not None:
            return self.floats[rows]
        scale, zero_point = self.parameters[:2]
        if isinstance(scale, Tensor):
            shape = [1] * self.integers.dim()
            shape[self.parameters[2]] = -1
            scale, zero_point = (x.float().reshape(shape).expand_as(self.integers)[rows] for x in (scale, zero_point))
        return (self.integers[rows].float() - zero_point) * scale


class _FloatInterpreter(GraphInterpreter):
    """Runs the quantized graph in floating point, with or without fake quantization.

    Args:
        fake_quantize: whether quantize operators round. If False, the results are the float reference.
        on_float: called with each node and its float result.
    """

    def __init__(
        self, model: ObservedProgram, *, fake_quantize: bool, on_float: Callable[[Node, Any], None] | None = None
    ) -> None:
        super().__init__(model.graph, find_branch_conditions(model.graph))
        self._model, self._fake_quantize, self._on_float = model, fake_quantize, on_float

    def get_attr(self, node: Node) -> Any:
        value = attrgetter(str(node.target))(self._model.graph_module)
        if self._fake_quantize or not is_float_tensor(value):
            return value
        return self._model.float_constants.get(str(node.target), value)  # the bias before bias correction

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
        {output name: SQNR}. An output is omitted if its reference is not floating point or is 0, if the reference or
        the quantized result is not finite, or if their shapes differ. Empty for a model with loops: this interpreter
        passes the loop state to the next iteration without quantizing it, so the SQNR would not include the rounding of
        the state. Also empty for a model with random operators, and if PyTorch rejects indices or sizes that
        quantization changed.
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
    """Compute the SQNR in dB; None if the shapes differ, a value is not finite, or ``reference`` is 0 or not float."""
    if not is_float_tensor(reference) or reference.shape != actual.shape:
        return None
    sums = ErrorSums.of(reference, actual)
    return sums.metrics.sqnr if sums.signal and math.isfinite(sums.signal + sums.noise) else None


def describe_output_sqnr(model: ObservedProgram, method: str, by_output: Mapping[str, float]) -> str:
    """Describe the output with the lowest SQNR and the operator that adds the most noise, for the user."""
    output, sqnr = min(by_output.items(), key=itemgetter(1))
    node, location = _find_noisiest_operator(model)
    is_int16 = node is not None and _activation_dtype(node) is torch.int16
    precision = "" if is_int16 else ", set such modules to A16W8 with precisions="
    return (
        f"SQNR of output '{output}' of '{method}' is {sqnr:.1f} dB (last calibration sample)"
        f"{location and '; most noise is added at ' + location}. Rescale wide-range tensors in the model"
        f"{precision}, or compare every layer with result.compare(samples)"
    )


def _activation_dtype(node: Node) -> torch.dtype | None:
    """Return the dtype of the first quantize operator from ``node`` upstream along first operands; None without one."""
    while not is_quantize(node):
        sources = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), Tensor)]
        if not sources:
            return None
        node = sources[0]
    dtype: torch.dtype = node.args[5]  # type: ignore[assignment]
    return dtype


def _find_noisiest_operator(model: ObservedProgram) -> tuple[Node | None, str]:
    """Find the operator that adds the most noise, relative to the signal, and describe it.

    Operators are compared by the noise-to-signal ratio that they add, not by decibels: an operator that reduces the
    SQNR from infinity to 40 dB adds a ratio of 0.0001, and one that reduces it from 20 to 3 dB adds 0.49.

    Returns:
        The node and its description; None and "" if the tensors take too much memory, or no operator has a float
        result.
    """
    nodes = [node for node in model.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    if sum(node.meta["val"].numel() for node in nodes) > _MAX_STORED_ELEMENTS:
        return None, ""
    float_results, sqnrs = dict[Node, Tensor](), dict[Node, float]()

    def compare(node: Node, value: Tensor) -> None:
        sqnr = _sqnr(float_results.get(node), value) if node in float_results else None
        sqnrs[node] = math.inf if sqnr is None else sqnr

    _FloatInterpreter(
        model, fake_quantize=False, on_float=lambda node, value: float_results.update({node: value.clone()})
    ).run(model.last_sample.reset())
    _FloatInterpreter(model, fake_quantize=True, on_float=compare).run(model.last_sample.reset())

    def operand_sqnr(node: Node) -> float:
        return min((sqnrs.get(source, math.inf) for source in node.all_input_nodes), default=math.inf)

    def added_noise(node: Node) -> float:
        return _noise_ratio(sqnrs[node]) - _noise_ratio(operand_sqnr(node))

    node = max((node for node in sqnrs if node.op == "call_function"), key=added_noise, default=None)
    if node is None:
        return None, ""
    source = node.all_input_nodes[0] if is_quantize(node) else node
    scale = f", quantized with scale {node.args[1]:.3g}" if is_quantize(node) else ""
    before = operand_sqnr(node)
    operands = "exact" if before == math.inf else f"{before:.1f} dB"
    return node, f"{describe_node(source)}{scale} ({operands} before it, {sqnrs[node]:.1f} dB after it)"


def _noise_ratio(sqnr: float) -> float:
    """Noise-to-signal ratio; at most 1, because more noise than signal leaves nothing of the signal."""
    return float(min(10 ** (-sqnr / 10), 1.0))
