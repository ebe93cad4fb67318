"""Known deviations of Vela or TFLM: operators whose NPU results differ from TFLM's, with the reason.

The emulator is correct for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from arm_backend_core.workers.vela import installed_release
from tests.tflite.network import Network, Operator

#: Effects: the result differs; Vela fails; the operator stays on the CPU; an operation may start too early.
DIFFERS, FAILS, ON_CPU, STARTS_EARLY = "differs", "fails", "on the CPU", "starts early"


@dataclass(frozen=True)
class Deviation:
    """A known deviation.

    Attributes:
        name: description of the affected operators.
        reason: the cause.
        effect: one of the effects. With ``DIFFERS`` and ``STARTS_EARLY``, some affected operators are still correct.
        cores: affected compiler cores of Vela.
        applies: whether an operator is affected.
        example: operator, type and number of a network that shows the deviation.
        max_difference: largest difference of a result in quantization steps; None if it depends on the network.
        fixed_in: first release of Vela without the deviation; None if no release fixes it.
    """

    name: str
    reason: str
    effect: str
    cores: tuple[str, ...]
    applies: Callable[[Network, Operator], bool]
    example: tuple[str, str, int]
    max_difference: int | None = None
    fixed_in: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{self.name}, {' and '.join(self.cores)}"

    def is_fixed(self) -> bool:
        """Whether the installed Vela has the fix."""
        return self.fixed_in is not None and installed_release() >= self.fixed_in


def list_deviations(net: Network, core: str) -> list[Deviation]:
    """List the deviations that affect a network."""
    return [
        deviation
        for deviation in DEVIATIONS
        if core in deviation.cores
        and not deviation.is_fixed()
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
    """Whether the operator is a dilated, strided convolution of a network input with few channels.

    The legacy core then folds the stride into the channels.
    """
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


def _has_state_of_one_element(net: Network, operator: Operator) -> bool:
    return _is_lstm(operator) and math.prod(net.tensors[operator.inputs[-5]].shape) == 1


def _has_cell_clip(net: Network, operator: Operator) -> bool:
    return _is_lstm(operator) and operator.attributes["CellClip"] > 0


def _clip_rounded_up(net: Network, operator: Operator) -> bool:
    if not _has_cell_clip(net, operator):
        return False
    return operator.attributes["CellClip"] / net.tensors[operator.inputs[-4]].quantization.scales[0] % 1 >= 0.5


def _float32_product(net: Network, operator: Operator) -> bool:
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
        "regor dereferences a null pointer",
        FAILS,
        ("regor",),
        _groups_without_bias,
        ("conv", "int8", 6),
        fixed_in=(5, 2),
    ),
    Deviation(
        "convolution in groups without bias",
        "the legacy core uses an operand that is None",
        FAILS,
        ("legacy",),
        _groups_without_bias,
        ("conv", "int8", 6),
    ),
    Deviation(
        "convolution in groups with an activation function",
        "the convolutions that replace it have no activation function",
        DIFFERS,
        ("legacy",),
        _groups_with_activation,
        ("conv", "int8", 0),
    ),
    Deviation(
        "dilated convolution with a stride",
        "the legacy core folds the stride into the channels as if the kernel were not dilated",
        DIFFERS,
        ("legacy",),
        _folded_stride,
        ("conv", "int8", 7),
    ),
    Deviation(
        "depthwise convolution with several channels and several results per channel",
        "a documented constraint",
        ON_CPU,
        ("legacy",),
        _multiplied_depth,
        ("depthwise", "int8", 5),
    ),
    Deviation(
        "LSTM of one unit and one batch",
        "regor reads a null pointer",
        FAILS,
        ("regor",),
        _has_state_of_one_element,
        ("lstm", "int8", 3),
    ),
    Deviation(
        "LSTM with a clipped cell state",
        "regor ignores the clip",
        DIFFERS,
        ("regor",),
        _has_cell_clip,
        ("lstm", "int8", 36),
    ),
    Deviation(
        "LSTM with a clip that the cell's scale cannot represent",
        "Vela rounds the clip to nearest, TFLM rounds down",
        DIFFERS,
        ("legacy",),
        _clip_rounded_up,
        ("lstm", "int8", 36),
    ),
    Deviation(
        "MUL and LEAKY_RELU",
        "Vela multiplies and divides the scales in float32, TFLM in float64",
        DIFFERS,
        ("regor", "legacy"),
        _float32_product,
        ("mul", "int16", 52),
        max_difference=1,
    ),
    # The legacy core uses the depth of the sum's result, 1, as the depth of a job; a job of the new core sums all
    # channels.
    Deviation(
        "SOFTMAX",
        "the legacy core counts one job for each channel of a sum",
        STARTS_EARLY,
        ("legacy",),
        _softmax,
        ("softmax", "int8", 7),
    ),
    # Entries 160 and 294 of 513 differ by -1 and +1 from TFLite's table, which is computed in float64 and used by Vela.
    Deviation(
        "SOFTMAX of int16",
        "TFLM computes its table of reciprocals in float32",
        DIFFERS,
        ("regor", "legacy"),
        _softmax_of_int16,
        ("softmax", "int16", 28),
        max_difference=1,
    ),
)
