"""Hardware capabilities by family: what it lacks of its TOSA profile, what it is fast at, and Vela's bugs.

Ethos-U: what Vela 5.1 documents (``vela --supported-ops-report``) and what it was observed to refuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from arm_backend_core.dtype import DType
from arm_backend_core.targets.transpose_swaps import MAX_EXTENT, plan_swaps
from arm_backend_core.workers.vela import Release

if TYPE_CHECKING:
    import numpy as np


class Tensor(Protocol):
    """An operand of a TOSA operator; ``data`` is set if it is constant."""

    shape: tuple[int, ...]
    dtype: DType
    data: np.ndarray[Any, Any] | None


class Operation(Protocol):
    """A TOSA operator with its TOSA attributes."""

    kind: str
    attrs: dict[str, Any]

    @property
    def inputs(self) -> Sequence[Tensor]:
        """The operands."""

    @property
    def output(self) -> Tensor:
        """The result."""


#: Returns the property of an operator that the hardware does not support, or None.
Limit = Callable[[Operation], "str | None"]
#: Returns axes of an operator's operands, counted from the last.
Axes = Callable[[Operation], Sequence[int]]


@dataclass(frozen=True)
class Hardware:
    """Limits and costs beyond the TOSA profile.

    Attributes:
        unsupported: operators that it supports for no element type.
        types: element types of an operator's first operand, where they are fewer than the profile's.
        limits: returns what it does not support of an operator, by kind.
        booleans: whether it has boolean tensors.
        bool_as_int8: boolean operators that it lacks and that ``tosa/passes/booleans.py`` lowers to int8 arithmetic.
        npu: an Ethos-U: convolutions and data movement are emitted in the form that Vela estimates to be fastest.
        max_kernel: largest extent of a window along one side.
        max_stride: Vela splits larger strides into one operation per window element.
        start_cycles: cycles until an operation's first result, from Vela's estimates of small operations.
        macs_per_result: multiplications that the hardware could execute while it writes one result.
        averages_by_convolution: the mean of a whole image takes fewer cycles as convolutions than as AVG_POOL2D
            (24x5x64 on U55-128: 2,693 against 5,208).
        transposes_by_convolution: [A, N] to [N, A] takes fewer cycles as a convolution than as TRANSPOSE.
        max_depthwise_size: limit of columns times channels for a DEPTHWISE_CONV2D with several results per channel, 0:
            none. Vela moves them by a TRANSPOSE of at most 64 KiB per row.
        slow_weights_max_macs: with at most this many MACs per cycle, weights are decoded at 12 per cycle, so that a
            convolution of one row takes fewer cycles as a MATMUL (472x118 on U85-256: 3,181 against 4,992).
        chains: elementwise operations are chained, so that one that only scales costs less there.
        fuses_shared_rescale: a RESCALE is fused into its producer, even if the producer has other readers.
        ignores_unit_axes: a RESHAPE that only adds or removes axes of size 1 separates no fused operations.
        scales_maxima: MAXIMUM and MINIMUM may rescale their operands.
        sums_rescale_operands: ADD and SUB rescale both operands and their result in one operation.
        computes_pixel_pairs: a 1x1 convolution of few channels takes fewer cycles on pairs of pixels.
        estimates_missing_activation: Vela estimates the cycles of a table for an operation that has no activation.
        copies_constants_from: release of Vela -> number of rows from which its estimate is lower if a constant that all
            rows read is copied to SRAM; 64 for others.
        splits_matmuls: a MATMUL of several heads takes fewer cycles as one MATMUL per head; on other NPUs with
            transposed operands.
        packs_weights_by_rows: the order of encoded weights depends on the number of rows, so that two methods share
            weights only if they have as many.
        pads_weight_blocks: weights are encoded in blocks, so that channels that fill a block cost nothing.
        transposes_any_rank: Vela transposes more than four dimensions by methods of its own.
        slow_int16_macs: with at most this many MACs per cycle, an int16 row takes fewer cycles as two int8 rows.
        vela_bugs: names of Vela's bugs (``docs/contributors/vela.md``) that ``tosa/vela_workarounds`` avoids, in that
            page's order.
        axes_lost_on_split: the axes along which Vela splits an operator and then loses the offset of the part to read.
    """

    unsupported: frozenset[str] = frozenset()
    types: Mapping[str, tuple[DType, ...]] = field(default_factory=dict)
    limits: Mapping[str, Limit] = field(default_factory=dict)
    booleans: bool = True
    bool_as_int8: frozenset[str] = frozenset()
    npu: bool = False
    max_kernel: int = 64
    max_stride: int = 3
    start_cycles: int = 500
    macs_per_result: int = 128
    averages_by_convolution: bool = False
    transposes_by_convolution: bool = False
    slow_weights_max_macs: int = 0
    max_depthwise_size: int = 0
    chains: bool = False
    fuses_shared_rescale: bool = False
    ignores_unit_axes: bool = False
    scales_maxima: bool = False
    sums_rescale_operands: bool = False
    computes_pixel_pairs: bool = False
    estimates_missing_activation: bool = False
    copies_constants_from: Mapping[Release | None, int] = field(default_factory=dict)
    splits_matmuls: bool = False
    packs_weights_by_rows: bool = False
    pads_weight_blocks: bool = False
    transposes_any_rank: bool = False
    slow_int16_macs: int = 0
    vela_bugs: tuple[str, ...] = ()
    axes_lost_on_split: Axes = lambda op: ()

    def refusal(self, kind: str, inputs: Sequence[DType], output: DType, op: Operation | None = None) -> str | None:
        """What it lacks, as the end of "<target> has no ..."; without ``op`` by the element types alone."""
        if kind in self.unsupported:
            return f"{kind} in hardware"
        if not self.booleans and DType.BOOL in (*inputs, output):
            return "boolean tensors in hardware"
        if inputs[0] not in self.types.get(kind, inputs):
            return f"{kind} ({', '.join(t.value for t in inputs)} -> {output.value}) in hardware"
        offence = self.limits[kind](op) if op is not None and kind in self.limits else None
        return f"{kind} with {offence}" if offence else None


_BITWISE = ("BITWISE_AND", "BITWISE_OR", "BITWISE_XOR", "BITWISE_NOT", "LOGICAL_RIGHT_SHIFT")
_LOGICAL = ("LOGICAL_AND", "LOGICAL_OR", "LOGICAL_XOR", "LOGICAL_NOT", "REDUCE_ALL", "REDUCE_ANY")
_COMPARISON_SELECT = ("EQUAL", "GREATER", "GREATER_EQUAL", "SELECT")
_U55_TYPES = {
    **dict.fromkeys(("ARITHMETIC_RIGHT_SHIFT", "LOGICAL_LEFT_SHIFT"), (DType.INT32,)),
    **dict.fromkeys(("ARGMAX", "MATMUL", "CONV3D", "TRANSPOSE_CONV2D"), (DType.INT8,)),
    **dict.fromkeys(("REDUCE_MAX", "REDUCE_MIN", "REVERSE"), (DType.INT8, DType.INT16)),
}


def _window(op: Operation, kernel: Sequence[int]) -> tuple[bool, int]:
    """Whether the window reads padding, and its largest stride along an axis on which it moves."""
    pad, stride = op.attrs["pad"], op.attrs["stride"]
    dilation = op.attrs.get("dilation", (1,) * len(kernel))
    moves = [
        size + pad[2 * i] + pad[2 * i + 1] > dilation[i] * (kernel[i] - 1) + 1
        for i, size in enumerate(op.inputs[0].shape[1:-1])
    ]
    return any(pad), max((step for step, moved in zip(stride, moves, strict=True) if moved), default=1)


def _constant_weights(op: Operation) -> str | None:
    return "weights and bias that are not constant" if any(value.data is None for value in op.inputs[1:]) else None


def _narrow_bias(op: Operation) -> str | None:
    """Ethos-U55 and U65 hold 40 bits of a bias; Vela 5.1 truncates the others without a message."""
    bias = op.inputs[2].data
    is_large = bias is not None and bias.size and max(-int(bias.min()), int(bias.max()) + 1) > 1 << 39
    return "a bias of more than 40 bits" if is_large else _constant_weights(op)


def _conv2d(op: Operation) -> str | None:
    kernel = op.inputs[1].shape[1:3]
    padded, stride = _window(op, kernel)
    if stride > 3 and padded and max(kernel) > 1:
        return f"stride {stride} (3 at most) together with padding"
    return _batched_stride(op) or _narrow_bias(op)


def _depthwise(op: Operation) -> str | None:
    _, stride = _window(op, op.inputs[1].shape[:2])
    return f"stride {stride} (3 at most)" if stride > 3 else _narrow_bias(op)


def _conv3d(op: Operation) -> str | None:
    depth, pad = op.inputs[1].shape[1], op.attrs["pad"][:2]  # Vela does not compute results that read only padding
    other = f"padding {pad} in depth (none)" if any(pad) else _narrow_bias(op)
    return f"a kernel {depth} deep (1 at most)" if depth > 1 else other


def _transpose_conv2d(op: Operation) -> str | None:
    stride = tuple(op.attrs["stride"])
    is_flat = [op.inputs[0].shape[i] == op.inputs[1].shape[i] == 1 for i in (1, 2)]
    if (
        stride not in ((1, 1), (2, 2))
        and not (stride == (1, 2) and is_flat[0])
        and not (stride == (2, 1) and is_flat[1])
    ):
        return f"stride {stride} (1x1 and 2x2; 1x2 and 2x1 for one-dimensional input)"
    return _result_below_stride(op) or _narrow_bias(op)


def _transpose_conv2d_u85(op: Operation) -> str | None:
    return _result_below_stride(op) or _constant_weights(op)


def _result_below_stride(op: Operation) -> str | None:
    # Vela finds no block configuration for most of these.
    output, stride = op.output.shape[1:3], op.attrs["stride"]
    reason = f"stride {tuple(stride)} for a result of {output[0]} x {output[1]} (not larger than the result)"
    return reason if any(size < step for size, step in zip(output, stride, strict=True)) else None


def _max_pool(op: Operation) -> str | None:
    padded, stride = _window(op, op.attrs["kernel"])
    return f"stride {stride} (3 at most) together with padding" if stride > 3 and padded else None


def _avg_pool(op: Operation) -> str | None:
    if any(op.attrs["pad"]) and max(op.attrs["kernel"]) > 8:
        return f"kernel {tuple(op.attrs['kernel'])} (8x8 at most) together with padding"
    return _max_pool(op)


def _batched_stride(op: Operation) -> str | None:
    """Strides over 3 of several images: Vela splits padded pools and 1x1 convolutions, and confuses images and parts.

    These are the bugs ``averaged_images`` and ``strided_images``.
    """
    kernel = op.attrs["kernel"] if "kernel" in op.attrs else op.inputs[1].shape[1:3]
    padded, stride = _window(op, kernel)
    images = op.inputs[0].shape[0] if (max(kernel) == 1 if op.kind == "CONV2D" else padded) else 1
    return f"{images} images and stride {stride} (3 at most), padded or of 1x1" if images > 1 and stride > 3 else None


def _argmax(op: Operation) -> str | None:
    shape = op.inputs[0].shape
    if op.attrs["axis"] != len(shape) - 1:
        return "an axis other than the last"
    if len(shape) > 4 or (len(shape) == 4 and shape[0] != 1):
        return f"shape {shape} (rank 1 to 3, or rank 4 with one batch)"
    return f"{shape[-1]} candidates (127 at most)" if shape[-1] > 127 else None


def _matmul(op: Operation) -> str | None:
    _, inner, width = op.inputs[1].shape
    return f"{inner} x {width} right-hand sides (65536 at most)" if max(inner, width) > MAX_EXTENT else None


def _reduce_sum(op: Operation) -> str | None:
    shape, axis = op.inputs[0].shape, op.attrs["axis"]
    sizes = (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))
    too_long = max(sizes[1:2] if axis == len(shape) - 1 else sizes) > MAX_EXTENT
    return f"shape {shape} over axis {axis} (65536 at most before, along and after it)" if too_long else None


def _resize(op: Operation) -> str | None:
    yn, yd, xn, xd = op.attrs["scale"]
    if op.attrs["mode"] != "NEAREST":
        return "bilinear interpolation"
    if op.inputs[0].shape[0] != 1:
        return "several images in a batch (one only)"
    if yn not in (2 * yd, 4 * yd, 8 * yd) or xn not in (2 * xd, 4 * xd, 8 * xd):
        return f"factors {yn}/{yd} and {xn}/{xd} (2, 4 and 8 only)"
    _, h, w, _ = op.inputs[0].shape
    for size, numerator, denominator, offset, border in zip(
        (h, w), (yn, xn), (yd, xd), op.attrs["offset"], op.attrs["border"], strict=True
    ):
        factor = numerator // denominator
        aligned = offset == 0 and border == 0
        centred = 2 * offset == denominator * (1 - factor) and 2 * border == denominator * (factor - 1)
        if not aligned and not centred and size > 1:
            return "pixels aligned other than at centres or at corners"
    return None


def _transpose(op: Operation) -> str | None:
    x, perms = op.inputs[0], tuple(op.attrs["perms"])
    reason = f"shape {x.shape} by {perms} (65536 at most along each of three axes, whichever are taken together)"
    return reason if plan_swaps(x.shape, perms, x.dtype, x.shape) is None else None


def _reverse(op: Operation) -> str | None:
    # Vela documents only these two axes. It accepts others for some shapes, which is not relied on.
    return (
        None if op.attrs["axis"] - len(op.inputs[0].shape) in _HEIGHT_WIDTH else "an axis other than height and width"
    )


_ALL_AXES = tuple(range(-6, 0))  # axes of tensors of up to rank 6
_HEIGHT_WIDTH = (-3, -2)  # height and width of [.., H, W, C]


def _lost_axes_of_window(op: Operation) -> tuple[int, ...]:
    """The axes along which Vela splits a convolution or pool and loses the offset."""
    shape, attrs = op.inputs[0].shape, op.attrs
    has_multiplier = op.kind == "DEPTHWISE_CONV2D" and op.inputs[1].shape[3] > 1
    is_dilated = max(attrs.get("dilation", (1,))) > 2 or max(shape) > MAX_EXTENT
    is_large = max(attrs["stride"]) > 3 or max(attrs.get("kernel", (1,))) > 8
    if any(attrs["pad"]) and (shape[0] > 1 or has_multiplier or is_dilated or is_large):
        return _ALL_AXES  # the padding is lost too
    return _HEIGHT_WIDTH if is_dilated else ()


def _lost_axes(op: Operation, always: Mapping[str, tuple[int, ...]], reduced: Sequence[int]) -> tuple[int, ...]:
    """The axes along which Vela splits an operator and loses the offset of its operands (``sliced``).

    REDUCE_SUM is computed along channels, other reductions along ``reduced``; both on one image.
    """
    # Vela splits arithmetic of rank 5 and more that broadcasts.
    if len(op.inputs) == 2 and op.kind not in always:
        first, second = (x.shape for x in op.inputs)
        # A register holds a single constant number, which needs no broadcast.
        is_scalar = any(x.data is not None and math.prod(x.shape) == 1 for x in op.inputs)
        return _ALL_AXES if first != second and max(len(first), len(second)) > 4 and not is_scalar else ()
    if not op.kind.startswith("REDUCE"):
        return always.get(op.kind, _lost_axes_of_window(op) if "pad" in op.attrs else ())
    shape, axis = op.inputs[0].shape, op.attrs["axis"] - len(op.inputs[0].shape)
    if op.kind == "REDUCE_SUM":
        return _ALL_AXES if len(shape) > 3 and axis == -1 else ()
    return _ALL_AXES if axis not in reduced or math.prod(shape[:-3]) > 1 else ()


_U55_LIMITS: dict[str, Limit] = {
    "ARGMAX": _argmax,
    # Vela compiles other shifts, against its documentation ("Round: true only").
    "ARITHMETIC_RIGHT_SHIFT": lambda op: None if op.attrs["round"] else "a shift that does not round",
    "AVG_POOL2D": _avg_pool,
    "CONV2D": _conv2d,
    "CONV3D": _conv3d,
    "DEPTHWISE_CONV2D": _depthwise,
    "MATMUL": _matmul,
    "MAX_POOL2D": _max_pool,
    "REDUCE_SUM": _reduce_sum,
    "RESIZE": _resize,
    "REVERSE": _reverse,
    "TRANSPOSE": _transpose,
    "TRANSPOSE_CONV2D": _transpose_conv2d,
}
_BUGS_OF_ALL = (
    *("sliced", "sliced_rank", "column", "joined", "padded_zero", "padded_images", "turned_back", "turned_result"),
    *("returned_view", "dilated", "unclipped", "unclipped_scaled", "unclipped_move", "joined_again"),
    *("clipped_rescale", "reshaped_parts"),
)
_U65 = Hardware(
    unsupported=frozenset((*_BITWISE, *_LOGICAL, *_COMPARISON_SELECT, "GATHER", "SCATTER", "INTDIV")),
    bool_as_int8=frozenset((*_LOGICAL, *_COMPARISON_SELECT)),
    types=_U55_TYPES,
    limits=_U55_LIMITS,
    booleans=False,
    npu=True,
    averages_by_convolution=True,
    max_depthwise_size=1 << 14,
    sums_rescale_operands=True,
    estimates_missing_activation=True,
    pads_weight_blocks=True,
    vela_bugs=(
        *(
            "reduce_min",
            *_BUGS_OF_ALL,
            "equal_weights",
            "unreached",
            "narrowing_cast",
            "clamped_cast",
            "unequal_scales",
        ),
        *("scaled_maximum", "channel_scales", "one_of_five", "reshaped_broadcast", "joined_table", "activation"),
        *("rescaled_part", "rescaled_parts", "joined_rescale", "joined_upsampling"),
    ),
    axes_lost_on_split=partial(
        _lost_axes, always=dict.fromkeys(("CONV3D", "TRANSPOSE_CONV2D", "MATMUL"), _ALL_AXES), reduced=(-2,)
    ),
)
_U55 = replace(_U65, copies_constants_from={(5, 2): 2})
_U85 = Hardware(
    # For int8 and int16, Vela shifts in copies of the sign bit (``narrow_shift``).
    types={"LOGICAL_RIGHT_SHIFT": (DType.INT32,)},
    limits=dict.fromkeys(("AVG_POOL2D", "CONV2D"), _batched_stride)
    | {"CONV3D": _constant_weights, "TRANSPOSE_CONV2D": _transpose_conv2d_u85},
    npu=True,
    macs_per_result=64,
    transposes_by_convolution=True,
    slow_weights_max_macs=256,
    chains=True,
    fuses_shared_rescale=True,
    ignores_unit_axes=True,
    scales_maxima=True,
    computes_pixel_pairs=True,
    splits_matmuls=True,
    packs_weights_by_rows=True,
    transposes_any_rank=True,
    slow_int16_macs=256,
    vela_bugs=(
        *(*_BUGS_OF_ALL, "equal_weights", "reshaped_select", "returned_mask", "gathered", "reversed"),
        *(
            "turned_table",
            "two_tables",
            "activation",
            "sliced_growth",
            "unclipped_scaled",
            "chained_cast",
            *("rescaled_once", "rescaled_choice", "rescaled_cast", "shifted_cast", "unclipped_term", "long_scale"),
        ),
    ),
    axes_lost_on_split=partial(
        _lost_axes,
        always={"CONV3D": _ALL_AXES, "TRANSPOSE_CONV2D": _HEIGHT_WIDTH, "ARGMAX": _ALL_AXES},
        reduced=_HEIGHT_WIDTH,
    ),
)
#: Hardware by family; "tosa" and "vgf" have no limits beyond their profile.
HARDWARE = {"ethos-u55": _U55, "ethos-u65": _U65, "ethos-u85": _U85, "tosa": Hardware(), "vgf": Hardware()}
#: Families that Vela compiles for.
ETHOS_U_FAMILIES = tuple(family for family, hardware in HARDWARE.items() if hardware.npu)
