"""What the operations of a delegate give while a program runs, in PyTorch's order of dimensions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from arm_recipes.runtime.delegates import TosaDelegate
from arm_recipes.runtime.ethosu import EthosUDelegate
from arm_recipes.runtime.ethosu_origins import Origins

if TYPE_CHECKING:
    from arm_backend_core.backends.payload import Layer as Estimate
    from arm_backend_core.events import Delegate
    from arm_recipes.devtools.layers import Layer
    from arm_recipes.runtime.plugin import Execution
    from arm_recipes.runtime.tosa_graph import Operator

    Array = np.ndarray[Any, Any]


def reads(backend: str) -> bool:
    """Whether the operations of a backend's delegates can be seen on this machine."""
    return backend in ("TOSABackend", "EthosUBackend")


def given(record: Delegate, operators: Sequence[Operator]) -> list[int]:
    """Numbers of the operators whose results can be had: all of TOSA's, the last one of each layer of an Ethos-U."""
    if record.backend != "EthosUBackend":
        return list(range(len(operators))) if reads(record.backend) else []
    number = {operator.result.name: index for index, operator in enumerate(operators)}
    found = [number.get(layer.tensor) for layer in (record.vela.layers if record.vela is not None else ())]
    return sorted({index for index in found if index is not None})


def results(
    execution: Execution, record: Delegate, operators: Sequence[Operator], layers: Sequence[Layer]
) -> dict[int, list[Array]]:
    """What operations gave, by number; where it was written in pieces, the ways in which they may belong together."""
    delegate = execution.delegate
    if isinstance(delegate, TosaDelegate):
        numbers = [layer.operation for layer in layers]
        made = delegate.inside(execution.inputs, [operators[number].result.name for number in numbers])
        return {number: [array] for number, array in zip(numbers, made, strict=True)}
    if isinstance(delegate, EthosUDelegate):
        return _pieces(delegate, execution, record, operators)
    return {}


def _pieces(
    delegate: EthosUDelegate, execution: Execution, record: Delegate, operators: Sequence[Operator]
) -> dict[int, list[Array]]:
    number = {operator.result.name: index for index, operator in enumerate(operators)}
    origins = Origins(record)
    written: dict[int, list[Array]] = {}
    for done in delegate.trace(execution.inputs):
        layer = origins.of(done.offset - delegate.header_bytes, indexed=done.indexed).estimate
        if layer is None or not done.integers.size or (done.command == "NPU_OP_DMA_START" and not done.indexed):
            continue
        index = number.get(layer.tensor)
        if index is not None:
            written.setdefault(index, []).append(done.integers)
    return {index: list(_joined(pieces)) for index, pieces in written.items()}


def _joined(pieces: Sequence[Array]) -> Iterator[Array]:
    if len(pieces) == 1:
        yield pieces[0]
        return
    for axis in range(3):
        others = [tuple(np.delete(piece.shape, axis)) for piece in pieces]
        if len(set(others)) == 1:
            yield np.concatenate(pieces, axis)


def in_order(candidates: Sequence[Array], expected: Array) -> Array | None:
    """The array as PyTorch has it, of ways to read it: the one that is nearest to what PyTorch computes.

    A layout of memory is chosen by the compiler and written down nowhere; a wrong one is far off. None if none fits.
    """
    best: tuple[float, Array] | None = None
    for candidate in candidates:
        for array in _layouts(candidate, expected.shape):
            distance = float(np.abs(array.astype(np.float64) - expected).sum()) if array.size else 0.0
            if best is None or distance < best[0]:
                best = distance, array
    return None if best is None else np.ascontiguousarray(best[1])


def _layouts(array: Array, shape: tuple[int, ...]) -> Iterator[Array]:
    """All ways in which the dimensions of an array can be those of ``shape``; else its elements as they come."""
    if array.size != np.prod(shape, dtype=np.int64):
        return
    wanted = [size for size in shape if size != 1]
    squeezed = array.reshape([size for size in array.shape if size != 1])
    fits = False
    for order in itertools.permutations(range(squeezed.ndim)):
        if [squeezed.shape[axis] for axis in order] == wanted:
            fits = True
            yield squeezed.transpose(order).reshape(shape)
    if not fits:
        yield array.reshape(shape)


def as_values(layer: Layer, candidates: Sequence[Array]) -> list[Array]:
    """The real numbers that integers stand for, where the layer's value is real."""
    if layer.scale is None or layer.zero_point is None:
        return list(candidates)
    scale, zero_point = np.float32(layer.scale), layer.zero_point
    return [(array.astype(np.int32) - zero_point).astype(np.float32) * scale for array in candidates]


@dataclass(frozen=True)
class Span:
    """Vela's estimate for an operation: when it begins and ends, in nanoseconds from the delegate's start on."""

    operation: int
    start: int
    end: int
    known: dict[str, Any]


def durations(record: Delegate, operators: Sequence[Operator]) -> dict[int, Span]:
    """Vela's estimates by operation, one after the other as they run; none for other targets."""
    if record.vela is None:
        return {}
    number = {operator.result.name: index for index, operator in enumerate(operators)}
    grouped: dict[int, list[Estimate]] = {}
    for layer in record.vela.layers:
        if layer.tensor in number:
            grouped.setdefault(number[layer.tensor], []).append(layer)
    found, start, clock = {}, 0, record.vela.core_clock
    for index, parts in grouped.items():
        known: dict[str, Any] = {"operator": parts[0].npu_operator, "tensor": parts[0].tensor}
        known |= {name: sum(getattr(part, name) for part in parts) for name in ("cycles", "npu_cycles", "macs")}
        end = start + known["cycles"]
        found[index] = Span(index, round(start / clock * 1e9), round(end / clock * 1e9), known)
        start = end
    return found
