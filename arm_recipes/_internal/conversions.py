"""Conversions of a tensor to an expected dtype and shape, which error messages suggest to the user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

#: {dtype: method that converts a tensor to it}. Other dtypes need ``.to``.
_DTYPE_METHODS = {
    "float32": ".float()",
    "float16": ".half()",
    "bfloat16": ".bfloat16()",
    "float64": ".double()",
    "int64": ".long()",
    "int32": ".int()",
    "bool": ".bool()",
}


@dataclass(frozen=True)
class Conversion:
    """A conversion of the shape of a tensor.

    Attributes:
        code: methods to call, for example ``.unsqueeze(0)``; empty if the shape stays.
        shape: the converted shape.
        reason: what is wrong with the shape, for example a missing batch dimension; empty if the shape stays.
    """

    code: str
    shape: tuple[int, ...]
    reason: str


def list_shape_conversions(shape: Sequence[int]) -> Iterator[Conversion]:
    """Yield conversions that users forget, the most likely first.

    The conversions: move the channels in front of the spatial dimensions; add a batch dimension; do both; add a batch
    and a channel dimension; remove a first dimension of size 1.
    """
    rank, sizes = len(shape), tuple(shape)
    if 3 <= rank <= 5:
        axes = (0, rank - 1, *range(1, rank - 1))
        yield Conversion(f".permute{axes}", tuple(sizes[axis] for axis in axes), "the channels are last")
    if rank <= 4:
        yield Conversion(".unsqueeze(0)", (1, *sizes), "the batch dimension is missing")
    if 2 <= rank <= 4:
        axes = (rank - 1, *range(rank - 1))
        permuted = tuple(sizes[axis] for axis in axes)
        reason = "the batch dimension is missing, and the channels are last"
        yield Conversion(f".permute{axes}.unsqueeze(0)", (1, *permuted), reason)
    if rank == 2:
        yield Conversion(".unsqueeze(0).unsqueeze(0)", (1, 1, *sizes), "batch and channel dimension are missing")
    if rank and sizes[0] == 1:
        yield Conversion(".squeeze(0)", sizes[1:], "there is an additional dimension")


def dtype_name(dtype: Any) -> str:
    """Name of a ``torch.dtype`` without its module, for example "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_conversion_code(dtype: str, expected: str) -> str:
    """Return the method that converts a dtype, for example ``.float()``; empty if the dtypes are equal."""
    return "" if dtype == expected else _DTYPE_METHODS.get(expected, f".to(torch.{expected})")


def suggest_conversion(
    dtype: str, shape: Sequence[int], expected_dtype: str, expected_shape: Sequence[int], value: str = "x"
) -> str:
    """Suggest the code that converts a tensor to the expected dtype and shape, as ": reason; pass code".

    Args:
        dtype: dtype of the tensor, such as "float32".
        shape: shape of the tensor.
        expected_dtype: the expected dtype.
        expected_shape: the expected shape.
        value: Python expression of the tensor.

    Returns:
        the end of a sentence, without a reason if only the dtype differs; empty if no conversion is needed or known.
    """
    same = Conversion("", tuple(shape), "")
    conversions = [same, *list_shape_conversions(shape)]
    if len(shape) > 1 and shape[0] > 1:
        conversions.append(Conversion("[i:i + 1]", (1, *shape[1:]), f"a batch of {shape[0]} items, one for each call"))
    found = next((item for item in conversions if item.shape == tuple(expected_shape)), None)
    if found is None:
        return ""
    code = found.code + dtype_conversion_code(dtype, expected_dtype)
    return f"{found.reason and ': '}{found.reason}; pass {value}{code}" if code else ""


def describe_tensor(dtype: str, shape: Sequence[int]) -> str:
    """Describe a tensor, for example ``float32[1, 3]``. Dimensions may be symbolic."""
    return f"{dtype}[{', '.join(map(str, shape))}]"
