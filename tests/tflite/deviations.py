"""Kinds of operators of which the NPU computes something else than TFLM, and why. The emulator is right about them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from arm_backend_core.workers.vela import installed_release
from tests.tflite.network import Network, Operator

#: A result is another; Vela ends with an error; the operator is left to the CPU; an operation may begin too early.
DIFFERS, FAILS, LEFT, EARLY = "differs", "fails", "left to the CPU", "begins early"


@dataclass(frozen=True)
class Deviation:
    """A kind of operators.

    Attributes:
        reason: who does what.
        effect: what happens. Some operators of a kind that ``DIFFERS`` or is ``EARLY`` are right.
        cores: of Vela.
        applies: whether an operator is of the kind.
        example: operator, type and number of a network that shows it.
        within: by how much a result differs at most; None if that depends on the network.
        mended: the release of Vela that first does it right.
    """

    name: str
    reason: str
    effect: str
    cores: tuple[str, ...]
    applies: Callable[[Network, Operator], bool]
    example: tuple[str, str, int]
    within: int | None = None
    mended: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{self.name}, {' and '.join(self.cores)}"

    def is_mended(self) -> bool:
        """Whether the installed Vela does it right."""
        return self.mended is not None and installed_release() >= self.mended


def deviations(net: Network, core: str) -> list[Deviation]:
    """Those that are to be expected of a network."""
    return [
        deviation
        for deviation in DEVIATIONS
        if core in deviation.cores
        and not deviation.is_mended()
        and any(deviation.applies(net, operator) for operator in net.operators)
    ]


def _groups(net: Network, operator: Operator) -> int:
    if operator.name != "CONV_2D":
        return 1
    x, weight = (net.tensors[index].shape for index in operator.inputs[:2])
    return x[-1] // weight[-1]


def _groups_without_bias(net: Network, operator: Operator) -> bool:
    return _groups(net, operator) > 1 and len(operator.inputs) == 2


def _groups_with_activation(net: Network, operator: Operator) -> bool:
    return _groups(net, operator) > 1 and operator.attributes["FusedActivationFunction"] != 0


def _folded_stride(net: Network, operator: Operator) -> bool:
    """Of a shallow image that is the network's input, a depthwise one of one channel included."""
    if operator.name not in ("CONV_2D", "DEPTHWISE_CONV_2D") or operator.inputs[0] not in net.inputs:
        return False
    options, (width, depth) = operator.attributes, net.tensors[operator.inputs[0]].shape[2:]
    if options["DilationWFactor"] == 1 or (operator.name == "DEPTHWISE_CONV_2D" and depth > 1):
        return False
    return any(options["StrideW"] % by == 0 and width % by == 0 and depth * by <= 8 for by in (2, 3))


def _multiplied_depth(net: Network, operator: Operator) -> bool:
    if operator.name != "DEPTHWISE_CONV_2D":
        return False
    return operator.attributes["DepthMultiplier"] > 1 and net.tensors[operator.inputs[0]].shape[-1] > 1


def _is_lstm(operator: Operator) -> bool:
    return operator.name == "UNIDIRECTIONAL_SEQUENCE_LSTM"


def _state_of_one_number(net: Network, operator: Operator) -> bool:
    return _is_lstm(operator) and math.prod(net.tensors[operator.inputs[-5]].shape) == 1


def _clipped_cell(net: Network, operator: Operator) -> bool:
    return _is_lstm(operator) and operator.attributes["CellClip"] > 0


def _clip_rounded_up(net: Network, operator: Operator) -> bool:
    if not _clipped_cell(net, operator):
        return False
    return operator.attributes["CellClip"] / net.tensors[operator.inputs[-4]].quantization.scales[0] % 1 >= 0.5


def _narrow_product(net: Network, operator: Operator) -> bool:
    """Whether the quotient of the scales, rounded to float32, has another fixed-point multiplier."""
    if operator.name not in ("MUL", "LEAKY_RELU"):
        return False
    *scales, result = (
        np.float32(net.tensors[index].quantization.scales[0]) for index in (*operator.inputs, *operator.outputs)
    )
    if operator.name == "MUL":
        factors = [(scales[0], scales[1])]
    else:
        factors = [(scales[0], np.float32(1)), (scales[0], np.float32(operator.attributes["Alpha"]))]
    return any(
        _multiplier(float(a * b / result)) != _multiplier(float(a) * float(b) / float(result)) for a, b in factors
    )


def _multiplier(scale: float) -> int:
    return round(math.frexp(scale)[0] * 2**31)


def _softmax(net: Network, operator: Operator) -> bool:
    return operator.name == "SOFTMAX"


def _softmax_of_int16(net: Network, operator: Operator) -> bool:
    return _softmax(net, operator) and net.tensors[operator.inputs[0]].dtype == "int16"


DEVIATIONS = (
    Deviation(
        "convolution in groups without bias",
        "regor reads a null pointer",
        FAILS,
        ("regor",),
        _groups_without_bias,
        ("conv", "int8", 6),
        mended=(5, 2),
    ),
    Deviation(
        "convolution in groups without bias",
        "the legacy core takes an operand that is None",
        FAILS,
        ("legacy",),
        _groups_without_bias,
        ("conv", "int8", 6),
    ),
    Deviation(
        "convolution in groups with an activation function",
        "the parts that replace it have none",
        DIFFERS,
        ("legacy",),
        _groups_with_activation,
        ("conv", "int8", 0),
    ),
    Deviation(
        "dilated convolution with a stride",
        "a stride that is folded into the channels takes the kernel for a dense one",
        DIFFERS,
        ("legacy",),
        _folded_stride,
        ("conv", "int8", 7),
    ),
    Deviation(
        "depthwise convolution with several results of each of several channels",
        "a documented constraint",
        LEFT,
        ("legacy",),
        _multiplied_depth,
        ("depthwise", "int8", 5),
    ),
    Deviation(
        "LSTM of one unit and one batch",
        "regor reads a null pointer",
        FAILS,
        ("regor",),
        _state_of_one_number,
        ("lstm", "int8", 3),
    ),
    Deviation(
        "LSTM with a clip of its cell",
        "regor forgets it",
        DIFFERS,
        ("regor",),
        _clipped_cell,
        ("lstm", "int8", 36),
    ),
    Deviation(
        "LSTM with a clip that is no number of the cell",
        "Vela rounds it to the nearest, TFLM down",
        DIFFERS,
        ("legacy",),
        _clip_rounded_up,
        ("lstm", "int8", 36),
    ),
    Deviation(
        "MUL and LEAKY_RELU",
        "Vela multiplies and divides their scales in float32, TFLM in float64",
        DIFFERS,
        ("regor", "legacy"),
        _narrow_product,
        ("mul", "int16", 52),
        within=1,
    ),
    # It takes the depth of the sum's result, 1, for that of a job; the new core has a job sum all channels.
    Deviation(
        "SOFTMAX",
        "the legacy core counts a job for each channel of a sum",
        EARLY,
        ("legacy",),
        _softmax,
        ("softmax", "int8", 7),
    ),
    # Entries 160 and 294 of 513 are -1 and +1 from TFLite's, which are those of float64 and which Vela has too.
    Deviation(
        "SOFTMAX of int16",
        "TFLM computes its table of reciprocals in float32",
        DIFFERS,
        ("regor", "legacy"),
        _softmax_of_int16,
        ("softmax", "int16", 28),
        within=1,
    ),
)
