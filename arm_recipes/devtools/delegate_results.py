"""Results of a delegate's operators, and Vela's estimates of their durations.

The compiler chooses the memory layout of a result. ``choose_layout`` converts a result to PyTorch's dimension order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from arm_recipes.runtime.command_origins import CommandOrigins
from arm_recipes.runtime.delegates import TosaDelegate
from arm_recipes.runtime.ethosu import EthosUDelegate, EthosUOperation

if TYPE_CHECKING:
    from arm_backend_core.backends.vela_estimates import OperationEstimate as Estimate
    from arm_backend_core.compilation_log import DelegateRecord
    from arm_recipes.devtools.debug_handle_groups import DebugHandleGroup
    from arm_recipes.runtime.host_backends import DelegateExecution
    from arm_recipes.runtime.tosa_flatbuffer import TosaOperator

    Array = np.ndarray[Any, Any]

#: Candidate arrays for one result. They differ in their memory layout.
CandidateArrays = tuple[Any, ...]


def trace_operator_results(
    execution: DelegateExecution, record: DelegateRecord, operators: Sequence[TosaOperator]
) -> dict[int, CandidateArrays]:
    """Trace the results of a delegate's operators: ``{operator index: candidate arrays}``.

    For an Ethos-U delegate, the NPU emulator executes the delegate again. If the NPU wrote a result in pieces, the
    candidates are the possible concatenations. For a TOSA delegate, each operator has an empty tuple, because
    ``compute_tosa_results`` computes the results of selected operators later. For other delegates (VGF), the dict is
    empty.
    """
    delegate = execution.delegate
    if isinstance(delegate, TosaDelegate):
        return dict.fromkeys(range(len(operators)), ())
    if isinstance(delegate, EthosUDelegate):
        pieces = _written_pieces(delegate, execution, record, operators)
        candidates = {
            number: tuple(_concatenate_pieces(written, operators[number].result.shape))
            for number, written in pieces.items()
        }
        return {number: arrays for number, arrays in candidates.items() if arrays}
    return {}


def compute_tosa_results(
    execution: DelegateExecution, operators: Sequence[TosaOperator], numbers: Sequence[int]
) -> dict[int, CandidateArrays]:
    """Compute the results of selected operators of a TOSA delegate: ``{operator index: candidate arrays}``."""
    delegate = execution.delegate
    if not isinstance(delegate, TosaDelegate) or not numbers:
        return {}
    arrays = delegate.run_intermediates(execution.inputs, [operators[number].result.name for number in numbers])
    return {number: (array,) for number, array in zip(numbers, arrays, strict=True)}


def _written_pieces(
    delegate: EthosUDelegate, execution: DelegateExecution, record: DelegateRecord, operators: Sequence[TosaOperator]
) -> dict[int, dict[str, list[EthosUOperation]]]:
    """Return ``{TOSA operator index: {NPU command: operations that wrote a result, in order of execution}}``."""
    operator_lookup = _OperatorLookup(operators)
    origins = CommandOrigins(record)
    pieces: dict[int, dict[str, list[EthosUOperation]]] = {}
    for operation in delegate.trace(execution.inputs):
        layer = origins.find(operation.offset - delegate.header_bytes, indexed=operation.indexed).estimate
        operator_index = None if layer is None else operator_lookup.find(layer)
        if operator_index is not None and operation.result.size:
            pieces.setdefault(operator_index, {}).setdefault(operation.command, []).append(operation)
    return pieces


def _concatenate_pieces(written: Mapping[str, Sequence[EthosUOperation]], shape: tuple[int, ...]) -> Iterator[Array]:
    """Yield each possible concatenation twice: with the NPU's shape (rows, columns, channels), and with ``shape``.

    Both are needed, because the NPU may divide the elements into other rows and columns than ``shape``.
    """
    for operations in written.values():
        # Skip operations that wrote an intermediate result.
        if sum(operation.result.size for operation in operations) != math.prod(shape):
            continue
        # Stripes in a rolling buffer reuse addresses: concatenate them in order of execution. The NPU may write the
        # inputs of a CONCAT in any order: concatenate them in memory order.
        in_memory_order = sorted(operations, key=lambda operation: (operation.region, operation.address))
        orders = [operations, in_memory_order] if len(operations) > 1 else [operations]
        for order, axis in itertools.product(orders, range(3) if len(operations) > 1 else (0,)):
            pieces = [operation.result for operation in order]
            if len({tuple(np.delete(piece.shape, axis)) for piece in pieces}) == 1:
                array = np.concatenate(pieces, axis)
                yield from (array, array.reshape(shape))


class _OperatorLookup:
    """Look-up of the TOSA operator of a Vela layer: by the name of the result, otherwise by Vela's operator index.

    If Vela has replaced the operator by several others, their results have other names, and only the index matches.
    """

    def __init__(self, operators: Sequence[TosaOperator]) -> None:
        self._by_name = {operator.result.name: number for number, operator in enumerate(operators)}
        self._by_index = {operator.index: number for number, operator in enumerate(operators)}

    def find(self, layer: Estimate) -> int | None:
        """Find the index of a layer's operator; None if neither the layer's name nor its index identifies one."""
        number = self._by_name.get(layer.tensor)
        return number if number is not None or layer.index is None else self._by_index.get(layer.index)


def choose_layout(candidates: Sequence[Array], expected: Array) -> Array:
    """Choose the candidate and layout with the smallest distance to PyTorch's value.

    The compiler does not record the memory layouts that it chooses. With a wrong layout, the values differ strongly
    from the expected ones.
    """

    def distance(array: Array) -> float:
        with np.errstate(invalid="ignore"):  # masks may contain infinities
            return float(np.nan_to_num(np.abs(array.astype(np.float64) - expected)).sum())

    direct = itertools.chain.from_iterable(_layouts(candidate, expected.shape) for candidate in candidates)
    regrouped = itertools.chain.from_iterable(_regrouped_layouts(candidate, expected.shape) for candidate in candidates)
    best = min(direct, key=distance, default=None)
    # Beyond this distance, the layout is wrong: its dimensions match the shape only by chance.
    threshold = float(np.nan_to_num(np.abs(expected)).sum()) / 2
    if best is None or distance(best) >= threshold:
        best = min(itertools.chain(() if best is None else (best,), regrouped), key=distance)
    return np.ascontiguousarray(best)


def _layouts(array: Array, shape: tuple[int, ...]) -> Iterator[Array]:
    """Yield the permutations of an array's dimensions that match ``shape``."""
    wanted = [size for size in shape if size != 1]
    squeezed = array.reshape([size for size in array.shape if size != 1])
    for order in itertools.permutations(range(squeezed.ndim)):
        if [squeezed.shape[axis] for axis in order] == wanted:
            yield squeezed.transpose(order).reshape(shape)


