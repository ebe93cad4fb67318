"""PyTorch's own quantized graph, evaluated in float64.

The graph that ``convert_pt2e`` makes says which integers every tensor is rounded to, but PyTorch computes what lies
between a dequantize and a quantize in float32. Where the exact value is close to the middle between two integers, a
rounding error of float32 decides: about one value in 100,000 goes the other way. In a deep random network every such
step is amplified by the layers behind it, so that two correct evaluations can end many steps apart. In float64 the sum
of a convolution's products of integers is exact for all practical purposes, as it is in the target's accumulators, and
the question "does the target compute what the quantized graph says" has an answer again.

What is left are exact ties: TOSA rounds them up, quantize rounds them to even. That is one step, where it happens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Interpreter
from torch.fx.node import Target

from arm_backend_core.ops.registry import overload_of

_PER_TENSOR = "quantized_decomposed::{}_per_tensor"
_PER_CHANNEL = "quantized_decomposed::{}_per_channel"


class _Float64(Interpreter):
    """Runs a graph with every floating-point tensor in float64."""

    def placeholder(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _wide(super().placeholder(target, args, kwargs))

    def get_attr(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _wide(super().get_attr(target, args, kwargs))

    def call_function(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        overload = overload_of(target)
        name = overload.name().split(".")[0] if overload is not None else ""
        if name == _PER_TENSOR.format("quantize"):
            return _quantize(*args)
        if name == _PER_TENSOR.format("dequantize"):
            x, scale, zero_point = args[:3]
            return (x.double() - int(zero_point)) * float(scale)
        if name == _PER_CHANNEL.format("dequantize"):
            x, scales, _, axis = args[:4]
            return x.double() * scales.double().reshape([-1 if i == axis else 1 for i in range(x.dim())])
        args, kwargs = torch.fx.node.map_aggregate((args, kwargs), _wide_dtype)
        return _wide(super().call_function(target, args, kwargs))


def _quantize(
    x: Tensor, scale: float | Tensor, zero_point: int | Tensor, low: int, high: int, dtype: torch.dtype
) -> Tensor:
    """Nearest integers, ties to even."""
    return (torch.round(x / float(scale)) + int(zero_point)).clamp(low, high).to(dtype)


def _wide(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _wide_dtype(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x


def evaluate(program: ExportedProgram, *inputs: Tensor) -> Tensor:
    """The first output of a quantized ATen program (it is left as it is), float64.

    Args:
        program: from ``torch.export`` of what ``convert_pt2e`` returned.
        inputs: as the model takes them.
    """
    with torch.no_grad():
        output = _Float64(program.module(check_guards=False)).run(*inputs)
    first = output[0] if isinstance(output, (tuple, list)) else output
    assert isinstance(first, Tensor)
    return first


def output_step(program: ExportedProgram) -> float:
    """Scale of the first output.

    Raises:
        AssertionError: no dequantize node, nor data movement behind one, is at its end.
    """
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    node = output.args[0][0]
    while "dequantize_per_tensor" not in str(node.target):
        assert node.op == "call_function", f"{node} is not quantized"
        node = node.all_input_nodes[0]
    return float(node.args[1])
