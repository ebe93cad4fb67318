"""Records of convolutions, pooling, ARGMAX, MATMUL and RESIZE (TOSA 1.0, sections 2.3 and 2.12)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from arm_backend_core.tosa.graph import Op
from arm_backend_core.tosa.operators.record import LEVEL_8K, RANK_AT_LEAST_1, Shape, axis_violations, define_operator

_CONV_ROWS = """i8,i8,i32>i32/i32:INT i8,i4,i32>i32/i32:int4 i16,i8,i48>i48/i48:int16 bf16,bf16,bf16>bf16/f32:bf16
    f16,f16,f16>f16/f16:FP f16,f16,f16>f16/f32:FP f32,f32,f32>f32/f32:FP
    e4m3,e4m3,f16>f16/f16:fp8e4m3 e5m2,e5m2,f16>f16/f16:fp8e5m2"""
_AVERAGE = """i8>i8/i32:INT i16>i16/i32:int16 bf16>bf16/f32:bf16 f16>f16/f16:FP f16>f16/f32:FP f32>f32/f32:FP
    e4m3>e4m3/f16:fp8e4m3 e5m2>e5m2/f16:fp8e5m2"""
_POOL = "i8>i8:INT i16>i16:int16 f16>f16:FP bf16>bf16:bf16 f32>f32:FP e4m3>e4m3:fp8e4m3 e5m2>e5m2:fp8e5m2"
_ZP_IN, _ZP_OUT, _ZP_WEIGHT = ("input_zp", "input0"), ("output_zp", "output"), ("weight_zp", "input1")


class WindowAxis(NamedTuple):
    """A dimension that a window of a convolution or pooling moves along.

    Attributes:
        name: "depth", "height" or "width".
        input_size: number of input elements.
        kernel: number of kernel elements, without the gaps of a dilation.
        stride: distance of neighbouring windows.
        dilation: distance of neighbouring kernel elements in the input.
        pad_before: number of padding elements before the input.
        pad_after: number of padding elements after the input.
    """

    name: str
    input_size: int
    kernel: int
    stride: int
    dilation: int
    pad_before: int
    pad_after: int

    @property
    def output_size(self) -> int:
        """Number of window positions; 0 or less if the window is longer than the padded input."""
        return (self.slack // self.stride) + 1

    @property
    def slack(self) -> int:
        """Size of the padded input minus the size of the window: the distance that the window can move."""
        return self.input_size + self.pad_before + self.pad_after - (self.kernel - 1) * self.dilation - 1

    def overlaps_input(self, position: int) -> bool:
        """Whether the window of an output position reads input elements, and not only padding."""
        first = position * self.stride - self.pad_before
        return any(0 <= first + i * self.dilation < self.input_size for i in range(self.kernel))


def window_axes(op: Op) -> list[WindowAxis]:
    """The axes (height, width) of a convolution or pooling, or (depth, height, width) of a CONV3D."""
    sizes = op.inputs[0].shape[1:-1]
    kernel: Sequence[int] = op.attrs.get("kernel", ())
    if op.weight is not None:
        weight = op.weight.shape
        kernel = weight[:2] if op.kind == "DEPTHWISE_CONV2D" else weight[1:-1]
    pad, stride, dilation = op.attrs["pad"], op.attrs["stride"], op.attrs.get("dilation", (1,) * len(sizes))
    names = ("depth", "height", "width")[-len(sizes) :]
    return [
        WindowAxis(name, sizes[i], kernel[i], stride[i], dilation[i], pad[2 * i], pad[2 * i + 1])
        for i, name in enumerate(names)
    ]


def window_violations(op: Op) -> Iterator[str]:
    """Yield violations of the window attributes (TOSA 1.0, ERROR_IFs of CONV2D and limits of the level)."""
    for name in ("kernel", "stride", "dilation", "pad"):
        values, minimum = op.attrs.get(name, ()), 0 if name == "pad" else 1
        if any(value < minimum for value in values):
            yield f"{name} {list(values)} ({minimum} at least)"
    for axis in window_axes(op):
        if axis.kernel * axis.dilation > LEVEL_8K.max_kernel:
            yield f"a window {axis.kernel * axis.dilation} long in {axis.name} ({LEVEL_8K.max_kernel} at most)"
        if axis.stride > LEVEL_8K.max_stride:
            yield f"stride {axis.stride} ({LEVEL_8K.max_stride} at most)"
        if max(axis.pad_before, axis.pad_after) > LEVEL_8K.max_kernel:
            yield f"padding {axis.pad_before}, {axis.pad_after} ({LEVEL_8K.max_kernel} at most)"
        if axis.slack < 0:
            yield f"a window longer than the padded {axis.name} of {axis.input_size}"
        elif axis.slack % axis.stride:
            yield f"a last window that ends before the padded {axis.name} ends; cut {axis.slack % axis.stride}"


def _conv_violations(op: Op) -> Iterator[str]:
    x, weight, bias = op.inputs
    channels, input_channels = (weight.shape[2] * weight.shape[3], weight.shape[2]), x.shape[-1]
    if op.kind != "DEPTHWISE_CONV2D":
        channels = (weight.shape[0], weight.shape[-1])
    if channels[1] != input_channels:
        yield f"weights for {channels[1]} channels on {x!r}"
    if bias.shape[0] not in (1, channels[0]):
        yield f"a bias of {bias.shape[0]} for {channels[0]} channels"
    if op.kind == "TRANSPOSE_CONV2D":
        yield from _transposed_violations(op)
    else:
        yield from window_violations(op)


def _transposed_violations(op: Op) -> Iterator[str]:
    kernel = op.inputs[1].shape[1:3]
    if max(kernel) > LEVEL_8K.max_kernel:
        yield f"kernel {list(kernel)} ({LEVEL_8K.max_kernel} at most)"
    if not 1 <= min(op.attrs["stride"]) <= max(op.attrs["stride"]) <= LEVEL_8K.max_stride:
        yield f"stride {list(op.attrs['stride'])} (1 to {LEVEL_8K.max_stride})"
    for i, amount in enumerate(op.attrs["out_pad"]):
        if not -kernel[i // 2] < amount <= LEVEL_8K.max_kernel:
            low = -kernel[i // 2] + 1
            yield f"out_pad {amount} ({low} to {LEVEL_8K.max_kernel}); crop the result by a SLICE"
    if min(_transposed_shape(op)) < 1:
        yield f"out_pad {list(op.attrs['out_pad'])}, which leaves nothing"


def _transposed_shape(op: Op) -> Shape:
    (n, h, w, _), (oc, kh, kw, _) = op.inputs[0].shape, op.inputs[1].shape
    stride, pad = op.attrs["stride"], op.attrs["out_pad"]
    return n, (h - 1) * stride[0] + pad[0] + pad[1] + kh, (w - 1) * stride[1] + pad[2] + pad[3] + kw, oc


def conv_shape(op: Op) -> Shape:
    """Shape of a convolution's result: [N, H, W, OC], or [N, D, H, W, OC] for CONV3D."""
    assert op.weight is not None
    weight = op.weight.shape
    channels = weight[2] * weight[3] if op.kind == "DEPTHWISE_CONV2D" else weight[0]
    return op.inputs[0].shape[0], *(axis.output_size for axis in window_axes(op)), channels