def _regrouped_layouts(array: Array, shape: tuple[int, ...]) -> Iterator[Array]:
    """Yield ``array`` in ``shape``, for layouts that split or merge dimensions of ``array``.

    Yields:
        One array for each order of the dimensions of ``array``, then one for each order of the dimensions of ``shape``.
    """
    for order in itertools.permutations(range(array.ndim)):
        yield array.transpose(order).reshape(shape)
    for order in itertools.permutations(range(len(shape))):
        yield array.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))


def dequantize(group: DebugHandleGroup, candidates: Sequence[Array]) -> list[Array]:
    """Dequantize candidates if the group has a scale and a zero point."""
    if group.scale is None or group.zero_point is None:
        return list(candidates)
    scale, zero_point = np.float32(group.scale), group.zero_point
    return [(array.astype(np.int32) - zero_point).astype(np.float32) * scale for array in candidates]


@dataclass(frozen=True)
class EstimatedInterval:
    """Vela's estimate for a TOSA operator.

    Attributes:
        operator_index: index of the TOSA operator.
        start, end: times in ns from the start of the delegate.
        details: names of the NPU operator and of its result, total cycles, cycles of the NPU alone, and MACs.
    """

    operator_index: int
    start: int
    end: int
    details: dict[str, Any]


def estimated_intervals(record: DelegateRecord, operators: Sequence[TosaOperator]) -> dict[int, EstimatedInterval]:
    """Return Vela's estimates by operator index, as consecutive intervals in execution order.

    The result is empty for a delegate that Vela did not compile.
    """
    if record.vela is None:
        return {}
    operator_lookup = _OperatorLookup(operators)
    layers_of_operator: dict[int, list[Estimate]] = {}
    for layer in record.vela.layers:
        number = operator_lookup.find(layer)
        if number is not None:
            layers_of_operator.setdefault(number, []).append(layer)
    intervals, start, clock = {}, 0, record.vela.core_clock
    for index, layers in layers_of_operator.items():
        details: dict[str, Any] = {"operator": layers[0].npu_operator, "tensor": layers[0].tensor}
        details |= {name: sum(getattr(part, name) for part in layers) for name in ("cycles", "npu_cycles", "macs")}
        end = start + details["cycles"]
        intervals[index] = EstimatedInterval(index, round(start / clock * 1e9), round(end / clock * 1e9), details)
        start = end
    return intervals
