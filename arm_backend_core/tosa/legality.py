"""Which operator, on which element types, a target may be given.

The table is TOSA 1.0's "supported data types" (chapter 2). Below it stand the limits of Ethos-U hardware
beyond the profile: what Vela 5.1 documents (``vela --supported-ops-report``) and what it was seen to refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Value, prod

_NAMES = {
    "b": DType.BOOL,
    "i8": DType.INT8,
    "i16": DType.INT16,
    "i32": DType.INT32,
    "i48": DType.INT48,
    "f16": DType.FP16,
    "bf16": DType.BF16,
    "f32": DType.FP32,
}


def _rows(text: str) -> dict[tuple[DType, ...], tuple[str, ...]]:
    """Parse "i8>i32:INT i16>i48:int16": input types > result type : any of these profiles or extensions."""
    rows = {}
    for row in text.split():
        types, needs = row.split(":")
        names = types.replace(">", ",").split(",")
        rows[tuple(_NAMES[name] for name in names)] = tuple(needs.split("|"))
    return rows


_FLOAT = "f16>f16:FP bf16>bf16:bf16 f32>f32:FP "
_FLOAT2 = "f16,f16>f16:FP bf16,bf16>bf16:bf16 f32,f32>f32:FP "
_CONV = "i8,i8>i32:INT i16,i8>i48:int16 f16,f16>f16:FP f32,f32>f32:FP bf16,bf16>bf16:bf16"
_MOVE = "b>b:INT|FP i8>i8:INT i16>i16:INT i32>i32:INT " + _FLOAT
_BITWISE = "i8,i8>i8:INT i16,i16>i16:INT i32,i32>i32:INT"
_SHIFT = "i8,i8>i8:INT|FP i16,i16>i16:INT|FP i32,i32>i32:INT|FP"
_LOGICAL = "b,b>b:INT|FP"
_COMPARE = "i32,i32>b:INT f16,f16>b:FP bf16,bf16>b:bf16 f32,f32>b:FP"
_REDUCE = "i8>i8:INT i16>i16:INT i32>i32:INT " + _FLOAT
_ARITHMETIC = "i32,i32>i32:INT|FP " + _FLOAT2
_MINMAX = "i32,i32>i32:INT " + _FLOAT2
_POOL = "i8>i8:INT i16>i16:int16 " + _FLOAT

_TABLE: dict[str, dict[tuple[DType, ...], tuple[str, ...]]] = {
    kind: _rows(text)
    for kind, text in {
        "ARGMAX": "i8>i32:INT i16>i32:int16 f16>i32:FP bf16>i32:bf16 f32>i32:FP",
        "AVG_POOL2D": _POOL,
        "CONV2D": _CONV,
        "CONV3D": _CONV,
        "DEPTHWISE_CONV2D": _CONV,
        "TRANSPOSE_CONV2D": _CONV,
        "MATMUL": "i8,i8>i32:INT i16,i16>i48:int16 f16,f16>f16:FP bf16,bf16>f32:bf16 f32,f32>f32:FP",
        "MAX_POOL2D": _POOL,
        "CLAMP": _POOL,
        "ERF": _FLOAT,
        "SIGMOID": _FLOAT,
        "TANH": _FLOAT,
        "ADD": _ARITHMETIC,
        "ARITHMETIC_RIGHT_SHIFT": _BITWISE,
        "BITWISE_AND": _BITWISE,
        "BITWISE_OR": _BITWISE,
        "BITWISE_XOR": _BITWISE,
        "INTDIV": "i32,i32>i32:INT|FP",
        "LOGICAL_AND": _LOGICAL,
        "LOGICAL_LEFT_SHIFT": _SHIFT,
        "LOGICAL_RIGHT_SHIFT": _SHIFT,
        "LOGICAL_OR": _LOGICAL,
        "LOGICAL_XOR": _LOGICAL,
        "MAXIMUM": _MINMAX,
        "MINIMUM": _MINMAX,
        "MUL": "i8,i8>i32:INT i16,i16>i32:INT i32,i32>i32:INT|FP " + _FLOAT2,
        "POW": _FLOAT2,
        "SUB": _ARITHMETIC,
        "TABLE": "i8>i8:INT i16>i32:int16",
        "ABS": "i32>i32:INT " + _FLOAT,
        "BITWISE_NOT": "i8>i8:INT i16>i16:INT i32>i32:INT",
        "CEIL": _FLOAT,
        "CLZ": "i32>i32:INT",
        "COS": _FLOAT,
        "EXP": _FLOAT,
        "FLOOR": _FLOAT,
        "LOG": _FLOAT,
        "LOGICAL_NOT": "b>b:INT|FP",
        "NEGATE": _REDUCE,
        "RECIPROCAL": _FLOAT,
        "RSQRT": _FLOAT,
        "SIN": _FLOAT,
        "SELECT": "b,b,b>b:INT|FP b,i8,i8>i8:INT b,i16,i16>i16:INT b,i32,i32>i32:INT "
        "b,f16,f16>f16:FP b,bf16,bf16>bf16:bf16 b,f32,f32>f32:FP",
        "EQUAL": _COMPARE,
        "GREATER": _COMPARE,
        "GREATER_EQUAL": _COMPARE,
        "REDUCE_ALL": "b>b:INT|FP",
        "REDUCE_ANY": "b>b:INT|FP",
        "REDUCE_MAX": _REDUCE,
        "REDUCE_MIN": _REDUCE,
        "REDUCE_PRODUCT": _FLOAT,
        "REDUCE_SUM": "i32>i32:INT " + _FLOAT,
        "CONCAT": _MOVE.replace("i16>i16:INT", "i16>i16:int16"),
        "PAD": _MOVE,
        "RESHAPE": _MOVE,
        "REVERSE": _MOVE,
        "SLICE": _MOVE,
        "TILE": _MOVE,
        "TRANSPOSE": _MOVE,
        "GATHER": "i8,i32>i8:INT i16,i32>i16:INT i32,i32>i32:INT f16,i32>f16:FP bf16,i32>bf16:bf16 f32,i32>f32:FP",
        "SCATTER": "i8,i32,i8>i8:INT i16,i32,i16>i16:INT i32,i32,i32>i32:INT f32,i32,f32>f32:FP",
        "RESIZE": "i8>i32:INT i8>i8:INT i16>i48:int16 i16>i16:int16 " + _FLOAT,
        "CAST": "b>i8:INT b>i16:INT b>i32:INT i8>b:INT i8>i16:INT i8>i32:INT i8>f16:FP i8>f32:FP "
        "i16>b:INT i16>i8:INT i16>i32:INT i16>f16:FP i16>f32:FP i32>b:INT i32>i8:INT i32>i16:INT i32>f16:FP "
        "i32>f32:FP f16>i8:FP f16>i16:FP f16>i32:FP f16>f32:FP f32>i8:FP f32>i16:FP f32>i32:FP f32>f16:FP "
        "f32>bf16:bf16 bf16>f32:bf16",
        "RESCALE": "i8>i8:INT i8>i16:INT i8>i32:INT i16>i8:INT i16>i16:INT i16>i32:INT "
        "i32>i8:INT i32>i16:INT i32>i32:INT i48>i8:int16 i48>i16:int16 i48>i32:int16",
        "IDENTITY": "b>b:INT|FP i8>i8:INT|FP i16>i16:INT|FP i32>i32:INT|FP i48>i48:int16 " + _FLOAT,
    }.items()
}
#: Operators whose later operands (bias; further inputs) have a type that follows from the first ones.
_TYPED_INPUTS = {"CONV2D": 2, "CONV3D": 2, "DEPTHWISE_CONV2D": 2, "TRANSPOSE_CONV2D": 2, "CONCAT": 1}

_BITWISE_KINDS = ("BITWISE_AND", "BITWISE_OR", "BITWISE_XOR", "BITWISE_NOT", "LOGICAL_RIGHT_SHIFT")
_LOGICAL_KINDS = ("LOGICAL_AND", "LOGICAL_OR", "LOGICAL_XOR", "LOGICAL_NOT", "REDUCE_ALL", "REDUCE_ANY")
_U55_LACKS = frozenset(
    (
        *_BITWISE_KINDS,
        *_LOGICAL_KINDS,
        "EQUAL",
        "GREATER",
        "GREATER_EQUAL",
        "SELECT",
        "GATHER",
        "SCATTER",
        "INTDIV",
    )
)
#: Operators that a family's hardware lacks whatever the element type (Vela 5.1 refuses them).
HARDWARE_LACKS: dict[str, frozenset[str]] = {"ethos-u55": _U55_LACKS, "ethos-u65": _U55_LACKS}

#: Element types that Vela 5.1 takes as an operator's first input, where they are fewer than the profile's.
_U55_TYPES = {
    "ARITHMETIC_RIGHT_SHIFT": (DType.INT32,),
    "LOGICAL_LEFT_SHIFT": (DType.INT32,),
    "ARGMAX": (DType.INT8,),
    "MATMUL": (DType.INT8,),
    "CONV3D": (DType.INT8,),
    "TRANSPOSE_CONV2D": (DType.INT8,),
    "REDUCE_MAX": (DType.INT8, DType.INT16),
    "REDUCE_MIN": (DType.INT8, DType.INT16),
    "REVERSE": (DType.INT8, DType.INT16),
}
HARDWARE_TYPES: dict[str, dict[str, tuple[DType, ...]]] = {"ethos-u55": _U55_TYPES, "ethos-u65": _U55_TYPES}

_SIDE = 1 << 16  # extents and addresses along one axis are 16-bit registers on Ethos-U55 and U65


def _window(values: Sequence[Value], attrs: Mapping[str, Any], kernel: Sequence[int]) -> tuple[bool, int]:
    """Whether the window reads padding, and its largest stride along an axis on which it moves at all."""
    pad, stride = attrs["pad"], attrs["stride"]
    dilation = attrs.get("dilation", (1,) * len(kernel))
    moves = [
        size + pad[2 * i] + pad[2 * i + 1] > dilation[i] * (kernel[i] - 1) + 1
        for i, size in enumerate(values[0].shape[1:-1])
    ]
    return any(pad), max((step for step, moved in zip(stride, moves, strict=True) if moved), default=1)


def _constant_weights(values: Sequence[Value]) -> str | None:
    return "weights and bias that are not constant" if any(value.data is None for value in values[1:]) else None


def _conv2d(values: Sequence[Value], attrs: Mapping[str, Any]) -> str | None:
    kernel = values[1].shape[1:3]
    padded, stride = _window(values, attrs, kernel)
    if stride > 3 and padded and max(kernel) > 1:
        return f"stride {stride} (3 at most) together with padding"
    return _constant_weights(values)


def _depthwise(values: Sequence[Value], attrs: Mapping[str, Any]) -> str | None:
    _, stride = _window(values, attrs, values[1].shape[:2])
    return f"stride {stride} (3 at most)" if stride > 3 else _constant_weights(values)


def _conv3d(values: Sequence[Value], attrs: Mapping[str, Any]) -> str | None:
    depth = values[1].shape[1]
    return f"a kernel {depth} deep (1 at most)" if depth > 1 else _constant_weights(values)


def _transpose_conv2d(values: Sequence[Value], attrs: Mapping[str, Any]) -> str | None:
    stride = tuple(attrs["stride"])
    flat = [values[0].shape[i] == values[1].shape[i] == 1 for i in (1, 2)]
    if stride not in ((1, 1), (2, 2)) and not (stride == (1, 2) and flat[0]) and not (stride == (2, 1) and flat[1]):
        return f"stride {stride} (1x1 and 2x2; 1x2 and 2x1 for one-dimensional input)"
    return _constant_weights(values)


def _max_pool(values: Sequence[Value], attrs: Mapping[str, Any]) -> str | None:
    padded, stride = _window(values, attrs, attrs["kernel"])
    return f"stride {stride} (3 at most) together with padding" if stride > 3 and padded else None


def _avg_pool(values: Sequence[Value], attrs: Mapping[str, Any]) -> str | None:
    if any(attrs["pad"]) and max(attrs["kernel"]) > 8:
        return f"kernel {tuple(attrs['kernel'])} (8x8 at most) together with padding"
    return _max_pool(values, attrs)


def _argmax(values: Sequence[Value], attrs: Mapping[str, Any]) -> str | None:
    shape = values[0].shape
    if attrs["axis"] != len(shape) - 1:
        return "an axis other than the last"
    if len(shape) > 4 or (len(shape) == 4 and shape[0] != 1):
        return f"shape {shape} (rank 1 to 3, or rank 4 with one batch)"
    return f"{shape[-1]} candidates (127 at most)" if shape[-1] > 127 else None


def _matmul(values: Sequence[Value], attrs: Mapping[str, Any]) -> str | None:
    _, inner, width = values[1].shape
    return f"{inner} x {width} right-hand sides (65536 at most)" if max(inner, width) > _SIDE else None


def _reduce_sum(values: Sequence[Value], attrs: Mapping[str, Any]) -> str | None:
    shape, axis = values[0].shape, attrs["axis"]
    sizes = [shape[axis]] if axis == len(shape) - 1 else [prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])]
    return f"shape {shape} over axis {axis} (65536 at most before, along and after it)" if max(sizes) > _SIDE else None


def _resize(values: Sequence[Value], attrs: Mapping[str, Any]) -> str | None:
    yn, yd, xn, xd = attrs["scale"]
    if attrs["mode"] != "NEAREST":
        return "bilinear interpolation"
    if yn not in (2 * yd, 4 * yd, 8 * yd) or xn not in (2 * xd, 4 * xd, 8 * xd):
        return f"factors {yn}/{yd} and {xn}/{xd} (2, 4 and 8 only)"
    _, h, w, _ = values[0].shape
    for size, numerator, denominator, offset, border in zip(
        (h, w), (yn, xn), (yd, xd), attrs["offset"], attrs["border"], strict=True
    ):
        factor = numerator // denominator
        aligned = offset == 0 and border == 0
        centred = 2 * offset == denominator * (1 - factor) and 2 * border == denominator * (factor - 1)
        if not aligned and not centred and size > 1:
            return "pixels aligned other than at centres or at corners"
    return None


def _transpose(values: Sequence[Value], attrs: Mapping[str, Any]) -> str | None:
    shape, perms = values[0].shape, tuple(attrs["perms"])
    axes = [axis for axis in perms if shape[axis] != 1]
    if axes == sorted(axes):
        return None  # moves no data
    sizes = [size for size in shape if size != 1]
    limit = 1 << 14 if values[0].dtype is DType.INT32 else _SIDE
    if max(sizes) > (limit if perms[-1] == len(shape) - 1 else _SIDE):
        return f"shape {shape} ({limit} at most along one axis)"
    if len(sizes) <= 3:
        return None
    pairs = [prod(sizes) // (a * b) for i, a in enumerate(sizes) for b in sizes[i + 1 :]]
    return f"shape {shape} (65536 at most over all but two axes)" if max(pairs) > _SIDE else None


def _reverse(values: Sequence[Value], attrs: Mapping[str, Any]) -> str | None:
    # Vela's documentation has height and width only. It takes other axes of some shapes, which is not relied
    # on.
    rank, axis = values[0].rank, attrs["axis"]
    return None if axis < rank - 1 and axis >= rank - 3 else "an axis other than height and width"


def _right_shift(values: Sequence[Value], attrs: Mapping[str, Any]) -> str | None:
    # Vela compiles it, against its documentation ("Round: true only").
    return None if attrs["round"] else "a shift that does not round"


Limit = Callable[[Sequence[Value], Mapping[str, Any]], "str | None"]
_U55_LIMITS: dict[str, Limit] = {
    "ARGMAX": _argmax,
    "ARITHMETIC_RIGHT_SHIFT": _right_shift,
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
#: What a family's hardware cannot do with an operator it has: each returns the offending property, or None.
HARDWARE_LIMITS: dict[str, dict[str, Limit]] = {
    "ethos-u55": _U55_LIMITS,
    "ethos-u65": _U55_LIMITS,
    "ethos-u85": {
        "CONV3D": lambda values, attrs: _constant_weights(values),
        "TRANSPOSE_CONV2D": lambda values, attrs: _constant_weights(values),
    },
}


def refusal(
    target: Target,
    kind: str,
    inputs: Sequence[DType],
    output: DType,
    *,
    values: Sequence[Value] | None = None,
    attrs: Mapping[str, Any] | None = None,
) -> str | None:
    """Why ``target`` cannot run ``kind`` on these types, or None if it can.

    With the operator's ``values`` (its inputs) and ``attrs`` the hardware's limits on shapes, kernels and
    constants are checked too.
    """
    types = (*inputs[: _TYPED_INPUTS.get(kind, len(inputs))], output)
    needs = _TABLE[kind].get(types)
    signature = f"{kind} ({', '.join(t.value for t in types[:-1])} -> {output.value})"
    if needs is None:
        return f"TOSA 1.0 has no {signature}"
    if not any(need in target.profiles or need in target.extensions for need in needs):
        return f"{signature} needs TOSA {' or '.join(needs)}, which {target.name} lacks"
    if kind in HARDWARE_LACKS.get(target.family, ()):
        return f"{target.name} has no {kind} in hardware"
    if target.family in ("ethos-u55", "ethos-u65") and DType.BOOL in types:
        return f"{target.name} has no boolean tensors in hardware"
    allowed = HARDWARE_TYPES.get(target.family, {}).get(kind)
    if allowed is not None and types[0] not in allowed:
        return f"{target.name} has no {signature} in hardware"
    limit = HARDWARE_LIMITS.get(target.family, {}).get(kind)
    offence = limit(values, attrs) if limit is not None and values is not None and attrs is not None else None
    return f"{target.name} has no {kind} with {offence}" if offence else None
