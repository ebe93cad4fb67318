"""Intermediate outputs of delegates: lower the program again with layer results as additional TOSA graph outputs.

Additional graph outputs do not change integer results, because TOSA passes are bit-exact. ``verify`` shows that Vela's
code matches the TOSA graph. Outputs are matched to nodes by position: the delegate's own outputs come first, then the
additional outputs in the order of the captured program.
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

from arm_backend_core import compilation_log
from arm_backend_core.delegate import prepare_program
from arm_backend_core.insert_delegates import Partition
from arm_backend_core.nodes import is_dequantize, is_float, is_quantize, operator_name
from arm_backend_core.ops.operands import Operand
from arm_backend_core.permutation import Layout, inverse
from arm_backend_core.program import copy_program
from arm_backend_core.quantization.diagnostics.error_metrics import TensorQParams
from arm_backend_core.selection import Selection, select_operators
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.passes import pipeline
from arm_backend_core.tosa.serialize import serialize
from arm_recipes._internal.executorch_programs import normalize_call_signature

if TYPE_CHECKING:
    from arm_backend_core.partitioner import ArmPartitioner
    from arm_recipes.runtime.host_backends import DelegateExecution

    Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class InstrumentedDelegate:
    """A delegate's TOSA graph with intermediate values as additional outputs.

    Attributes:
        checksum, name: checksum and name of the delegate. Several delegates may share a checksum.
        flatbuffer: TOSA graph with the additional outputs.
        original_output_count: number of outputs of the delegate itself, which come first.
        output_nodes: for each output, the name of its node; None for outputs that were not requested.
        input_nodes: for each input, node name and memory layout; None for inputs that were not requested.
        input_types: element type and shape of each graph input.
    """

    checksum: bytes
    name: str
    flatbuffer: bytes
    original_output_count: int
    output_nodes: tuple[str | None, ...]
    input_nodes: tuple[tuple[str, Layout] | None, ...]
    input_types: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def provided_nodes(self) -> frozenset[str]:
        """Names of the nodes whose values the graph provides."""
        entered = (entry[0] for entry in self.input_nodes if entry is not None)
        return frozenset(name for name in (*self.output_nodes, *entered) if name is not None)

    def compute_values(
        self, execution: DelegateExecution, qparams_by_node: Mapping[str, TensorQParams]
    ) -> tuple[dict[str, Tensor], bool]:
        """Compute the dequantized values of the requested nodes in one execution: ``{node name: value}``.

        The second result is whether the integer outputs of the delegate in this execution equal the outputs of its TOSA
        graph.
        """
        inputs = [_view_input(array, *kind) for array, kind in zip(execution.inputs, self.input_types, strict=True)]
        results = reference_model.run(self.flatbuffer, inputs)
        is_equal = all(
            result.tobytes() == np.ascontiguousarray(array).tobytes()
            for result, array in zip(results[: self.original_output_count], execution.outputs, strict=True)
            if result.dtype.kind != "f"  # Vulkan's floating-point results may differ in the last bit
        )
        values = {}
        for entry, array in zip(self.input_nodes, inputs, strict=True):
            if entry is not None:
                name, order = entry
                values[name] = _dequantize(
                    torch.from_numpy(array.copy()).permute(inverse(order)), qparams_by_node.get(name)
                )
        for node, array in zip(self.output_nodes, results, strict=True):
            if node is not None:
                values[node] = _dequantize(torch.from_numpy(np.array(array)), qparams_by_node.get(node))
        return values, is_equal


def instrument_delegates(
    program: ExportedProgram,
    partitioner: ArmPartitioner,
    records: Sequence[compilation_log.DelegateRecord],
    wanted_nodes: Iterable[str],
) -> tuple[list[InstrumentedDelegate], list[str]]:
    """Lower a program again with the results of ``wanted_nodes`` as additional outputs of its delegates.

    Args:
        program: the program that was lowered. It is not modified.
        partitioner: the partitioner that delegated it.
        records: the compiler's records of the delegates that the first lowering created.
        wanted_nodes: names of the nodes whose results are requested.

    Returns:
        The instrumented delegates in the order of ``records``, and a note for each delegate that is not among them.
    """
    program, wanted_names = copy_program(program), frozenset(wanted_nodes)
    normalize_call_signature(program)
    spec = partitioner.compile_spec
    with compilation_log.open_log():
        selection = select_operators(prepare_program(program, spec.target), spec.target, partitioner.keep_on_cpu)
        parts = {part.name: part for part in selection.partitions()}
        extended_parts = {name: _add_outputs(part, selection, wanted_names) for name, part in parts.items()}
        graphs = dict(zip(extended_parts, selection.graphs(extended_parts.values()), strict=True))
    instrumented, notes = [], []
    for record in records:
        extended = extended_parts.get(record.name)
        if extended is None or tuple(operator_name(node) for node in extended.nodes) != record.operators:
            notes.append(f"PyTorch computes the layers of '{record.name}': lowering again gave a different delegate")
            continue
        graph = graphs[record.name]
        try:
            with compilation_log.open_log():
                pipeline.run(graph, spec.target)
            flatbuffer = serialize(graph)
        except Exception as error:  # the comparison of outputs works without the layers
            notes.append(f"PyTorch computes the layers of '{record.name}': {type(error).__name__}: {error}")
            continue
        input_nodes = tuple(
            (node.name, selection.lowering.boundary_value(node)[1]) if node.name in wanted_names else None
            for node in extended.inputs
        )
        output_nodes = tuple(node.name if node.name in wanted_names else None for node in extended.outputs)
        input_types = tuple((value.dtype.value, value.shape) for value in graph.inputs)
        original_output_count = len(parts[record.name].outputs)
        instrumented.append(
            InstrumentedDelegate(
                record.checksum, record.name, flatbuffer, original_output_count, output_nodes, input_nodes, input_types
            )
        )
    return instrumented, notes


def _add_outputs(part: Partition, selection: Selection, wanted_names: frozenset[str]) -> Partition:
    """Return the partition with the requested results as additional outputs."""
    additional = [node for node in part.nodes if node.name in wanted_names and node not in part.outputs]
    return replace(part, outputs=[*part.outputs, *(node for node in additional if _can_be_output(node, selection))])


def _can_be_output(node: Node, selection: Selection) -> bool:
    """Whether a node's result is a computed tensor of the TOSA graph: quantized integers or floating-point values."""
    result = selection.lowering.results.get(node)
    if not isinstance(result, Operand) or result.value.data is not None or selection.lowering.is_internal(node):
        return False
    return is_quantize(node) or (is_float(node) and not is_dequantize(node) and result.value.dtype.is_float)


def _view_input(array: Array, dtype: str, shape: tuple[int, ...]) -> Array:
    """View a delegate's input with the dtype and shape of the graph's input. Ethos-U delegates receive raw bytes."""
    is_bytes = array.dtype == np.uint8 and (dtype != "uint8" or array.shape != shape)
    return array.view(dtype).reshape(shape) if is_bytes else array


def _dequantize(values: Tensor, qparams: TensorQParams | None) -> Tensor:
    """Dequantize integers exactly as a dequantize operator does. Other values are returned unchanged."""
    return values if qparams is None else (values.float() - qparams.zero_point) * qparams.scale


def match_executions(
    executions: Iterable[DelegateExecution], delegates: Sequence[InstrumentedDelegate]
) -> Iterator[tuple[DelegateExecution, InstrumentedDelegate]]:
    """Pair the delegate executions of one run with ``delegates``. Skips executions of all other delegates."""
    delegates_by_checksum: dict[bytes, list[InstrumentedDelegate]] = {}
    for delegate in delegates:
        delegates_by_checksum.setdefault(delegate.checksum, []).append(delegate)
    for execution in executions:
        remaining = delegates_by_checksum.get(execution.checksum or b"")
        if remaining:
            yield execution, remaining.pop(0)
