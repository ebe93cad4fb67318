"""Random TFLite networks in int8 and int16: single operators, and a few small networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from tests.tflite.network import ABSENT, Array, Network, Quantization, enumerator

_Choice = TypeVar("_Choice")
#: Standard deviation of a uniform distribution, relative to its range.
_UNIFORM_DEVIATION = 0.289
_LEVELS = {"int8": 256, "int16": 65536}
#: Fixed quantization parameters of results, as the kernels require them.
_PROBABILITY = {"int8": Quantization(1 / 256, -128), "int16": Quantization(1 / 32768)}
_SYMMETRIC_UNIT = {"int8": Quantization(1 / 128), "int16": Quantization(1 / 32768)}


@dataclass(frozen=True)
class Draw:
    """Random sizes and parameters of a network whose activations are of ``dtype``."""

    generator: np.random.Generator
    dtype: str

    def size(self, low: int, high: int) -> int:
        """Draw an integer from ``low`` to ``high``, both included; small ones are more likely."""
        return int(low * ((high + 0.99) / low) ** self.generator.random())

    def choose(self, *choices: _Choice) -> _Choice:
        return choices[int(self.generator.integers(len(choices)))]

    def real(self, low: float, high: float) -> float:
        """Draw a log-uniform number, rounded to float32 as in the flatbuffer."""
        return float(np.float32(low * (high / low) ** self.generator.random()))

    def image(self, depth: int | None = None) -> tuple[int, int, int, int]:
        return 1, self.size(1, 14), self.size(1, 14), depth or self.size(1, 40)

    def shape(self) -> tuple[int, ...]:
        """Draw a shape of two to four dimensions."""
        image = self.image()
        return image[-self.choose(2, 3, 4, 4) :]

    def activations(self, low: float = 1e-3, high: float = 1.0, short_scale: bool = False) -> Quantization:
        """Draw quantization parameters of activations; int16 is symmetric.

        Args:
            low, high: bounds of the scale for int8; int16 scales are smaller by a factor of 256.
            short_scale: round the scale to eleven bits.
        """
        scale = float(np.float16(self.real(low, high))) if short_scale else self.real(low, high)
        if self.dtype == "int16":
            return Quantization(scale / 256)
        return Quantization(scale, int(self.generator.integers(-128, 128)))

    def rescaled(self, scale: float) -> Quantization:
        """Draw quantization parameters of a result.

        The scale is 0.4 to 2 times ``scale``, which would use the whole range. Smaller scales saturate.
        """
        chosen = self.real(0.4, 2.0) * scale
        return Quantization(chosen, 0 if self.dtype == "int16" else int(self.generator.integers(-40, 40)))

    def integers(self, shape: Sequence[int], dtype: str) -> Array:
        info = np.iinfo(dtype)
        return self.generator.integers(info.min, info.max + 1, tuple(shape)).astype(dtype)

    def activation(self) -> int:
        """Draw a fused activation function."""
        return enumerator("ActivationFunctionType", self.choose("NONE", "NONE", "RELU", "RELU6", "RELU_N1_TO_1"))


def softmax(draw: Draw) -> Network:
    net = Network()
    x = net.input(draw.shape(), draw.dtype, draw.activations(3e-3, 0.3))
    y = net.tensor(net.tensors[x].shape, draw.dtype, _PROBABILITY[draw.dtype])
    return _with_outputs(
        net, net.operator("SOFTMAX", [x], y, "SoftmaxOptions", {"Beta": draw.choose(1.0, 1.0, draw.real(0.5, 2))})
    )


def leaky_relu(draw: Draw) -> Network:
    net = Network()
    source_quantization = draw.activations()
    x = net.input(draw.shape(), draw.dtype, source_quantization)
    y = net.tensor(
        net.tensors[x].shape, draw.dtype, draw.choose(source_quantization, draw.rescaled(source_quantization.scales[0]))
    )
    alpha = draw.choose(0.01, 0.25, draw.real(0.005, 0.9), draw.real(1.1, 2.0), -draw.real(0.1, 0.9))
    return _with_outputs(net, net.operator("LEAKY_RELU", [x], y, "LeakyReluOptions", {"Alpha": alpha}))


def logistic(draw: Draw) -> Network:
    return _draw_unary(draw, "LOGISTIC", _PROBABILITY[draw.dtype])


def tanh(draw: Draw) -> Network:
    return _draw_unary(draw, "TANH", _SYMMETRIC_UNIT[draw.dtype])


def _draw_unary(draw: Draw, name: str, result: Quantization) -> Network:
    net = Network()
    source_quantization = draw.activations(3e-3, 0.3)
    if draw.dtype == "int16" and draw.choose(False, True):  # a power of two, as converters emit
        source_quantization = Quantization(2.0 ** draw.choose(-15, -13, -12, -11))
    x = net.input(draw.shape(), draw.dtype, source_quantization)
    return _with_outputs(net, net.operator(name, [x], net.tensor(net.tensors[x].shape, draw.dtype, result)))


def max_pool(draw: Draw) -> Network:
    return _pool(draw, "MAX_POOL_2D")


def average_pool(draw: Draw) -> Network:
    return _pool(draw, "AVERAGE_POOL_2D")


def _pool(draw: Draw, name: str) -> Network:
    net = Network()
    x = net.input(draw.image(), draw.dtype, draw.activations())
    return _with_outputs(net, _append_pool(net, draw, name, x))


def _append_pool(net: Network, draw: Draw, name: str, x: int) -> int:
    batch, height, width, depth = net.tensors[x].shape
    kernel = draw.size(1, min(height, 8)), draw.size(1, min(width, 8))
    window = _Window(draw, (height, width), kernel, dilation=(1, 1))
    y = net.tensor((batch, *window.result, depth), draw.dtype, net.tensors[x].quantization)
    options = window.options | {"FilterHeight": kernel[0], "FilterWidth": kernel[1]}
    options["FusedActivationFunction"] = draw.activation()
    return net.operator(name, [x], y, "Pool2DOptions", options)


class _Window:
    """Strides and padding of a kernel that moves over an image, and the size of its result."""

    def __init__(self, draw: Draw, image: tuple[int, int], kernel: tuple[int, int], dilation: tuple[int, int]) -> None:
        reach = [rate * (size - 1) + 1 for rate, size in zip(dilation, kernel, strict=True)]
        fits = all(size <= extent for size, extent in zip(reach, image, strict=True))
        padding = draw.choose("SAME", "VALID") if fits else "SAME"
        stride = draw.choose((1, 1), (2, 2), (draw.size(1, 3), draw.size(1, 3)))
        covered = image if padding == "SAME" else [have - size + 1 for have, size in zip(image, reach, strict=True)]
        #: Height and width.
        self.result = tuple(-(-extent // step) for extent, step in zip(covered, stride, strict=True))
        self.options = {"Padding": enumerator("Padding", padding), "StrideH": stride[0], "StrideW": stride[1]}


def fully_connected(draw: Draw) -> Network:
    net = Network()
    rows = draw.choose((1,), (draw.size(1, 9),), (1, draw.size(1, 9)))
    x = net.input((*rows, draw.size(1, 130)), draw.dtype, draw.activations())
    return _with_outputs(net, _append_fully_connected(net, draw, x, draw.size(1, 70)))


def _append_fully_connected(net: Network, draw: Draw, x: int, outputs: int) -> int:
    *rows, count = net.tensors[x].shape
    if len(rows) == 3:  # an image is one row
        rows, count = [1], int(np.prod(net.tensors[x].shape))
    weight = draw.integers((outputs, count), "int8")
    operands, result = _make_weighted_operands(net, draw, x, weight, channels=1, terms=count)
    y = net.tensor((*rows, outputs), draw.dtype, result)
    options = {"FusedActivationFunction": draw.activation(), "KeepNumDims": len(rows) > 1}
    return net.operator("FULLY_CONNECTED", operands, y, "FullyConnectedOptions", options)


def conv(draw: Draw) -> Network:
    net = Network()
    groups = draw.choose(1, 1, 1, 2)
    x = net.input(draw.image(groups * draw.size(1, 40 // groups)), draw.dtype, draw.activations())
    return _with_outputs(net, _append_conv(net, draw, x, groups * draw.size(1, 40 // groups), groups))


def _append_conv(net: Network, draw: Draw, x: int, outputs: int, groups: int = 1) -> int:
    batch, height, width, depth = net.tensors[x].shape
    kernel, dilation = draw.choose((1, 1), (3, 3), (draw.size(1, 5), draw.size(1, 5))), _dilation(draw)
    window = _Window(draw, (height, width), kernel, dilation)
    weight = draw.integers((outputs, *kernel, depth // groups), "int8")
    operands, result = _make_weighted_operands(net, draw, x, weight, channels=outputs, terms=weight[0].size)
    y = net.tensor((batch, *window.result, outputs), draw.dtype, result)
    options = window.options | {"DilationHFactor": dilation[0], "DilationWFactor": dilation[1]}
    options["FusedActivationFunction"] = draw.activation()
    return net.operator("CONV_2D", operands, y, "Conv2DOptions", options)


def depthwise(draw: Draw) -> Network:
    net = Network()
    x = net.input(draw.image(draw.choose(1, None, None)), draw.dtype, draw.activations())
    return _with_outputs(net, _append_depthwise(net, draw, x))


def _append_depthwise(net: Network, draw: Draw, x: int) -> int:
    batch, height, width, depth = net.tensors[x].shape
    multiplier = draw.size(1, 8) if depth == 1 else draw.choose(1, 1, 1, 2)
    kernel, dilation = draw.choose((3, 3), (draw.size(1, 5), draw.size(1, 5))), _dilation(draw)
    window = _Window(draw, (height, width), kernel, dilation)
    weight = draw.integers((1, *kernel, depth * multiplier), "int8")
    operands, result = _make_weighted_operands(
        net, draw, x, weight, channels=depth * multiplier, terms=weight[..., 0].size, axis=3
    )
    y = net.tensor((batch, *window.result, depth * multiplier), draw.dtype, result)
    options = window.options | {"DilationHFactor": dilation[0], "DilationWFactor": dilation[1]}
    options |= {"DepthMultiplier": multiplier, "FusedActivationFunction": draw.activation()}
    return net.operator("DEPTHWISE_CONV_2D", operands, y, "DepthwiseConv2DOptions", options)


def _dilation(draw: Draw) -> tuple[int, int]:
    return draw.choose((1, 1), (1, 1), (2, 2), (draw.size(1, 3), draw.size(1, 3)))


def _make_weighted_operands(
    net: Network, draw: Draw, x: int, weight: Array, channels: int, terms: int, axis: int = 0
) -> tuple[list[int], Quantization]:
    """Make the operands of a product with ``weight``, and the quantization parameters of its result.

    Args:
        net: the network.
        draw: draws the parameters.
        x: index of the activation tensor.
        weight: the weights.
        channels: number of weight scales; 1 for per-tensor quantization.
        terms: number of products that are summed for one element of the result.
        axis: axis of the weights that the scales belong to.
    """
    input_scale = net.tensors[x].quantization.scales[0]
    scales = tuple(draw.real(2e-3, 8e-3) for _ in range(channels))
    w = net.constant(np.maximum(weight, -127), Quantization(scales, axis=axis))
    operands = [x, w]
    spread = _UNIFORM_DEVIATION**2 * _LEVELS[draw.dtype] * 256 * terms**0.5
    if draw.choose(True, True, False):
        outputs = weight.shape[axis]
        bias = (draw.generator.normal(0, spread, outputs)).astype("int32" if draw.dtype == "int8" else "int64")
        operands.append(net.constant(bias, Quantization(tuple(input_scale * scale for scale in scales))))
    return operands, draw.rescaled(6 * spread * input_scale * max(scales) / _LEVELS[draw.dtype])


def add(draw: Draw) -> Network:
    net = Network()
    x, y = _two_operands(net, draw)
    scale = max(net.tensors[each].quantization.scales[0] for each in (x, y))
    return _with_outputs(net, _append_binary(net, draw, "ADD", x, y, draw.rescaled(1.5 * scale)))


def mul(draw: Draw) -> Network:
    net = Network()
    short_scale = draw.choose(True, False)
    x, y = _two_operands(net, draw, short_scale)
    return _with_outputs(net, _append_mul(net, draw, x, y, short_scale))


def _append_mul(net: Network, draw: Draw, x: int, y: int, short_scale: bool = False) -> int:
    scales = [net.tensors[each].quantization.scales[0] for each in (x, y)]
    result = draw.rescaled(scales[0] * scales[1] * _LEVELS[draw.dtype] / 3)
    if short_scale:  # the quotient of the scales is exact in float32
        result = replace(result, scale=2.0 ** round(math.log2(result.scales[0])))
    return _append_binary(net, draw, "MUL", x, y, result)


def _append_binary(net: Network, draw: Draw, name: str, x: int, y: int, result: Quantization) -> int:
    shape = np.broadcast_shapes(net.tensors[x].shape, net.tensors[y].shape)
    z = net.tensor(shape, draw.dtype, result)
    return net.operator(name, [x, y], z, f"{name.capitalize()}Options", {"FusedActivationFunction": draw.activation()})


def _two_operands(net: Network, draw: Draw, short_scale: bool = False) -> tuple[int, int]:
    """Make two inputs, or an input and a constant, in random order; one may be broadcast."""
    shape = draw.image()
    other = draw.choose(shape, shape, (1, 1, 1, shape[-1]), (1, 1, 1, 1), (1, *shape[1:3], 1))
    second = draw.activations(short_scale=short_scale)
    x = net.input(shape, draw.dtype, draw.activations(short_scale=short_scale))
    if draw.choose(True, True, False):
        y = net.input(other, draw.dtype, second)
    else:
        y = net.constant(draw.integers(other, draw.dtype), second)
    return (x, y) if draw.choose(True, True, False) else (y, x)


def lstm(draw: Draw) -> Network:
    net = Network()
    time_major = draw.choose(False, True)
    batch, steps, features, units = draw.size(1, 3), draw.size(1, 5), draw.size(1, 24), draw.size(1, 24)
    lead = (steps, batch) if time_major else (batch, steps)
    source_quantization = draw.activations(2e-3, 2e-2)
    hidden = Quantization(1 / 32768) if draw.dtype == "int16" else Quantization(1 / 128, draw.choose(0, 0, 3))
    x = net.input((*lead, features), draw.dtype, source_quantization)
    weights: list[int] = []
    biases: list[int] = []
    for scale, count in ((source_quantization.scales[0], features), (hidden.scales[0], units)):
        for _ in range(4):  # input, forget, cell and output gate
            # The sums of products reach about +-4, where the functions of the gates are not saturated yet.
            quantization = Quantization(draw.real(0.3, 2.0) / (scale * _LEVELS[draw.dtype] * 75 * count**0.5))
            weights.append(net.constant(np.maximum(draw.integers((units, count), "int8"), -127), quantization))
            if len(biases) < 4:
                unit = scale * quantization.scales[0]
                bias = draw.generator.normal(0, 0.3 / unit, units).astype("int32" if draw.dtype == "int8" else "int64")
                biases.append(net.constant(bias, Quantization(unit)))
    output_state = net.tensor((batch, units), draw.dtype, hidden, is_variable=True)
    cell_state = net.tensor((batch, units), "int16", Quantization(2.0 ** draw.choose(-12, -11)), is_variable=True)
    none = [ABSENT] * 3
    operands = [x, *weights, *none, *biases, ABSENT, ABSENT, output_state, cell_state, *none, ABSENT]
    intermediates = [net.tensor((0,), "int16", Quantization(1.0)) for _ in range(4)]
    intermediates.append(net.tensor((0,), draw.dtype, hidden))
    y = net.tensor((*lead, units), draw.dtype, hidden)
    tanh_function = enumerator("ActivationFunctionType", "TANH")
    options: dict[str, Any] = {"FusedActivationFunction": tanh_function, "TimeMajor": time_major}
    options["CellClip"] = draw.choose(0.0, 0.0, draw.real(0.2, 8.0))
    name = "UNIDIRECTIONAL_SEQUENCE_LSTM"
    return _with_outputs(
        net, net.operator(name, operands, y, "UnidirectionalSequenceLSTMOptions", options, intermediates)
    )


def classifier(draw: Draw) -> Network:
    """Draw a small convolutional network."""
    net = Network()
    x = net.input((1, 12, 10, 3), draw.dtype, draw.activations())
    x = _append_conv(net, draw, x, draw.size(4, 16))
    x = _append_depthwise(net, draw, x)
    x = _append_pool(net, draw, draw.choose("MAX_POOL_2D", "AVERAGE_POOL_2D"), x)
    x = _append_fully_connected(net, draw, x, 10)
    y = net.tensor(net.tensors[x].shape, draw.dtype, _PROBABILITY[draw.dtype])
    return _with_outputs(net, net.operator("SOFTMAX", [x], y, "SoftmaxOptions", {"Beta": 1.0}))


def gated(draw: Draw) -> Network:
    """Draw the product of a convolution and its sigmoid."""
    net = Network()
    x = net.input(draw.image(), draw.dtype, draw.activations())
    x = _append_conv(net, draw, x, draw.size(1, 24))
    gate = net.tensor(net.tensors[x].shape, draw.dtype, _PROBABILITY[draw.dtype])
    net.operator("LOGISTIC", [x], gate)
    return _with_outputs(net, _append_mul(net, draw, x, gate))


def _with_outputs(net: Network, *outputs: int) -> Network:
    net.outputs.extend(outputs)
    return net


#: Functions that draw a network, by name.
OPERATORS: dict[str, Callable[[Draw], Network]] = {
    function.__name__: function
    for function in (
        softmax,
        leaky_relu,
        logistic,
        tanh,
        max_pool,
        average_pool,
        fully_connected,
        conv,
        depthwise,
        add,
        mul,
        lstm,
    )
}
NETWORKS: dict[str, Callable[[Draw], Network]] = {function.__name__: function for function in (classifier, gated)}
DTYPES = ("int8", "int16")


def draw_network(name: str, dtype: str, number: int) -> Network:
    """Draw network ``number`` of an operator or of ``NETWORKS``; the arguments determine it."""
    kinds = {**OPERATORS, **NETWORKS}
    seed = [number, list(kinds).index(name), DTYPES.index(dtype)]
    return kinds[name](Draw(np.random.default_rng(seed), dtype))


def draw_inputs(net: Network, seed: int) -> list[Array]:
    """Draw inputs from the whole range of the element types, often at its ends."""
    generator = np.random.default_rng(seed)
    draw = Draw(generator, "")
    arrays = []
    for index in net.inputs:
        tensor = net.tensors[index]
        array = draw.integers(tensor.shape, tensor.dtype)
        info = np.iinfo(tensor.dtype)
        ends = generator.random(tensor.shape)
        array[ends < 0.02] = info.min
        array[ends > 0.98] = info.max
        arrays.append(array)
    return arrays
