"""``Program.trace``: what each operation of an Ethos-U command stream wrote, beside what it was compiled from."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arm_recipes.runtime.ethosu import EthosUDelegate, EthosUOperation
from arm_recipes.runtime.payloads import tosa_operators

if TYPE_CHECKING:
    import torch

    from arm_backend_core.events import Delegate
    from arm_recipes.runtime.plugin import Execution

#: Bytes of the header before the first command of a COP1 stream. Vela counts from there.
_COP1_HEADER = 32


@dataclass(frozen=True)
class TracedOperation:
    """An operation that has run, and what it wrote.

    Where the export's record is there (``ExportResult.trace``), it tells what the operation was compiled from. An
    operation that helps another one, as a DMA of its weights, has the names of that one.

    Attributes:
        delegate: position of the delegate among those that ran.
        command, offset: the operation of the NPU, and its byte in the command stream.
        operator: the TOSA operator, ``layer`` its tensor in Vela's report, ``source`` the line of the user's model;
            empty where not known. Vela joins operators: the names are those of the first one.
        region, address: where the result is; region -1 is the NPU itself, 8 its memory for tables.
        integers: the result as rows, columns and channels in the order that memory has; bytes for a DMA.
        scale, zero_point: for a result that is an output of the delegate and quantized; else None.
    """

    delegate: int
    command: str
    offset: int
    operator: str
    layer: str
    source: str
    region: int
    address: int
    integers: torch.Tensor
    scale: float | None
    zero_point: int | None

    @property
    def real(self) -> torch.Tensor | None:
        """The real numbers that ``integers`` stand for, where their scale is known."""
        if self.scale is None or self.zero_point is None:
            return None
        return (self.integers.double() - self.zero_point).float() * self.scale


def traced(number: int, execution: Execution, record: Delegate | None) -> Iterator[TracedOperation]:
    """Run a delegate again, one operation after the other; nothing for one that is not for an Ethos-U."""
    import torch

    delegate = execution.delegate
    if not isinstance(delegate, EthosUDelegate):
        return
    names = _Names(record if delegate.stream == "COP1" else None)
    for operation in delegate.trace(execution.inputs):
        operator, layer, source = names.of(operation.offset - _COP1_HEADER)
        scale, zero_point = _parameters(delegate, operation, record)
        yield TracedOperation(
            number,
            operation.command,
            operation.offset,
            operator,
            layer,
            source,
            operation.region,
            operation.address,
            torch.from_numpy(operation.integers),
            scale,
            zero_point,
        )


class _Names:
    """What commands come from: Vela tells with which command each of its layers ends."""

    def __init__(self, record: Delegate | None) -> None:
        self._ends: list[tuple[int, Any]] = []
        self._record = record
        if record is not None and record.vela is not None:
            ends = [(end, layer) for layer in record.vela.layers for end in layer.commands]
            self._ends = sorted(ends, key=lambda end: end[0])
            self._places = {place: number for number, place in enumerate(tosa_operators(memoryview(record.tosa)))}

    def of(self, offset: int) -> tuple[str, str, str]:
        """TOSA operator, layer and source line of the command at a byte from the first command on."""
        found = bisect.bisect_left(self._ends, offset, key=lambda end: end[0])
        if self._record is None or found == len(self._ends):
            return "", "", ""
        layer = self._ends[found][1]
        number = self._places.get(layer.index)
        if number is None:
            return layer.operator, layer.tensor, ""
        return self._record.tosa_operators[number], layer.tensor, self._record.sources[number]


def _parameters(
    delegate: EthosUDelegate, operation: EthosUOperation, record: Delegate | None
) -> tuple[float | None, int | None]:
    """Scale and zero point of the output that an operation wrote all of."""
    for tensor, io in zip(delegate.outputs, record.outputs if record is not None else (), strict=False):
        at = (tensor.region, tensor.offset, tensor.nbytes)
        if at == (operation.region, operation.address, operation.integers.nbytes):
            return io.scale, io.zero_point
    return None, None
