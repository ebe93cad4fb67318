"""topk: the largest or smallest elements along a dimension.

TOSA has no sort. There are two algorithms. Iterative selection finds the extreme of the remaining elements in each
step, and keeps a mask of the elements that remain. Selection by rank compares all pairs, and counts the elements that
precede each element in the sorted order.

On Ethos-U, ``choose_algorithm`` takes the one with fewer cycles. If both take too many cycles, topk stays on the CPU.
Vela 5.1 estimates for the 20 largest of 300 INT8 elements:

=======  =================  =====================  ===============  ===================
NPU      cycles, iterative  SRAM bytes, iterative  cycles, by rank  SRAM bytes, by rank
=======  =================  =====================  ===============  ===================
U55-128  340,518            5,744                  3,181,514        548,400
U85-256  274,187            6,368                  355,372          1,090,800
=======  =================  =====================  ===============  ===================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops import intervals
from arm_backend_core.ops.operands import Context, Operand
from arm_backend_core.ops.reduction import atleast_1d
from arm_backend_core.ops.registry import AnnotationKind, op
from arm_backend_core.targets.hardware import Hardware
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value

aten = torch.ops.aten
Algorithm = Callable[[Builder, Value, DType, int, int, bool], list[Value]]
#: On targets other than Ethos-U, k above this limit use selection by rank, because each step of the iterative selection
#: takes eight operators on the whole tensor. Other k use selection by rank only if there are at most 8 * k elements.
_MAX_ITERATIVE_K = 5
#: Limits of topk with k above _MAX_ITERATIVE_K, on all targets. There must be at most _MAX_RANKED_ELEMENTS elements
#: along the dimension, or at most _MAX_PAIRS pairs of elements (rows * n * n). Example of the latter: 512 elements in
#: one row. With 1024 elements in one row, the CPU is faster.
_MAX_RANKED_ELEMENTS, _MAX_PAIRS = 64, 1 << 18
#: Maximum number of pairs for selection by rank on Ethos-U. A pair takes 6 bytes of SRAM on U55, and 12 on U85.
_MAX_PAIRS_ON_NPU = 1 << 13
#: Maximum number of cycles on Ethos-U. If topk takes more, it stays on the CPU, whose partial sort takes some tens of
#: cycles for each element.
_MAX_CYCLES = 300_000


@dataclass(frozen=True)
class _CycleModel:
    """Cost model of both algorithms in cycles, fitted to Vela 5.1's estimates within 30%.

    The fit covers INT8 tensors of 16 to 4,096 elements.

    Attributes:
        step: cycles per element of one step of the iterative selection.
        step_start: constant part of the cycles of one step.
        pair: cycles of selection by rank per pair of elements along the dimension.
        rank_start: constant part of the cycles of selection by rank.
        min_rows: number of rows up to which the cycles of a step do not depend on the number of rows.
    """

    step: float
    step_start: float
    pair: float
    rank_start: float
    min_rows: int

    def iterative_cycles(self, rows: int, n: int, k: int) -> float:
        """Cycles of ``k`` steps on ``rows`` of ``n`` elements."""
        return k * (self.step_start + self.step * max(rows, self.min_rows) * n)

    def ranking_cycles(self, rows: int, n: int) -> float:
        """Cycles of selection by rank."""
        return self.rank_start + self.pair * rows * n * n


#: Costs on NPUs without comparison operators (U55, U65), which compare by arithmetic.
_COSTS_WITHOUT_COMPARISON = _CycleModel(48, 1200, 45, 10_000, 1)
#: Costs on NPUs with comparison operators (U85).
_COSTS_WITH_COMPARISON = _CycleModel(23, 300, 4.2, 1_500, 2)


def choose_algorithm(hardware: Hardware, rows: int, n: int, k: int) -> Algorithm:
    """Choose the algorithm for the ``k`` largest of ``n`` elements in each of ``rows``.

    Raises:
        Unsupported: ``k``, ``n`` and the number of pairs exceed their limits, or topk on the CPU takes less time.
    """
    pairs = rows * n * n
    if k > _MAX_ITERATIVE_K and n > _MAX_RANKED_ELEMENTS and pairs > _MAX_PAIRS:
        limit = f"k is at most {_MAX_ITERATIVE_K}, unless there are at most {_MAX_RANKED_ELEMENTS} elements "
        limit += f"or {_MAX_PAIRS} pairs"
        raise Unsupported(f"topk of {k} among {n} elements ({limit}); use a smaller k")
    if not hardware.is_ethos_u:
        return select_by_rank if k > _MAX_ITERATIVE_K or n <= 8 * k else select_iteratively
    costs = _COSTS_WITHOUT_COMPARISON if "EQUAL" in hardware.unsupported else _COSTS_WITH_COMPARISON
    cycles: float
    cycles, algorithm = costs.iterative_cycles(rows, n, k), select_iteratively
    if pairs <= _MAX_PAIRS_ON_NPU and costs.ranking_cycles(rows, n) < cycles:
        cycles, algorithm = costs.ranking_cycles(rows, n), select_by_rank
    if cycles > _MAX_CYCLES:
        raise Unsupported(
            f"topk of {k} among {n} elements in {rows} rows would take about {round(cycles, -3):,.0f} cycles (at most "
            f"{_MAX_CYCLES:,}), and the CPU is faster; use a smaller k or fewer elements"
        )
    return algorithm


@op(aten.topk.default, kind=AnnotationKind.SHARED, interval=intervals.values_and_indices)
def topk(cx: Context, x: Operand, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> list[Operand]:
    """torch.topk with int32 indices, sorted. Equal elements keep their order; NaN is larger than any number."""
    b, shape, x = cx.b, cx.shape, atleast_1d(cx, x)
    axis, n = dim % x.rank, x.shape[dim]
    select = choose_algorithm(cx.target.hardware, x.value.size // n, n, k)
    elements = x.value if x.value.dtype.is_float else b.cast(x.value, DType.INT32)  # EQUAL takes no narrower type
    index_dtype = DType.INT32 if cx.target.has_int_profile else DType.FP32  # the FP profile compares no integers
    selected = select(b, elements, index_dtype, k, axis, largest)
    values, indices = (b.reshape(value, shape) for value in selected)
    return [Operand(b.cast(values, x.value.dtype), x.q), Operand(b.cast(indices, DType.INT32))]


def select_iteratively(b: Builder, x: Value, index_dtype: DType, k: int, axis: int, largest: bool) -> list[Value]:
    """Return the ``k`` values and their indices. Each iteration selects the extreme of the remaining elements."""
    n = x.shape[axis]
    positions = b.const(np.arange(n).reshape([n if i == axis else 1 for i in range(x.rank)]), index_dtype)
    remaining = b.const(np.ones((1,) * x.rank, dtype=bool), DType.BOOL)
    selected: list[list[Value]] = []
    for _ in range(k):
        value, is_extreme = _select_extreme(b, x, remaining, axis, largest=largest)
        index = b.reduce("REDUCE_MIN", b.select(is_extreme, positions, b.const(n, index_dtype)), axis)
        remaining = b.binary("LOGICAL_AND", remaining, b.unary("LOGICAL_NOT", b.compare("EQUAL", positions, index)))
        selected.append([value, index])
    return [b.concat(parts, axis) for parts in zip(*selected, strict=True)]


def select_by_rank(b: Builder, x: Value, index_dtype: DType, k: int, axis: int, largest: bool) -> list[Value]:
    """Return the ``k`` values and their indices.

    The rank of an element is the number of elements that precede it in the sorted order.
    """
    order = [*(i for i in range(x.rank) if i != axis), axis]
    rows, n = x.size // x.shape[axis], x.shape[axis]
    axis_last = b.transpose(x, order)
    this, other = (b.reshape(axis_last, shape) for shape in ((rows, n, 1), (rows, 1, n)))
    over, under = (other, this) if largest else (this, other)  # over > under: ``other`` precedes ``this``
    is_before, is_before_or_equal = (b.compare(kind, over, under) for kind in ("GREATER", "GREATER_EQUAL"))
    if x.dtype.is_float:
        is_nan, other_is_number = (
            b.unary("LOGICAL_NOT", b.compare("EQUAL", over, over)),
            b.compare("EQUAL", under, under),
        )
        is_before = b.binary("LOGICAL_OR", is_before, b.binary("LOGICAL_AND", is_nan, other_is_number))
        is_before_or_equal = b.binary("LOGICAL_OR", is_before_or_equal, is_nan)
    is_earlier_index = b.const(np.tri(n, k=-1, dtype=bool)[None], DType.BOOL)
    is_before = b.binary("LOGICAL_OR", is_before, b.binary("LOGICAL_AND", is_before_or_equal, is_earlier_index))
    is_selected = b.compare(
        "EQUAL", b.reduce("REDUCE_SUM", b.cast(is_before, index_dtype), 2), b.const(np.arange(k), index_dtype)
    )
    positions = b.const(np.arange(n).reshape(1, n, 1), index_dtype)
    selected = (b.reduce("REDUCE_SUM", b.select(is_selected, y, b.const(0, y.dtype)), 1) for y in (this, positions))
    shape = (*axis_last.shape[:-1], k)
    return [b.transpose(b.reshape(value, shape), [order.index(i) for i in range(x.rank)]) for value in selected]


def _select_extreme(b: Builder, x: Value, remaining: Value, axis: int, *, largest: bool) -> tuple[Value, Value]:
    """Return the largest or smallest of the ``remaining`` elements, and the mask of elements that equal it."""
    if not x.dtype.is_float:
        low, high = x.dtype.range
        value = b.reduce(*_build_masked_reduction(b, x, remaining, low if largest else high, largest), axis)
        return value, b.binary("LOGICAL_AND", remaining, b.compare("EQUAL", x, value))
    is_number = b.compare("EQUAL", x, x)
    if largest:  # REDUCE_MAX returns NaN if there is one
        value = b.reduce(*_build_masked_reduction(b, x, remaining, -math.inf, largest), axis)
        is_extreme = b.binary("LOGICAL_OR", b.compare("EQUAL", x, value), b.unary("LOGICAL_NOT", is_number))
        return value, b.binary("LOGICAL_AND", remaining, is_extreme)
    candidates = b.binary("LOGICAL_AND", remaining, is_number)
    has_number = b.reduce("REDUCE_ANY", candidates, axis)
    value = b.reduce(*_build_masked_reduction(b, x, candidates, math.inf, largest), axis)
    is_extreme = b.binary("LOGICAL_OR", b.compare("EQUAL", x, value), b.unary("LOGICAL_NOT", has_number))
    return b.select(has_number, value, b.const(math.nan, x.dtype)), b.binary("LOGICAL_AND", remaining, is_extreme)


def _build_masked_reduction(
    b: Builder, x: Value, candidates: Value, fill_value: float, largest: bool
) -> tuple[str, Value]:
    """Return the first two arguments of ``b.reduce`` for the extreme of the candidates.

    They are the name of the reduction, and ``x`` with ``fill_value`` in place of all other elements.
    """
    return "REDUCE_MAX" if largest else "REDUCE_MIN", b.select(candidates, x, b.const(fill_value, x.dtype))
