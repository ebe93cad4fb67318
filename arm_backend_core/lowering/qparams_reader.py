"""Quantization parameters of a program, read from its quantize and dequantize operators."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from arm_backend_core.dtype import UINT8_OFFSET, DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.fusion.rules import find_fused_consumers, infer_operand_qparams
from arm_backend_core.nodes import overload_of
from arm_backend_core.ops.operands import to_tosa_dtype
from arm_backend_core.qparams import QParams


class QParamsReader:
    """Reads quantization parameters.

    Args:
        constants: {node: its value}. A scale or zero point of an operator may be such a node.
    """

    def __init__(self, constants: Mapping[Node, Any]) -> None:
        self._constants = constants

    def read(self, node: Node) -> QParams:
        """Quantization parameters of a quantize or dequantize node.

        Raises:
            Unsupported: per-channel parameters have a zero point other than 0, parameters are computed at run time, or
                TOSA lacks the quantized type (uint8).
        """
        if overload_of(node.target).name().split(".")[0].endswith("per_channel"):  # type: ignore[union-attr]
            _, scales, zero_points, axis, qmin, qmax, dtype = node.args[:7]
            scale = self._array(scales).astype(np.float64)
            if np.any(self._array(zero_points)):
                raise Unsupported("per-channel parameters with a zero point other than 0")
            return QParams(scale, 0, to_tosa_dtype(_dtype(dtype)), _int(qmin), _int(qmax), _int(axis))
        _, scale_arg, zero_point, qmin, qmax, dtype = node.args[:6]
        scale, zero = self._array(scale_arg), self._array(zero_point)
        return QParams(float(scale), int(zero), to_tosa_dtype(_dtype(dtype)), _int(qmin), _int(qmax))

    def read_uint8_as_int8(self, node: Node) -> QParams:
        """Quantization parameters of a dequantize node whose uint8 operand becomes int8 by subtraction of 128.

        Raises:
            Unsupported: the parameters are per channel or computed at run time.
        """
        if overload_of(node.target).name().split(".")[0].endswith("per_channel"):  # type: ignore[union-attr]
            return self.read(node)  # refuses uint8
        _, scale, zero_point, qmin, qmax = node.args[:5]
        low, high, zero = (int(self._array(x)) - UINT8_OFFSET for x in (qmin, qmax, zero_point))
        return QParams(float(self._array(scale)), zero, DType.INT8, low, high)

    def read_result(self, node: Node) -> QParams | None:
        """Quantization parameters of the result of ``node``: those with which all of its readers quantize it.

        If consumers are fused into ``node`` (``find_fused_consumers``), the readers quantize the result of the last
        consumer. Its parameters are converted to parameters for ``node``, for example divided by a constant factor.

        Returns:
            The parameters. None if there is no reader, a reader is not a quantize operator, or their parameters differ.
        """
        consumers = find_fused_consumers(node)
        if consumers is None:
            return None
        first, *others = map(self.read, (consumers or [node])[-1].users)
        if not all(first.is_equivalent(other) for other in others):
            return None
        return reduce(lambda q, consumer: infer_operand_qparams(consumer, q), reversed(consumers), first)

    def _array(self, x: Any) -> np.ndarray[Any, Any]:
        if isinstance(x, Node):
            if x not in self._constants:
                raise Unsupported("quantization parameters are computed while the program runs")
            return np.asarray(self._constants[x].detach().cpu().numpy())
        return np.asarray(x)


def _int(x: Any) -> int:
    assert isinstance(x, int), x
    return x


def _dtype(x: Any) -> torch.dtype:
    assert isinstance(x, torch.dtype), x
    return x