def _pool_violations(op: Op) -> Iterator[str]:
    yield from window_violations(op)
    for axis in window_axes(op):
        if max(axis.pad_before, axis.pad_after) >= axis.kernel:
            yield f"padding {axis.pad_before}, {axis.pad_after} in {axis.name} (less than the kernel, {axis.kernel})"


def _pool_shape(op: Op) -> Shape:
    return op.inputs[0].shape[0], *(axis.output_size for axis in window_axes(op)), op.inputs[0].shape[-1]


_CONV_RECORD: dict[str, Any] = {
    "fields": ("pad", "stride", "dilation", "local_bound", "acc_type"),
    "constant_operands": (_ZP_IN, _ZP_WEIGHT),
    "find_violations": _conv_violations,
}
_TRANSPOSE_CONV_RECORD = {**_CONV_RECORD, "fields": ("out_pad", "stride", "local_bound", "acc_type")}
define_operator("CONV2D", _CONV_ROWS, [(4, 4), (4, 4), (1, 1)], conv_shape, **_CONV_RECORD)
define_operator("CONV3D", _CONV_ROWS, [(5, 5), (5, 5), (1, 1)], conv_shape, **_CONV_RECORD)
define_operator("DEPTHWISE_CONV2D", _CONV_ROWS, [(4, 4), (4, 4), (1, 1)], conv_shape, **_CONV_RECORD)
define_operator("TRANSPOSE_CONV2D", _CONV_ROWS, [(4, 4), (4, 4), (1, 1)], _transposed_shape, **_TRANSPOSE_CONV_RECORD)
define_operator(
    "AVG_POOL2D",
    _AVERAGE,
    [(4, 4)],
    _pool_shape,
    fields=("kernel", "stride", "pad", "acc_type"),
    constant_operands=(_ZP_IN, _ZP_OUT),
    find_violations=_pool_violations,
)
define_operator(
    "MAX_POOL2D",
    _POOL,
    [(4, 4)],
    _pool_shape,
    fields=("kernel", "stride", "pad", "nan_mode"),
    find_violations=_pool_violations,
)


# -- ARGMAX and MATMUL ---------------------------------------------------------------------------------------


def _argmax_shape(op: Op) -> Shape:
    shape, axis = op.inputs[0].shape, op.attrs["axis"]
    return shape[:axis] + shape[axis + 1 :]


def _matmul_violations(op: Op) -> Iterator[str]:
    a, b = op.inputs
    if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        yield f"operands {a!r} and {b!r}"


