"""Packed channels: elementwise operators on few channels compute in a shape that fills bricks.

Between operations, Vela stores a tensor in bricks of 16 channels (NHCWB16), and pads channels to whole bricks:
[1, 4096, 2] takes 8 times its bytes, [1, 512, 16] has no padding. The RESHAPEs at the ends of a chain may cost cycles.
"""

from __future__ import annotations

from arm_backend_core.alternatives.choose import Alternative, Region
from arm_backend_core.alternatives.cost_model import Cost
from arm_backend_core.tosa.graph import Op, Value, prod
from arm_backend_core.tosa.operators import ELEMENTWISE
from arm_backend_core.tosa.passes.rewrite import Rewriter, skip_through

_BRICK = 16
#: Minimum number of bytes that a tensor takes in bricks. Smaller tensors are not packed.
_MIN_BYTES = 16 << 10
#: Minimum ratio of the bytes before packing to the bytes after it.
_MIN_GAIN = 1.5
#: Maximum width, and maximum number of channels, of the packed shape.
_MAX_WIDTH = 4096
#: Minimum number of operators in a chain. For a shorter chain, the RESHAPEs at its ends cost more than packing saves.
_MIN_OPERATORS = 4
_MOVEMENT = frozenset(
    ("CONCAT", "GATHER", "IDENTITY", "PAD", "RESHAPE", "REVERSE", "SCATTER", "SLICE", "TILE", "TRANSPOSE")
)


def pack_channels(op: Op, rewriter: Rewriter) -> Value:
    """Compute an elementwise operator in the packed shape.

    Bit-exact: each element of the result depends on the operands' elements of the same index, and RESHAPE keeps their
    order.
    hypot of [1, 4096, 2] on U55-128: 253,952 instead of 2,031,616 bytes of SRAM, 556,888 instead of 559,072 cycles.
    """
    b, shape = rewriter.builder, packed_shape(op.output.shape)
    inputs = [b.reshape(skip_through(x, "RESHAPE"), shape if x.size > 1 else (1,) * len(shape)) for x in op.inputs]
    return b.reshape(b.emit(op.kind, inputs, op.output.dtype, **op.attrs), op.output.shape)


def packed_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The shape [H, W, C] of the same size that takes the fewest bytes in bricks; among equals, the smallest C."""
    size = prod(shape)
    divisors = [d for d in range(1, min(size, _MAX_WIDTH) + 1) if size % d == 0]
    channels = min(divisors, key=lambda d: (_bytes_in_bricks((size // d, d)), d))
    width = max(d for d in divisors if size // channels % d == 0)
    return size // channels // width, width, channels


def _bytes_in_bricks(shape: tuple[int, ...]) -> int:
    """Return the bytes of an int8 tensor in bricks, with its channels padded to whole bricks."""
    return prod(shape[:-1]) * -(-shape[-1] // _BRICK) * _BRICK


def _match_chain(op: Op, rewriter: Rewriter) -> Region | None:
    """Match the elementwise operators of one shape that are connected with ``op``, and the adjacent data movement."""
    shape = op.output.shape
    before = _bytes_in_bricks(shape) if shape else 0
    # No shape takes fewer bytes than it has elements. This test excludes most operators before a shape is searched.
    if before < max(_MIN_BYTES, _MIN_GAIN * op.output.size):
        return None
    if before < _MIN_GAIN * _bytes_in_bricks(packed_shape(shape)):
        return None
    chain, movement = [op], set[Op]()
    for member in chain:  # the loop appends to ``chain``
        if not _is_packable(member, shape):
            return None
        readers = rewriter.users(member.output) or ()
        for other in (*(x.producer for x in member.inputs if x.producer), *readers):
            if other.kind in _MOVEMENT:
                movement.add(other)
            elif other not in chain:
                chain.append(other)
    return Region([*chain, *movement], (chain,)) if len(chain) >= _MIN_OPERATORS else None


def _is_packable(op: Op, shape: tuple[int, ...]) -> bool:
    """Whether ``op`` is elementwise on ``shape`` without per-channel scales; operands have this shape or one element.

    Any other operator, such as a convolution or a sum that broadcasts, excludes the whole chain. Otherwise, a RESHAPE
    could come between a RESCALE and the operator with which Vela fuses it. The RESHAPE would prevent this fusion. It
    would also hide the two operators from the workarounds of Vela's bugs, which match them together.
    """
    if op.kind not in ELEMENTWISE or op.attrs.get("per_channel") or op.output.shape != shape:
        return False
    return all(x.shape == shape or x.size == 1 for x in op.inputs)


def _cycles_times_sram_bytes(cost: Cost) -> float:
    """Cycles times bytes of SRAM: a tenth less SRAM is worth a tenth more cycles (0.9 * 1.1 < 1)."""
    return float(cost.cycles) * cost.sram_bytes


PACKED_CHANNELS = Alternative(
    "elementwise operators on packed channels",
    tuple(sorted(ELEMENTWISE)),
    pack_channels,
    _match_chain,
    _cycles_times_sram_bytes,
)
