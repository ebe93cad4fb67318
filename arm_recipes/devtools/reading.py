"""Intermediate results of a delegate's operations, in PyTorch's dimension order, and Vela's estimates of durations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from arm_recipes.runtime.delegates import TosaDelegate
from arm_recipes.runtime.ethosu import EthosUDelegate, EthosUOperation
from arm_recipes.runtime.ethosu_origins import Origins

if TYPE_CHECKING:
    from arm_backend_core.backends.payload import Layer as Estimate
    from arm_backend_core.events import Delegate
    from arm_recipes.devtools.layers import Layer
    from arm_recipes.runtime.plugin import Execution
    from arm_recipes.runtime.tosa_graph import TosaOperator

    Array = np.ndarray[Any, Any]

#: Candidate arrays for one result, which differ in their layout.
Results = tuple[Any, ...]


def read_results(execution: Execution, record: Delegate, operators: Sequence[TosaOperator]) -> dict[int, Results]:
    """Intermediate results of a delegate, by operator index.

    For a TOSA delegate, the candidates are empty: ``read_tosa_results`` reads its results by name. If the NPU wrote a
    result in pieces, the candidates are the possible concatenations.
    """
    delegate = execution.delegate
    if isinstance(delegate, TosaDelegate):
        return dict.fromkeys(range(len(operators)), ())
    if isinstance(delegate, EthosUDelegate):
        pieces = _written_pieces(delegate, execution, record, operators)
        candidates = {
            number: tuple(_join_pieces(written, operators[number].result.shape)) for number, written in pieces.items()
        }
        return {number: arrays for number, arrays in candidates.items() if arrays}
    return {}


def read_tosa_results(
    execution: Execution, operators: Sequence[TosaOperator], numbers: Sequence[int]
) -> dict[int, Results]:
    """Results of selected operators of a TOSA delegate, by operator index."""
    delegate = execution.delegate
    if not isinstance(delegate, TosaDelegate) or not numbers:
        return {}
    arrays = delegate.run_intermediates(execution.inputs, [operators[number].result.name for number in numbers])
    return {number: (array,) for number, array in zip(numbers, arrays, strict=True)}


def _written_pieces(
    delegate: EthosUDelegate, execution: Execution, record: Delegate, operators: Sequence[TosaOperator]
) -> dict[int, dict[str, list[EthosUOperation]]]:
    """NPU operations that wrote something, by TOSA operator and by NPU command."""
    numbers = _OperatorNumbers(operators)
    origins = Origins(record)
    written: dict[int, dict[str, list[EthosUOperation]]] = {}
    # In memory order, because the parts of a concatenation are written in any order.
    for done in sorted(delegate.trace(execution.inputs), key=lambda done: (done.region, done.address)):
        layer = origins.find(done.offset - delegate.header_bytes, indexed=done.indexed).estimate
        number = None if layer is None else numbers.find(layer)
        if number is not None and done.integers.size:
            written.setdefault(number, {}).setdefault(done.command, []).append(done)
    return written


def _join_pieces(written: Mapping[str, Sequence[EthosUOperation]], shape: tuple[int, ...]) -> Iterator[Array]:
    """Candidate concatenations, as (rows, columns, channels) and in ``shape``: Vela chooses rows and columns freely."""
    for done in written.values():
        if sum(each.integers.size for each in done) != math.prod(shape):  # an intermediate result
            continue
        # Parts of a reused (rolling) buffer are in time order, inputs of a CONCAT in memory order.
        orders = [done, sorted(done, key=lambda each: each.address)] if len(done) > 1 else [done]
        for order, axis in itertools.product(orders, range(3) if len(done) > 1 else (0,)):
            pieces = [each.integers for each in order]
            if len({tuple(np.delete(piece.shape, axis)) for piece in pieces}) == 1:
                array = np.concatenate(pieces, axis)
                yield from (array, array.reshape(shape))


class _OperatorNumbers:
    """Look-up of operator indices by Vela's layers: by the name of the result, else by Vela's operator index.

    The latter applies if Vela has replaced the operator by several others.
    """

    def __init__(self, operators: Sequence[TosaOperator]) -> None:
        self._by_name = {operator.result.name: number for number, operator in enumerate(operators)}
        self._by_index = {operator.index: number for number, operator in enumerate(operators)}

    def find(self, layer: Estimate) -> int | None:
        """Index of the operator; None if Vela does not state it."""
        number = self._by_name.get(layer.tensor)
        return number if number is not None or layer.index is None else self._by_index.get(layer.index)


def choose_layout(candidates: Sequence[Array], expected: Array) -> Array:
    """Choose the candidate and layout with the smallest distance to PyTorch's value.

    The compiler chooses memory layouts and does not record them. A wrong layout differs strongly from the expected
    value.
    """

    def distance(array: Array) -> float:
        with np.errstate(invalid="ignore"):  # masks may contain infinities
            return float(np.nan_to_num(np.abs(array.astype(np.float64) - expected)).sum())

    direct = itertools.chain.from_iterable(_layouts(candidate, expected.shape) for candidate in candidates)
    regrouped = itertools.chain.from_iterable(_regrouped_layouts(candidate, expected.shape) for candidate in candidates)
    best = min(direct, key=distance, default=None)
    # Beyond this distance, the sizes of the dimensions match only by chance.
    threshold = float(np.nan_to_num(np.abs(expected)).sum()) / 2
    if best is None or distance(best) >= threshold:
        best = min(itertools.chain(() if best is None else (best,), regrouped), key=distance)
    return np.ascontiguousarray(best)


def _layouts(array: Array, shape: tuple[int, ...]) -> Iterator[Array]:
    """Permutations of an array's dimensions that match ``shape``."""
    wanted = [size for size in shape if size != 1]
    squeezed = array.reshape([size for size in array.shape if size != 1])
    for order in itertools.permutations(range(squeezed.ndim)):
        if [squeezed.shape[axis] for axis in order] == wanted:
            yield squeezed.transpose(order).reshape(shape)


