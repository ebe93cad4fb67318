"""What a program's delegates compute inside: their TOSA graphs once more, with the layers' results as outputs too.

Passes keep every bit of an integer result, whatever leaves the graph, and ``verify`` shows that what Vela compiles
gives the graph's numbers. Read in the order that PyTorch has for them, the results need no other record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from arm_backend_core import events
from arm_backend_core.delegate import prepared
from arm_backend_core.insert_delegates import Part
from arm_backend_core.nodes import is_dequantize, is_float, is_quantize, operator_name
from arm_backend_core.ops.operands import Tensor as Lowered
from arm_backend_core.permutation import Layout, inverse
from arm_backend_core.program import copied
from arm_backend_core.quantization.diagnostics.error_metrics import Grid
from arm_backend_core.selection import Selection, select
from arm_backend_core.tosa import passes, reference
from arm_backend_core.tosa.serialize import serialize
from arm_recipes._internal.executorch_programs import simplify_call

if TYPE_CHECKING:
    from arm_backend_core.partitioner import _ArmPartitioner
    from arm_recipes.runtime.plugin import Execution

    Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class DelegateTaps:
    """A delegate that can be run with its insides.

    Attributes:
        checksum, name: of the delegate; several may have one checksum.
        flatbuffer: its TOSA graph with more outputs.
        original_outputs: how many it had before.
        tapped_outputs: of the nodes whose values the others are, and of some of the first ones; None for those not asked for.
        tapped_inputs: of each input that is asked for the name, and how its dimensions lie in memory.
        input_types: element type and shape of each input, as the graph has it.
    """

    checksum: bytes
    name: str
    flatbuffer: bytes
    original_outputs: int
    tapped_outputs: tuple[str | None, ...]
    tapped_inputs: tuple[tuple[str, Layout] | None, ...]
    input_types: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def tapped_nodes(self) -> frozenset[str]:
        """Nodes whose values it tells."""
        entered = (entry[0] for entry in self.tapped_inputs if entry is not None)
        return frozenset(name for name in (*self.tapped_outputs, *entered) if name is not None)

    def read(self, execution: Execution, grids: Mapping[str, Grid]) -> tuple[dict[str, Tensor], bool]:
        """The values of one execution as real numbers, and whether the delegate's own results were the same."""
        given = [_as(array, *kind) for array, kind in zip(execution.inputs, self.input_types, strict=True)]
        results = reference.run(self.flatbuffer, given)
        equal = all(
            made.tobytes() == np.ascontiguousarray(array).tobytes()
            for made, array in zip(results[: self.original_outputs], execution.outputs, strict=True)
            if made.dtype.kind != "f"  # Vulkan's real numbers may differ in the last bit
        )
        found = {}
        for entry, array in zip(self.tapped_inputs, given, strict=True):
            if entry is not None:
                name, order = entry
                found[name] = _real(torch.from_numpy(array.copy()).permute(inverse(order)), grids.get(name))
        for asked, array in zip(self.tapped_outputs, results, strict=True):
            if asked is not None:
                found[asked] = _real(torch.from_numpy(np.array(array)), grids.get(asked))
        return found, equal


def tap_delegates(
    program: ExportedProgram,
    partitioner: _ArmPartitioner,
    records: Sequence[events.Delegate],
    wanted: Iterable[str],
) -> tuple[list[DelegateTaps], list[str]]:
    """Lower a program once more, and let the results that are ``wanted`` leave its delegates.

    Args:
        program: what was lowered; it is left as it is.
        partitioner: what delegated it.
        records: the delegates that came of it.

    Returns:
        a ``DelegateTaps`` for each delegate in the order of the records, and why one has none.
    """
    program, names = copied(program), frozenset(wanted)
    simplify_call(program)
    spec = partitioner.compile_spec
    with events.record():
        selection = select(prepared(program, spec.target), spec.target, partitioner.keep_on_cpu)
        parts = {part.name: part for part in selection.parts()}
        extended = {name: _extended(part, selection, names) for name, part in parts.items()}
        graphs = dict(zip(extended, selection.graphs(extended.values()), strict=True))
    found, notes = [], []
    for record in records:
        part = extended.get(record.name)
        if part is None or tuple(operator_name(node) for node in part.nodes) != record.operators:
            notes.append(f"layers of '{record.name}' are PyTorch's: it is lowered otherwise when it is alone")
            continue
        graph = graphs[record.name]
        try:
            with events.record():
                passes.run(graph, spec.target)
            flatbuffer = serialize(graph)
        except Exception as error:  # a fault of ours: the figures of the outputs are right without it
            notes.append(f"layers of '{record.name}' are PyTorch's: {type(error).__name__}: {error}")
            continue
        entries = tuple(
            (node.name, selection.walk.entry(node)[1]) if node.name in names else None for node in part.inputs
        )
        results = tuple(node.name if node.name in names else None for node in part.outputs)
        kinds = tuple((value.dtype.value, value.shape) for value in graph.inputs)
        made = len(parts[record.name].outputs)
        found.append(DelegateTaps(record.checksum, record.name, flatbuffer, made, results, entries, kinds))
    return found, notes


def _extended(part: Part, selection: Selection, names: frozenset[str]) -> Part:
    """The part with what is wanted of its results as outputs, behind those that it has."""
    more = [node for node in part.nodes if node.name in names and node not in part.outputs]
    return replace(part, outputs=[*part.outputs, *(node for node in more if _can_leave(node, selection))])


def _can_leave(node: Node, selection: Selection) -> bool:
    """Whether a node's result is a tensor of the graph: integers that it is quantized to, or real numbers."""
    result = selection.walk.results.get(node)
    if not isinstance(result, Lowered) or result.value.data is not None or selection.walk.is_internal(node):
        return False
    return is_quantize(node) or (is_float(node) and not is_dequantize(node) and result.value.dtype.is_float)


def _as(array: Array, dtype: str, shape: tuple[int, ...]) -> Array:
    """What a delegate was given; one for an Ethos-U is given bytes."""
    is_bytes = array.dtype == np.uint8 and (dtype != "uint8" or array.shape != shape)
    return array.view(dtype).reshape(shape) if is_bytes else array


def _real(values: Tensor, grid: Grid | None) -> Tensor:
    """The real numbers that integers stand for, as a dequantize operator gives them."""
    return values if grid is None else (values.float() - grid.zero_point) * grid.scale


def match_executions(
    executions: Iterable[Execution], taps: Sequence[DelegateTaps]
) -> Iterator[tuple[Execution, DelegateTaps]]:
    """Executions of one run of a method with their taps; those of delegates without any are left out."""
    waiting: dict[bytes, list[DelegateTaps]] = {}
    for tap in taps:
        waiting.setdefault(tap.checksum, []).append(tap)
    for execution in executions:
        left = waiting.get(execution.checksum or b"")
        if left:
            yield execution, left.pop(0)
