"""Records of operators on block-scaled floating point (MX formats, "mxfp").

Elements have 4 to 8 bits, and 32 neighbouring channels share a power-of-two scale. Source: the draft of TOSA 1.1 in
tosa-tools 2026.5. In a later draft, CONV2D and CAST support these types and replace the operators of this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from arm_backend_core.tosa.graph import Op
from arm_backend_core.tosa.operators.record import RANK_AT_LEAST_1, broadcast_shape, define_operator
from arm_backend_core.tosa.operators.windows import conv_shape, window_violations

#: Number of elements that share a scale.
BLOCK_SIZE = 32
_ELEMENT_TYPES = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")


def _block_violations(op: Op) -> Iterator[str]:
    """Yield violations of the block size."""
    if op.inputs[0].shape[-1] % BLOCK_SIZE:
        yield f"{op.inputs[0].shape[-1]} channels ({BLOCK_SIZE} or a multiple); pad with 0"
    if op.attrs.get("block_size", BLOCK_SIZE) != BLOCK_SIZE:
        yield f"block size {op.attrs['block_size']} (must be {BLOCK_SIZE})"


def _conv_violations(op: Op) -> Iterator[str]:
    """Yield violations of shapes and windows. The last three operands are weight, scales and bias."""
    x, weight, scales, bias = op.inputs[0], *op.inputs[-3:]
    yield from _block_violations(op)
    if weight.shape[-1] != x.shape[-1] or scales.shape != (*weight.shape[:3], x.shape[-1] // BLOCK_SIZE):
        yield (
            f"weights {weight!r} and scales {scales!r} that do not match the input {x!r}: expected {x.shape[-1]} input "
            f"channels and scales [O, KH, KW, {x.shape[-1] // BLOCK_SIZE}]"
        )
    if bias.shape[0] not in (1, weight.shape[0]):
        yield f"a bias of {bias.shape[0]} for {weight.shape[0]} channels"
    yield from window_violations(op)


_CONV_FIELDS: dict[str, Any] = {
    "constant_operands": (("pad", "shape"), ("stride", "shape"), ("dilation", "shape")),
    "find_violations": _conv_violations,
}
_RANK_4 = (4, 4)
define_operator(
    "CAST_TO_BLOCK_SCALED",
    " ".join(f"f32>{t}:mxfp@1.1 bf16>{t}:bf16&mxfp@1.1" for t in _ELEMENT_TYPES),
    [RANK_AT_LEAST_1],
    broadcast_shape,
    fields=("block_size",),
    find_violations=_block_violations,
)
define_operator(
    "CONV2D_BLOCK_SCALED",
    " ".join(f"{t},ue8m0,{t},ue8m0,f32>f32:mxfp@1.1" for t in _ELEMENT_TYPES),
    [*[_RANK_4] * 4, (1, 1)],
    conv_shape,
    fields=("block_size",),
    **_CONV_FIELDS,
)
#: MX_CONV2D is a placeholder. ``passes/block_scaled`` replaces it by CAST_TO_BLOCK_SCALED and CONV2D_BLOCK_SCALED.
define_operator(
    "MX_CONV2D",
    " ".join(f"f32,{t},ue8m0,f32>f32:mxfp@1.1" for t in _ELEMENT_TYPES),
    [*[_RANK_4] * 3, (1, 1)],
    conv_shape,
    is_placeholder=True,
    **_CONV_FIELDS,
)
