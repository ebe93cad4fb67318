"""Kernels that move int8 elements: transpose and constant padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arm_backend_core.cortex_m.kernels.registry import Array, Shape, kernel
from arm_backend_core.targets.cortex_m import Isa

#: Maximum rank of the input of both kernels.
MAX_RANK = 4

#: Order of the axes (N, C, H, W) in channels_last memory format.
CHANNELS_LAST = (0, 2, 3, 1)


def find_transpose_limitation(isa: Isa, shape: Shape, permutation: Sequence[int]) -> str | None:
    """Why ``arm_transpose_s8`` fails or gives a wrong result; None if the result is right.

    The kernel swaps the last two axes of each tensor of rank 2, even if the permutation is the identity. With MVE, the
    kernel also swaps the last two axes of each tensor of rank 4 whose first two axes stay in place, even if the
    permutation is the identity. The code that swaps two axes counts rows and columns in 16 bits. With MVE, the offset
    of the eighth element of a column must fit 16 bits, too.
    """
    order = tuple(permutation)
    if not 1 <= len(shape) <= MAX_RANK or sorted(order) != list(range(len(shape))):
        return f"{order} is not a permutation of the axes of {tuple(shape)}, or the rank is not 1 to {MAX_RANK}"
    swaps_last = len(shape) == 2 or (isa is Isa.MVE and len(shape) == 4 and order[:2] == (0, 1))
    if not swaps_last:
        return None
    if order[-1] > order[-2]:
        return f"the kernel swaps the last two axes of {tuple(shape)}, although the permutation is the identity"
    rows, columns = shape[-2:]
    if max(rows, columns) >= 1 << 16 or (isa is Isa.MVE and 7 * columns >= 1 << 16):
        return f"the last two axes of {tuple(shape)} are too large to be swapped"
    return None


@kernel(
    "transpose",
    "Tensor input, int[] perm",
    result_shape=lambda shape, permutation: tuple(shape[axis] for axis in permutation),
    find_limitation=find_transpose_limitation,
)
def transpose(x: Array, permutation: Sequence[int]) -> Array:
    """Permute the axes of an int8 tensor of rank 1 to 4 with contiguous memory format (``arm_transpose_s8``).

    The result has contiguous memory format, too. ExecuTorch's kernel does not check the memory formats. Axes must not
    be negative. ``find_transpose_limitation`` has the permutations and sizes for which CMSIS-NN fails.
    """
    return np.ascontiguousarray(x.transpose(tuple(permutation)))


def is_padded_as_channels_last(shape: Shape, *, channels_last: bool = False) -> bool:
    """Whether ``pad`` reads the amounts for a tensor of ``shape`` in the order (N, H, W, C) instead of (N, C, H, W).

    This holds for tensors of rank 4 with channels_last memory format. It also holds for tensors of rank 4 with one
    channel, or with height and width 1: their elements have the same order in both memory formats. In all these cases,
    the result of ``pad`` must have channels_last memory format.

    Args:
        shape: shape of the input.
        channels_last: the input has channels_last memory format.
    """
    if len(shape) != 4:
        return False
    return channels_last or shape[1] == 1 or shape[2] == shape[3] == 1


def _pad_widths(
    shape: Shape, before: Sequence[int], after: Sequence[int], channels_last: bool
) -> list[tuple[int, int]]:
    """Amounts before and after each axis of a tensor.

    Raises:
        ValueError: the rank is not 1 to 4, ``before`` or ``after`` does not have four amounts, an amount is negative,
            or an amount is not 0 for an axis that the tensor does not have.
    """
    widths = list(zip(before, after, strict=True))
    absent = MAX_RANK - len(shape)
    if len(widths) != MAX_RANK or absent not in range(MAX_RANK) or any(low < 0 or high < 0 for low, high in widths):
        raise ValueError(f"no padding of {tuple(shape)} by {before} and {after}")
    if any(width != (0, 0) for width in widths[:absent]):
        raise ValueError(f"padding for an axis that {tuple(shape)} does not have: {before} and {after}")
    if is_padded_as_channels_last(shape, channels_last=channels_last):
        return [widths[CHANNELS_LAST.index(axis)] for axis in range(MAX_RANK)]
    return widths[absent:]


def padded_shape(
    shape: Shape, before: Sequence[int], after: Sequence[int], value: int = 0, *, channels_last: bool = False
) -> Shape:
    """Shape of the result of ``pad``. ``channels_last``: the input has channels_last memory format."""
    widths = _pad_widths(shape, before, after, channels_last)
    return tuple(size + low + high for size, (low, high) in zip(shape, widths, strict=True))


@kernel("pad", "Tensor input, int[] pre_pad, int[] post_pad, int pad_value", result_shape=padded_shape)
def pad(x: Array, before: Sequence[int], after: Sequence[int], value: int) -> Array:
    """Pad an int8 tensor of rank 1 to 4 with a constant (``arm_pad_s8``).

    Args:
        x: int8. If the array is not C-contiguous, its memory format is channels_last.
        before: four amounts, not negative, in the order in which the axes are in memory (see
            ``is_padded_as_channels_last``). For a tensor of lower rank, the first amounts are 0.
        after: four amounts in the same order.
        value: int8, usually the zero point.

    Raises:
        ValueError: the rank of ``x`` or the amounts are not as above.
    """
    return np.pad(x, _pad_widths(x.shape, before, after, not x.flags.c_contiguous), constant_values=value)