def _regrouped_layouts(array: Array, shape: tuple[int, ...]) -> Iterator[Array]:
    """Layouts in which dimensions of one shape are merged in the other."""
    for order in itertools.permutations(range(array.ndim)):
        yield array.transpose(order).reshape(shape)
    for order in itertools.permutations(range(len(shape))):
        yield array.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))


def dequantize(layer: Layer, candidates: Sequence[Array]) -> list[Array]:
    """Dequantize candidates if the layer has a scale and zero point."""
    if layer.scale is None or layer.zero_point is None:
        return list(candidates)
    scale, zero_point = np.float32(layer.scale), layer.zero_point
    return [(array.astype(np.int32) - zero_point).astype(np.float32) * scale for array in candidates]


@dataclass(frozen=True)
class Interval:
    """Vela's estimate of an operation: start and end in ns from the delegate's start, and further figures."""

    operation: int
    start: int
    end: int
    known: dict[str, Any]


def estimated_intervals(record: Delegate, operators: Sequence[TosaOperator]) -> dict[int, Interval]:
    """Vela's estimates by operation, as consecutive intervals in execution order; empty for other targets."""
    if record.vela is None:
        return {}
    numbers = _OperatorNumbers(operators)
    grouped: dict[int, list[Estimate]] = {}
    for layer in record.vela.layers:
        number = numbers.find(layer)
        if number is not None:
            grouped.setdefault(number, []).append(layer)
    intervals, start, clock = {}, 0, record.vela.core_clock
    for index, parts in grouped.items():
        known: dict[str, Any] = {"operator": parts[0].npu_operator, "tensor": parts[0].tensor}
        known |= {name: sum(getattr(part, name) for part in parts) for name in ("cycles", "npu_cycles", "macs")}
        end = start + known["cycles"]
        intervals[index] = Interval(index, round(start / clock * 1e9), round(end / clock * 1e9), known)
        start = end
    return intervals
