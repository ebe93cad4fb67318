"""Small TOSA 1.0 flatbuffers for the backend tests, written directly with TOSA's serializer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tosa_serializer as ts

_NUMPY = {
    ts.DType.INT8: np.int8,
    ts.DType.INT16: np.int16,
    ts.DType.INT32: np.int32,
    ts.DType.FP32: np.float32,
}


class Flatbuffer:
    """Builds a flatbuffer with one region and one block. Values are tensor names."""

    def __init__(self) -> None:
        self._serializer = ts.TosaSerializer("", targetMajor=1, targetMinor=0, targetPatch=0, targetDraft=False)
        self._tensors: dict[str, ts.TosaSerializerTensor] = {}

    def input(self, shape: Sequence[int], dtype: ts.DType) -> str:
        name = f"input_{len(self._tensors)}"
        self._tensors[name] = ts.TosaSerializerTensor(name, list(shape), dtype)
        self._serializer.addInputTensor(self._tensors[name])
        return name

    def const(self, shape: Sequence[int], dtype: ts.DType, value: int | np.ndarray) -> str:
        data = np.broadcast_to(np.asarray(value), tuple(shape))
        # numpy has no 48-bit type; the serializer accepts Python integers.
        typed = np.ascontiguousarray(data, _NUMPY[dtype]) if dtype in _NUMPY else [int(v) for v in data.flatten()]
        return str(self._serializer.addConst(list(shape), dtype, typed).name)

    def op(
        self,
        op: ts.Op,
        inputs: list[str],
        shape: Sequence[int],
        dtype: ts.DType,
        attribute: ts.TosaSerializerAttribute,
    ) -> str:
        tensor = self._serializer.addIntermediate(list(shape), dtype)
        self._tensors[tensor.name] = tensor
        self._serializer.addOperator(op, inputs, [tensor.name], attribute)
        return str(tensor.name)

    def finish(self, outputs: list[str]) -> bytes:
        for name in outputs:
            self._serializer.addOutputTensor(self._tensors[name])
        return bytes(self._serializer.serialize())


def conv2d(
    *,
    height: int = 8,
    width: int = 8,
    channels: int = 4,
    out_channels: int = 8,
    kernel: int = 3,
    stride: int = 1,
    dilation: int = 1,
    pad: int = 1,
    dtype: ts.DType = ts.DType.INT8,
) -> bytes:
    """Write a CONV2D of ``[1, height, width, channels]``, and a RESCALE to ``dtype`` (INT8 or INT16)."""
    graph = Flatbuffer()
    accumulator = ts.DType.INT32 if dtype == ts.DType.INT8 else ts.DType.INT48
    out_h = (height + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
    out_w = (width + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
    shape = [1, out_h, out_w, out_channels]
    weights = np.random.default_rng(0).integers(-100, 100, (out_channels, kernel, kernel, channels))
    x = graph.input([1, height, width, channels], dtype)
    operands = [
        x,
        graph.const(weights.shape, ts.DType.INT8, weights),
        graph.const([out_channels], accumulator, 7),
        graph.const([1], dtype, 0),
        graph.const([1], ts.DType.INT8, 0),
    ]
    attribute = ts.TosaSerializerAttribute()
    attribute.Conv2dAttribute([pad] * 4, [stride] * 2, [dilation] * 2, False, accumulator)
    acc = graph.op(ts.Op.CONV2D, operands, shape, accumulator, attribute)
    return graph.finish([rescale(graph, acc, shape, accumulator, dtype)])


def rescale(graph: Flatbuffer, value: str, shape: Sequence[int], source: ts.DType, to: ts.DType) -> str:
    """Append a RESCALE by 2**-9 to type ``to``."""
    scale32 = source != ts.DType.INT48  # RESCALE of INT48 takes 16-bit multipliers
    operands = [
        value,
        graph.const([1], ts.DType.INT32 if scale32 else ts.DType.INT16, 1 << 30 if scale32 else 1 << 14),
        graph.const([1], ts.DType.INT8, 39 if scale32 else 23),
        graph.const([1], source, 0),
        graph.const([1], to, 0),
    ]
    attribute = ts.TosaSerializerAttribute()
    attribute.RescaleAttribute(scale32, ts.RoundingMode.SINGLE_ROUND, False, False, False)
    return graph.op(ts.Op.RESCALE, operands, shape, to, attribute)


def add(shape: Sequence[int], dtype: ts.DType = ts.DType.INT32) -> bytes:
    """Write an ADD of two inputs of ``shape``."""
    graph = Flatbuffer()
    attribute = ts.TosaSerializerAttribute()
    attribute.AddAttribute()
    operands = [graph.input(shape, dtype), graph.input(shape, dtype)]
    return graph.finish([graph.op(ts.Op.ADD, operands, shape, dtype, attribute)])
