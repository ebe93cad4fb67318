"""Debug information of Ethos-U command streams: the TOSA operator, layer and source line of each command.

The information comes from the export's record of the delegate (``DelegateRecord``). The record holds Vela's layers, and
for each layer the offsets of the commands that start its operations. The other commands set registers for the next
operation, so they have the origin of that operation.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arm_recipes.runtime.errors import RunError
from arm_recipes.runtime.tosa_flatbuffer import read_tosa_graph

if TYPE_CHECKING:
    from arm_backend_core.backends.vela_estimates import OperationEstimate
    from arm_backend_core.compilation_log import DelegateRecord
    from arm_backend_core.tosa.graph import Origin


@dataclass(frozen=True)
class CommandOrigin:
    """Origin of a command; fields are empty if unknown.

    If Vela fused several operators into one operation, the fields describe the operator that Vela reports for the
    operation.

    Attributes:
        operator: the TOSA operator; Vela's name of it if the record does not have the operator.
        layer: name of the layer in Vela's report, which is the name of the layer's output tensor.
        module: submodule of the user's model, as in ``named_modules()``.
        source: source line of the user's model.
        estimate: Vela's cost estimate of the layer.
    """

    operator: str = ""
    layer: str = ""
    module: str = ""
    source: str = ""
    estimate: OperationEstimate | None = None

    def __str__(self) -> str:
        return ", ".join(filter(None, (f"layer {self.module}" if self.module else self.layer, self.source)))


#: Names of the operators that Vela compiles to indexed DMAs. Vela reports no commands for these operators. Their DMAs
#: precede the commands of the next layer.
_INDEXED_DMA_OPERATORS = ("Gather", "Scatter")


class CommandOrigins:
    """Finds the origin of each command of a delegate.

    Args:
        record: the export's record of the delegate. If it is None or of another backend, all origins are empty.
    """

    def __init__(self, record: DelegateRecord | None) -> None:
        layers = record.vela.layers if record is not None and record.vela is not None else ()
        operators = read_tosa_graph(memoryview(record.tosa)).operators if record is not None and layers else ()
        indices = [operator.index for operator in operators]
        layer_origins = [_layer_origin(record, layer, indices) for layer in layers if record is not None]
        starts = [
            (offset, origin) for layer, origin in zip(layers, layer_origins, strict=True) for offset in layer.commands
        ]
        #: (offset of the command that starts an operation, origin of the operation), sorted by offset.
        self._operation_starts = sorted(starts, key=lambda start: start[0])
        #: {offset of a layer's first operation: origin of the indexed DMAs just before it}. All these DMAs get the
        #: origin of the first one. DMAs after the last layer have the key None.
        self._indexed_dma_origins: dict[int | None, CommandOrigin] = {}
        pending: CommandOrigin | None = None
        for layer, origin in zip(layers, layer_origins, strict=True):
            if not layer.commands and layer.npu_operator in _INDEXED_DMA_OPERATORS:
                pending = pending or origin
            elif layer.commands and pending is not None:
                self._indexed_dma_origins[min(layer.commands)], pending = pending, None
        if pending is not None:
            self._indexed_dma_origins[None] = pending

    def find(self, offset: int, *, indexed: bool = False) -> CommandOrigin:
        """Find the origin of a command.

        Args:
            offset: byte offset of the command from the first command of the stream.
            indexed: whether the command is an indexed DMA.
        """
        starts = self._operation_starts
        position = bisect.bisect_left(starts, offset, key=lambda start: start[0])
        start, origin = starts[position] if position < len(starts) else (None, CommandOrigin())
        return self._indexed_dma_origins.get(start, origin) if indexed else origin


def main_origin(record: DelegateRecord, number: int) -> Origin:
    """The origin with the largest share of a TOSA operator's work; ``number`` is its index in ``tosa_operators``."""
    return max(record.origins[number], key=lambda each: each[1])[0]


def _layer_origin(record: DelegateRecord, layer: OperationEstimate, indices: Sequence[int]) -> CommandOrigin:
    """Origin of a layer; ``indices`` are Vela's indices of the operators in the record's TOSA graph."""
    if layer.index not in indices:
        return CommandOrigin(layer.operator, layer.tensor, estimate=layer)
    number = indices.index(layer.index)
    origin = main_origin(record, number)
    return CommandOrigin(record.tosa_operators[number], layer.tensor, origin.module, origin.source, layer)


def describe_with_origin(error: RunError, records: Mapping[bytes, DelegateRecord]) -> str:
    """Return the message of an error, and append the layer and source line of the failed command if they are known.

    Args:
        records: the export's records of delegates, by payload checksum.
    """
    command = error.command
    if command is None:
        return str(error)
    origin = str(CommandOrigins(records.get(command.checksum)).find(command.offset, indexed=command.indexed))
    return f"{error} ({origin})" if origin else str(error)
