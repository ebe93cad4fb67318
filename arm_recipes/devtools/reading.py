"""What the operations of a delegate give while a program runs, in PyTorch's order of dimensions."""

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

#: Ways to read one result.
Results = tuple[Any, ...]


def read_results(execution: Execution, record: Delegate, operators: Sequence[TosaOperator]) -> dict[int, Results]:
    """What the operations of a delegate gave, by the number of the operator: one that is asked for by name, or arrays.

    Where an NPU wrote a result in pieces, these are the ways in which they may belong together.
    """
    delegate = execution.delegate
    if isinstance(delegate, TosaDelegate):
        return dict.fromkeys(range(len(operators)), ())
    if isinstance(delegate, EthosUDelegate):
        pieces = _written_pieces(delegate, execution, record, operators)
        found = {number: tuple(_join_pieces(made, operators[number].result.shape)) for number, made in pieces.items()}
        return {number: arrays for number, arrays in found.items() if arrays}
    return {}


def read_tosa_results(
    execution: Execution, operators: Sequence[TosaOperator], numbers: Sequence[int]
) -> dict[int, Results]:
    """What operators of a TOSA graph gave."""
    delegate = execution.delegate
    if not isinstance(delegate, TosaDelegate) or not numbers:
        return {}
    made = delegate.run_intermediates(execution.inputs, [operators[number].result.name for number in numbers])
    return {number: (array,) for number, array in zip(numbers, made, strict=True)}


def _written_pieces(
    delegate: EthosUDelegate, execution: Execution, record: Delegate, operators: Sequence[TosaOperator]
) -> dict[int, dict[str, list[EthosUOperation]]]:
    """Operations of the NPU that wrote something, by the operator that they belong to and by their kind."""
    numbers = _OperatorNumbers(operators)
    origins = Origins(record)
    written: dict[int, dict[str, list[EthosUOperation]]] = {}
    # As they lie in memory: the parts of a concatenation are written when they are known.
    for done in sorted(delegate.trace(execution.inputs), key=lambda done: (done.region, done.address)):
        layer = origins.find(done.offset - delegate.header_bytes, indexed=done.indexed).estimate
        number = None if layer is None else numbers.find(layer)
        if number is not None and done.integers.size:
            written.setdefault(number, {}).setdefault(done.command, []).append(done)
    return written


def _join_pieces(written: Mapping[str, Sequence[EthosUOperation]], shape: tuple[int, ...]) -> Iterator[Array]:
    """What was written as rows, columns and channels, and as it lies in memory: Vela chooses the former as it likes."""
    for done in written.values():
        if sum(each.integers.size for each in done) != math.prod(shape):  # what it computes on the way
            continue
        # Parts of a buffer that is used in turn follow in time, inputs of a CONCAT in memory.
        orders = [done, sorted(done, key=lambda each: each.address)] if len(done) > 1 else [done]
        for order, axis in itertools.product(orders, range(3) if len(done) > 1 else (0,)):
            pieces = [each.integers for each in order]
            if len({tuple(np.delete(piece.shape, axis)) for piece in pieces}) == 1:
                array = np.concatenate(pieces, axis)
                yield from (array, array.reshape(shape))


class _OperatorNumbers:
    """Of operators by the layers of Vela: that of the result, or that which Vela has replaced by more."""

    def __init__(self, operators: Sequence[TosaOperator]) -> None:
        self._by_name = {operator.result.name: number for number, operator in enumerate(operators)}
        self._by_place = {operator.index: number for number, operator in enumerate(operators)}

    def find(self, layer: Estimate) -> int | None:
        """None where Vela does not tell."""
        number = self._by_name.get(layer.tensor)
        return number if number is not None or layer.index is None else self._by_place.get(layer.index)


def choose_layout(candidates: Sequence[Array], expected: Array) -> Array:
    """The array as PyTorch has it, of ways to read it: the one that is nearest to what PyTorch computes.

    A layout of memory is chosen by the compiler and written down nowhere; a wrong one is far off.
    """

    def distance(array: Array) -> float:
        with np.errstate(invalid="ignore"):  # infinities of a mask
            return float(np.nan_to_num(np.abs(array.astype(np.float64) - expected)).sum())

    plain = itertools.chain.from_iterable(_layouts(candidate, expected.shape) for candidate in candidates)
    joined = itertools.chain.from_iterable(_regrouped_layouts(candidate, expected.shape) for candidate in candidates)
    best = min(plain, key=distance, default=None)
    far = float(np.nan_to_num(np.abs(expected)).sum()) / 2  # dimensions are of the wanted sizes by chance
    if best is None or distance(best) >= far:
        best = min(itertools.chain(() if best is None else (best,), joined), key=distance)
    return np.ascontiguousarray(best)


def _layouts(array: Array, shape: tuple[int, ...]) -> Iterator[Array]:
    """Ways in which the dimensions of an array are those of ``shape``."""
    wanted = [size for size in shape if size != 1]
    squeezed = array.reshape([size for size in array.shape if size != 1])
    for order in itertools.permutations(range(squeezed.ndim)):
        if [squeezed.shape[axis] for axis in order] == wanted:
            yield squeezed.transpose(order).reshape(shape)


def _regrouped_layouts(array: Array, shape: tuple[int, ...]) -> Iterator[Array]:
    """Ways in which dimensions of one are several of the other."""
    for order in itertools.permutations(range(array.ndim)):
        yield array.transpose(order).reshape(shape)
    for order in itertools.permutations(range(len(shape))):
        yield array.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))


def dequantize(layer: Layer, candidates: Sequence[Array]) -> list[Array]:
    """The real numbers that integers stand for, where the layer's value is real."""
    if layer.scale is None or layer.zero_point is None:
        return list(candidates)
    scale, zero_point = np.float32(layer.scale), layer.zero_point
    return [(array.astype(np.int32) - zero_point).astype(np.float32) * scale for array in candidates]


@dataclass(frozen=True)
class Interval:
    """Vela's estimate for an operation: when it begins and ends, in nanoseconds from the delegate's start on."""

    operation: int
    start: int
    end: int
    known: dict[str, Any]


def estimated_intervals(record: Delegate, operators: Sequence[TosaOperator]) -> dict[int, Interval]:
    """Vela's estimates by operation, one after the other as they run; none for other targets."""
    if record.vela is None:
        return {}
    numbers = _OperatorNumbers(operators)
    grouped: dict[int, list[Estimate]] = {}
    for layer in record.vela.layers:
        number = numbers.find(layer)
        if number is not None:
            grouped.setdefault(number, []).append(layer)
    found, start, clock = {}, 0, record.vela.core_clock
    for index, parts in grouped.items():
        known: dict[str, Any] = {"operator": parts[0].npu_operator, "tensor": parts[0].tensor}
        known |= {name: sum(getattr(part, name) for part in parts) for name in ("cycles", "npu_cycles", "macs")}
        end = start + known["cycles"]
        found[index] = Interval(index, round(start / clock * 1e9), round(end / clock * 1e9), known)
        start = end
    return found
