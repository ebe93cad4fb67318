"""Records of reductions, data movement, GATHER, SCATTER (TOSA 1.0, sections 2.9 to 2.11) and loop placeholders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from arm_backend_core.tosa.graph import Op, prod
from arm_backend_core.tosa.operators.record import (
    ANY_RANK,
    LEVEL_8K,
    RANK_AT_LEAST_1,
    Array,
    Shape,
    axis_violations,
    define_operator,
    min_max_ufunc,
)

_FLOAT = "f16>f16:FP bf16>bf16:bf16 f32>f32:FP "
_NUMBER_ROWS = "i8>i8:INT i16>i16:INT i32>i32:INT " + _FLOAT
_MOVABLE_ROWS = "b>b:INT|FP e4m3>e4m3:fp8e4m3 e5m2>e5m2:fp8e5m2 " + _NUMBER_ROWS


# -- reductions: the reduced axis has size 1 -----------------------------------------------------------------


def _define_reduction(kind: str, rows: str, compute: Callable[[Op, Array], Array | None] | None, **facts: Any) -> None:
    def shape(op: Op) -> Shape:
        axis = op.attrs["axis"]
        return *op.inputs[0].shape[:axis], 1, *op.inputs[0].shape[axis + 1 :]

    facts.setdefault("fields", ("axis",))
    facts |= {"find_violations": axis_violations, "compute": compute}
    define_operator(f"REDUCE_{kind}", rows, [RANK_AT_LEAST_1], shape, **facts)


def _sum(op: Op, x: Array) -> Array | None:
    if op.output.dtype.is_float:  # each target has its own order of additions
        return None
    return x.sum(axis=op.attrs["axis"], keepdims=True, dtype=np.int32)


def _reduce_min_max(op: Op, x: Array, name: str) -> Array:
    return min_max_ufunc(op, name).reduce(x, axis=op.attrs["axis"], keepdims=True)


_NAN_FIELDS = {"fields": ("axis", "nan_mode")}
_define_reduction("ALL", "b>b:INT|FP", lambda op, x: x.all(axis=op.attrs["axis"], keepdims=True))
_define_reduction("ANY", "b>b:INT|FP", lambda op, x: x.any(axis=op.attrs["axis"], keepdims=True))
_define_reduction("MAX", _NUMBER_ROWS, lambda op, x: _reduce_min_max(op, x, "max"), **_NAN_FIELDS)
_define_reduction("MIN", _NUMBER_ROWS, lambda op, x: _reduce_min_max(op, x, "min"), **_NAN_FIELDS)
_define_reduction("PRODUCT", _FLOAT, None)
_define_reduction("SUM", "i32>i32:INT " + _FLOAT, _sum)


# -- data layout ---------------------------------------------------------------------------------------------


def _concat_violations(op: Op) -> Iterator[str]:
    if not 1 <= len(op.inputs) <= LEVEL_8K.max_tensor_list_size:
        yield f"{len(op.inputs)} values ({LEVEL_8K.max_tensor_list_size} at most); join some of them first"
    yield from axis_violations(op)
    first, axis = op.inputs[0], op.attrs["axis"]
    for value in op.inputs[1:]:
        if value.rank != first.rank or any(
            i != axis and n != m for i, (n, m) in enumerate(zip(value.shape, first.shape, strict=True))
        ):
            yield f"operands {first!r} and {value!r}: their ranks, or their sizes outside axis {axis}, differ"


def _concat_shape(op: Op) -> Shape:
    shape, axis = op.inputs[0].shape, op.attrs["axis"]
    return *shape[:axis], sum(value.shape[axis] for value in op.inputs), *shape[axis + 1 :]


def _check_entries_per_dimension(op: Op, name: str, entries_per_dimension: int = 1) -> list[int]:
    """Return the list attribute ``name``; assert that it has this number of entries for each dimension."""
    entries = list(op.attrs[name])
    expected = entries_per_dimension * op.inputs[0].rank
    assert len(entries) == expected, f"{op!r}: {name} must have {entries_per_dimension} entries for each dimension"
    return entries


def _pad_violations(op: Op) -> Iterator[str]:
    if min(_check_entries_per_dimension(op, "padding", 2)) < 0:
        yield f"padding {list(op.attrs['padding'])} (0 at least); cut by a SLICE"


def _pad_shape(op: Op) -> Shape:
    padding = op.attrs["padding"]
    return tuple(padding[2 * i] + size + padding[2 * i + 1] for i, size in enumerate(op.inputs[0].shape))


def _pad(op: Op, x: Array) -> Array:
    padding = np.asarray(op.attrs["padding"], dtype=np.int64).reshape(-1, 2)
    return np.pad(x, padding, constant_values=op.attrs["pad_const"])


def _reshape_violations(op: Op) -> Iterator[str]:
    if prod(op.attrs["shape"]) != op.inputs[0].size or min(op.attrs["shape"], default=1) < 1:
        yield f"shape {list(op.attrs['shape'])} for {op.inputs[0]!r}"


def _slice_violations(op: Op) -> Iterator[str]:
    starts, sizes = (_check_entries_per_dimension(op, name) for name in ("start", "size"))
    bounds = zip(starts, sizes, op.inputs[0].shape, strict=True)
    if any(start < 0 or size < 1 or start + size > limit for start, size, limit in bounds):
        yield f"start {list(op.attrs['start'])} and size {list(op.attrs['size'])} in {op.inputs[0]!r}"


def _slice(op: Op, x: Array) -> Array:
    return x[tuple(slice(a, a + n) for a, n in zip(op.attrs["start"], op.attrs["size"], strict=True))]


def _tile_violations(op: Op) -> Iterator[str]:
    if min(_check_entries_per_dimension(op, "multiples")) < 1:
        yield f"multiples {list(op.attrs['multiples'])} (1 at least)"


def _transpose_violations(op: Op) -> Iterator[str]:
    if sorted(op.attrs["perms"]) != list(range(op.inputs[0].rank)):
        yield f"perms {list(op.attrs['perms'])} of {op.inputs[0]!r}"


def _define_data_movement(
    kind: str,
    compute: Callable[..., Array | None],
    shape: Callable[[Op], Shape],
    rows: str = _MOVABLE_ROWS,
    **facts: Any,
) -> None:
    ranks = [facts.pop("rank", RANK_AT_LEAST_1)]
    define_operator(kind, rows, ranks, shape, compute=compute, is_data_movement=True, **facts)


_define_data_movement(
    "CONCAT",
    lambda op, *xs: np.concatenate(xs, axis=op.attrs["axis"]),
    _concat_shape,
    rows=_MOVABLE_ROWS.replace("i16>i16:INT", "i16>i16:int16"),
    fields=("axis",),
    find_violations=_concat_violations,
    is_variadic=True,
)
_define_data_movement(
    "PAD",
    _pad,
    _pad_shape,
    constant_operands=(("padding", "shape"), ("pad_const", "input0")),
    find_violations=_pad_violations,
    per_dimension=("padding",),
)
_define_data_movement(
    "RESHAPE",
    lambda op, x: x.reshape(op.output.shape),
    lambda op: tuple(op.attrs["shape"]),
    constant_operands=(("shape", "shape"),),
    find_violations=_reshape_violations,
    rank=ANY_RANK,
    is_injective=True,
)
_define_data_movement(
    "REVERSE",
    lambda op, x: np.flip(x, op.attrs["axis"]),
    lambda op: op.inputs[0].shape,
    fields=("axis",),
    find_violations=axis_violations,
    is_injective=True,
)
_define_data_movement(
    "SLICE",
    _slice,
    lambda op: tuple(op.attrs["size"]),
    constant_operands=(("start", "shape"), ("size", "shape")),
    find_violations=_slice_violations,
    per_dimension=("start", "size"),
    is_injective=True,
)
_define_data_movement(
    "TILE",
    lambda op, x: np.tile(x, op.attrs["multiples"]),
    lambda op: tuple(n * m for n, m in zip(op.inputs[0].shape, op.attrs["multiples"], strict=True)),
    constant_operands=(("multiples", "shape"),),
    find_violations=_tile_violations,
    per_dimension=("multiples",),
)
_define_data_movement(
    "TRANSPOSE",
    lambda op, x: x.transpose(op.attrs["perms"]),
    lambda op: tuple(op.inputs[0].shape[i] for i in op.attrs["perms"]),
    fields=("perms",),
    find_violations=_transpose_violations,
    is_injective=True,
)


# -- loop placeholders ---------------------------------------------------------------------------------------

_LOOP_TYPES = ["b", "i8", "i16", "i32", "f16", "bf16", "f32", "e4m3", "e5m2"]
_LOOP_FACTS: dict[str, Any] = {"fields": ("loop", "index"), "is_placeholder": True, "is_variadic": True}
define_operator(
    "LOOP_IN",
    " ".join(f"{t}>{t}:controlflow" for t in _LOOP_TYPES),
    [ANY_RANK],
    lambda op: op.inputs[0].shape,
    **_LOOP_FACTS,
)
define_operator(
    "LOOP_OUT",
    " ".join(f"b>{t}:controlflow" for t in _LOOP_TYPES),
    [ANY_RANK],
    lambda op: op.inputs[1 + op.attrs["index"]].shape,
    **_LOOP_FACTS,
)


# -- GATHER and SCATTER --------------------------------------------------------------------------------------


def _index_violations(op: Op) -> Iterator[str]:
    values, indices = op.inputs[:2]
    if values.shape[0] != indices.shape[0]:
        yield f"{values!r} and indices {indices!r}"
    data, count = indices.data, values.shape[1]
    if data is not None and (data.min() < 0 or data.max() >= count):
        yield f"indices from {data.min()} to {data.max()} (0 to {count - 1})"


def _scatter_violations(op: Op) -> Iterator[str]:
    yield from _index_violations(op)
    (n, k, c), (_, w) = op.inputs[0].shape, op.inputs[1].shape
    if op.inputs[2].shape != (n, w, c):
        yield f"{op.inputs[2]!r} for indices {op.inputs[1]!r}"
    if w > k:
        yield f"{w} indices for {k} rows: each row may be written once"


def _gather(op: Op, values: Array, indices: Array) -> Array:
    return np.take_along_axis(values, indices[:, :, None], axis=1)


_ELEMENTS = """i8:INT i16:INT i32:INT f16:FP bf16:bf16 f32:FP e4m3:fp8e4m3 e5m2:fp8e5m2
    b:INT|FP@1.1 i8:FP@1.1 i16:FP@1.1 i32:FP@1.1"""
_INDEXED = [element.split(":") for element in _ELEMENTS.split()]
define_operator(
    "GATHER",
    " ".join(f"{t},i32>{t}:{needs}" for t, needs in _INDEXED),
    [(3, 3), (2, 2)],
    lambda op: (*op.inputs[1].shape, op.inputs[0].shape[2]),
    find_violations=_index_violations,
    compute=_gather,
    is_data_movement=True,
)
define_operator(
    "SCATTER",
    " ".join(f"{t},i32,{t}>{t}:{needs}" for t, needs in _INDEXED),
    [(3, 3), (2, 2), (3, 3)],
    lambda op: op.inputs[0].shape,
    find_violations=_scatter_violations,
)
