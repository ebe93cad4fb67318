"""TILEs that broadcast become products with ones, which U85 computes in fewer cycles.

Vela copies the operand of a TILE once for each repetition. A product with a tensor of ones broadcasts both operands:
[1, 1, 128] to [1, 100, 128] takes 3,200 instead of 25,200 cycles (int8) or 73,600 cycles (int16) on U85-256, with Vela
5.2. On U55, the product saves nothing, because Vela splits it into rows and reads the ones from flash.
"""

from __future__ import annotations

from arm_backend_core.alternatives.choose import Alternative, Region, collect_neighbors
from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.passes.rewrite import Rewriter
from arm_backend_core.tosa.vela_workarounds.copies import emit_copy

_DTYPES = (DType.INT8, DType.INT16, DType.INT32)


def multiply_by_ones(op: Op, rewriter: Rewriter) -> Value:
    """Multiply the operand of a TILE by ones in the shape of ``multiples``. Bit-exact: x * 1 is x."""
    return emit_copy(op.inputs[0], rewriter.builder, op.attrs["multiples"])


def _match_tile(op: Op, rewriter: Rewriter) -> Region | None:
    """Match the TILE with the operators that may write its operand, and with a CONCAT that it may write into."""
    x, hardware = op.inputs[0], rewriter.builder.target.hardware
    is_broadcast = all(1 in pair for pair in zip(x.shape, op.attrs["multiples"], strict=True))
    if x.dtype not in _DTYPES or not is_broadcast or not hardware.broadcasts_both_operands:
        return None
    return Region(collect_neighbors(op, rewriter, ("RESCALE",), ("CONCAT", "RESHAPE")), ((op,),))


BROADCAST_TILES = Alternative("broadcasts by products", ("TILE",), multiply_by_ones, _match_tile)
