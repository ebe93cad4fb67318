"""``Program.trace``: result and origin (layer, source line) of each operation of an Ethos-U command stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arm_recipes.runtime.command_origins import CommandOrigins
from arm_recipes.runtime.ethosu import EthosUDelegate, EthosUOperation

if TYPE_CHECKING:
    import torch

    from arm_backend_core.compilation_log import DelegateRecord
    from arm_recipes.runtime.host_backends import DelegateExecution


@dataclass(frozen=True)
class TracedOperation:
    """An executed NPU operation, with its result.

    The fields ``operator``, ``layer``, ``module``, ``source``, ``scale`` and ``zero_point`` come from the record of the
    export. ``ExportResult.trace`` has this record; for a program from ``load``, the fields are empty or None. An
    auxiliary operation, such as the DMA of a layer's weights, has the names of the layer that it serves.

    Attributes:
        delegate_index: index of the delegate's execution among all delegate executions of the run.
        command: operation of the NPU, for example ``NPU_OP_CONV``.
        offset: byte offset of the command from the start of the stream's header.
        operator, layer, module, source: see ``CommandOrigin``.
        region, address: location of the result. Region -1 is the NPU itself; region 8 is its memory for lookup tables.
        integers: the result in memory order, with shape (rows, columns, channels); for a DMA, the bytes.
        scale, zero_point: quantization parameters if the result is a quantized output of the delegate, else None.
    """

    delegate_index: int
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
    def dequantized(self) -> torch.Tensor | None:
        """The dequantized result, if its scale is known, else None."""
        if self.scale is None or self.zero_point is None:
            return None
        return (self.integers.double() - self.zero_point).float() * self.scale


def trace_delegate(
    delegate_index: int, execution: DelegateExecution, record: DelegateRecord | None
) -> Iterator[TracedOperation]:
    """Execute a delegate again, and yield its operations. Yields nothing for targets other than Ethos-U."""
    import torch

    delegate = execution.delegate
    if not isinstance(delegate, EthosUDelegate):
        return
    origins = CommandOrigins(record)
    for operation in delegate.trace(execution.inputs):
        origin = origins.find(operation.offset - delegate.header_bytes, indexed=operation.indexed)
        scale, zero_point = _output_quantization(delegate, operation, record)
        yield TracedOperation(
            delegate_index,
            operation.command,
            operation.offset,
            origin.operator,
            origin.layer,
            origin.module,
            origin.source,
            operation.region,
            operation.address,
            torch.from_numpy(operation.result),
            scale,
            zero_point,
        )


def _output_quantization(
    delegate: EthosUDelegate, operation: EthosUOperation, record: DelegateRecord | None
) -> tuple[float | None, int | None]:
    """Scale and zero point of the delegate output that an operation wrote completely, or (None, None)."""
    for tensor, io in zip(delegate.outputs, record.outputs if record is not None else (), strict=False):
        location = (tensor.region, tensor.offset, tensor.nbytes)
        if location == (operation.region, operation.address, operation.result.nbytes):
            return io.scale, io.zero_point
    return None, None