define_operator(
    "ARGMAX",
    "i8>i32:INT i16>i32:int16 f16>i32:FP bf16>i32:bf16 f32>i32:FP e4m3>i32:fp8e4m3 e5m2>i32:fp8e5m2",
    [RANK_AT_LEAST_1],
    _argmax_shape,
    attribute_table="ArgMax",
    fields=("axis", "nan_mode"),
    find_violations=axis_violations,
)
define_operator(
    "MATMUL",
    """i8,i8>i32:INT i16,i16>i48:int16 f16,f16>f32:FP f16,f16>f16:FP bf16,bf16>f32:bf16 f32,f32>f32:FP
    e4m3,e4m3>f16:fp8e4m3 e5m2,e5m2>f16:fp8e5m2""",
    [(3, 3)],
    lambda op: (op.inputs[0].shape[0], op.inputs[0].shape[1], op.inputs[1].shape[2]),
    attribute_table="MatMul",
    constant_operands=(("a_zp", "input0"), ("b_zp", "input1")),
    find_violations=_matmul_violations,
)


# -- RESIZE --------------------------------------------------------------------------------------------------

#: Limits of RESIZE. The sizes of operand and result are below ``_SIZE_LIMIT``. The numerator of the scale is at most
#: ``_MAX_NUMERATOR``. The scale is greater than 1 / ``_REDUCTION_LIMIT``.
_SIZE_LIMIT, _MAX_NUMERATOR, _REDUCTION_LIMIT = 16384, 1 << 11, 16


class ResizeAxis(NamedTuple):
    """RESIZE along height or width: output o samples the input at position (o * d + offset) / n.

    Attributes:
        name: "height" or "width".
        input_size: number of input elements.
        n: numerator of the scale.
        d: denominator of the scale.
        offset: position of the first sample, in units of 1 / n.
        border: distance of the last sample from the last input element, in units of 1 / n.
    """

    name: str
    input_size: int
    n: int
    d: int
    offset: int
    border: int

    @property
    def sampled_extent(self) -> int:
        """Distance between the first and the last sample, in units of 1 / n."""
        return (self.input_size - 1) * self.n - self.offset + self.border

    @property
    def output_size(self) -> int:
        """Number of samples; 0 if ``d`` is not positive."""
        return self.sampled_extent // self.d + 1 if self.d > 0 else 0

    def violations(self) -> Iterator[str]:
        """Yield violations of RESIZE's ERROR_IFs and of the limit of the level."""
        n, d = self.n, self.d
        if max(self.input_size, self.output_size) >= _SIZE_LIMIT:
            yield f"{self.name} {self.input_size} to {self.output_size} (less than {_SIZE_LIMIT})"
        if min(n, d) < 1 or n > _MAX_NUMERATOR:
            yield f"scale {n}/{d} in {self.name} (numerator 1 to {_MAX_NUMERATOR})"
        elif n > LEVEL_8K.max_scale * d:
            yield f"scale {n}/{d} in {self.name} ({LEVEL_8K.max_scale} at most); enlarge in two steps"
        elif d >= _REDUCTION_LIMIT * n:
            yield f"scale {n}/{d} in {self.name} (above 1/{_REDUCTION_LIMIT}); reduce in two steps"
        elif not -n <= self.offset < 16 * n:
            yield f"offset {self.offset} in {self.name} ({-n} to {16 * n - 1})"
        elif not -16 * n <= self.border < n:
            yield f"border {self.border} in {self.name} ({-16 * n} to {n - 1})"
        elif self.sampled_extent % d:
            sizes = f"{self.name} {self.input_size} to {self.output_size}"
            yield f"{sizes} by scale {n}/{d}, offset {self.offset}, border {self.border}"


def resize_axes(op: Op) -> list[ResizeAxis]:
    """The axes (height, width) of a RESIZE."""
    yn, yd, xn, xd = op.attrs["scale"]
    (_, height, width, _), (oy, ox), (by, bx) = op.inputs[0].shape, op.attrs["offset"], op.attrs["border"]
    return [ResizeAxis("height", height, yn, yd, oy, by), ResizeAxis("width", width, xn, xd, ox, bx)]


def _resize_violations(op: Op) -> Iterator[str]:
    changes_type = op.output.dtype is not op.inputs[0].dtype
    if not op.output.dtype.is_float and changes_type != (op.attrs["mode"] == "BILINEAR"):
        yield f"mode {op.attrs['mode']} from {op.inputs[0].dtype.value} to {op.output.dtype.value}"
    for axis in resize_axes(op):
        yield from axis.violations()


def _resize_shape(op: Op) -> Shape:
    return op.inputs[0].shape[0], *(axis.output_size for axis in resize_axes(op)), op.inputs[0].shape[3]


_RESIZE = """i8>i32:INT i8>i8:INT i16>i48:int16 i16>i16:int16 f16>f16:FP bf16>bf16:bf16 f32>f32:FP"""
define_operator(
    "RESIZE",
    _RESIZE,
    [(4, 4)],
    _resize_shape,
    fields=("mode",),
    constant_operands=(("scale", "shape"), ("offset", "shape"), ("border", "shape")),
    find_violations=_resize_violations,
)
