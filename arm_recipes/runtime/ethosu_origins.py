"""What the commands of an Ethos-U command stream were compiled from, as the export's record tells."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arm_recipes.runtime.errors import RunError
from arm_recipes.runtime.tosa_graph import read_graph

if TYPE_CHECKING:
    from arm_backend_core.backends.payload import Layer
    from arm_backend_core.events import Delegate
    from arm_backend_core.tosa.graph import Origin as TosaOrigin


@dataclass(frozen=True)
class Origin:
    """What a command was compiled from; empty where not known. Vela joins operators: the names are of the first one.

    Attributes:
        operator: the TOSA operator.
        layer: its tensor in Vela's report.
        module: submodule of the user's model, as ``named_modules()`` has it.
        source: line of the user's model.
        estimate: what Vela expects of it.
    """

    operator: str = ""
    layer: str = ""
    module: str = ""
    source: str = ""
    estimate: Layer | None = None

    def __str__(self) -> str:
        return ", ".join(filter(None, (f"layer {self.module}" if self.module else self.layer, self.source)))


#: Vela's operations that are DMAs by indices. It tells of no command for them: theirs come before the next layer's.
_INDEXED = ("Gather", "Scatter")


class Origins:
    """Of all commands of a delegate: Vela tells with which command each of its layers ends.

    Args:
        record: what the export tells of the delegate; without it, or of another backend's, nothing is known.
    """

    def __init__(self, record: Delegate | None) -> None:
        layers = record.vela.layers if record is not None and record.vela is not None else ()
        operators = read_graph(memoryview(record.tosa)).operators if record is not None and layers else ()
        places = [operator.index for operator in operators]
        known = [_origin(record, layer, places) for layer in layers if record is not None]
        ends = [(end, origin) for layer, origin in zip(layers, known, strict=True) for end in layer.commands]
        self._ends = sorted(ends, key=lambda end: end[0])
        #: By the end of the layer that follows, the first one of those with indices.
        self._indexed: dict[int | None, Origin] = {}
        waiting: Origin | None = None
        for layer, origin in zip(layers, known, strict=True):
            if not layer.commands and layer.npu_operator in _INDEXED:
                waiting = waiting or origin
            elif layer.commands and waiting is not None:
                self._indexed[min(layer.commands)], waiting = waiting, None
        if waiting is not None:
            self._indexed[None] = waiting

    def find(self, offset: int, *, indexed: bool = False) -> Origin:
        """Of the command at a byte from the first command on; ``indexed``: it is a DMA by indices."""
        found = bisect.bisect_left(self._ends, offset, key=lambda end: end[0])
        end, origin = self._ends[found] if found < len(self._ends) else (None, Origin())
        return self._indexed.get(end, origin) if indexed else origin


def main_origin(record: Delegate, number: int) -> TosaOrigin:
    """Where most of the work of a TOSA operator comes from."""
    return max(record.origins[number], key=lambda each: each[1])[0]


def _origin(record: Delegate, layer: Layer, places: Sequence[int]) -> Origin:
    """``places``: of the operators of the record, as Vela counts them."""
    if layer.index not in places:
        return Origin(layer.operator, layer.tensor, estimate=layer)
    number = places.index(layer.index)
    origin = main_origin(record, number)
    return Origin(record.tosa_operators[number], layer.tensor, origin.module, origin.source, layer)


def describe_with_origin(error: RunError, records: Mapping[bytes, Delegate]) -> str:
    """What an error says, with layer and source line of the command that it is about.

    Args:
        records: what the export tells of delegates, by checksum.
    """
    command = error.command
    if command is None:
        return str(error)
    origin = str(Origins(records.get(command.checksum)).find(command.offset, indexed=command.indexed))
    return f"{error} ({origin})" if origin else str(error)
