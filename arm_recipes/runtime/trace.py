"""``Program.trace``: what each operation of an Ethos-U command stream wrote, beside what it was compiled from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arm_recipes.runtime.ethosu import EthosUDelegate, EthosUOperation
from arm_recipes.runtime.ethosu_origins import Origins

if TYPE_CHECKING:
    import torch

    from arm_backend_core.events import Delegate
    from arm_recipes.runtime.plugin import Execution


@dataclass(frozen=True)
class TracedOperation:
    """An operation that has run, and what it wrote.

    Where the export's record is there (``ExportResult.trace``), it tells what the operation was compiled from. An
    operation that helps another one, as a DMA of its weights, has the names of that one.

    Attributes:
        delegate: position of the delegate among those that ran.
        command, offset: the operation of the NPU, and its byte in the command stream.
        operator, layer, module, source: see ``Origin``.
        region, address: where the result is; region -1 is the NPU itself, 8 its memory for tables.
        integers: the result as rows, columns and channels in the order that memory has; bytes for a DMA.
        scale, zero_point: for a result that is an output of the delegate and quantized; else None.
    """

    delegate: int
    command: str
    offset: int
    operator: str
    layer: str
    module: str
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


def trace_delegate(number: int, execution: Execution, record: Delegate | None) -> Iterator[TracedOperation]:
    """Run a delegate again, one operation after the other; nothing for one that is not for an Ethos-U."""
    import torch

    delegate = execution.delegate
    if not isinstance(delegate, EthosUDelegate):
        return
    origins = Origins(record)
    for operation in delegate.trace(execution.inputs):
        origin = origins.find(operation.offset - delegate.header_bytes, indexed=operation.indexed)
        scale, zero_point = _output_quantization(delegate, operation, record)
        yield TracedOperation(
            number,
            operation.command,
            operation.offset,
            origin.operator,
            origin.layer,
            origin.module,
            origin.source,
            operation.region,
            operation.address,
            torch.from_numpy(operation.integers),
            scale,
            zero_point,
        )


def _output_quantization(
    delegate: EthosUDelegate, operation: EthosUOperation, record: Delegate | None
) -> tuple[float | None, int | None]:
    """Scale and zero point of the output that an operation wrote all of."""
    for tensor, io in zip(delegate.outputs, record.outputs if record is not None else (), strict=False):
        at = (tensor.region, tensor.offset, tensor.nbytes)
        if at == (operation.region, operation.address, operation.integers.nbytes):
            return io.scale, io.zero_point
    return None, None
