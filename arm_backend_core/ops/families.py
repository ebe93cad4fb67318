"""Importing this module registers every operator family."""

from arm_backend_core.ops import (  # noqa: F401
    block_scaled,
    casting,
    convolution,
    division,
    elementwise,
    indexing,
    linear,
    logical,
    loops,
    movement,
    normalization,
    pooling,
    recurrent,
    reduction,
    resize,
    topk,
    unary,
)
from arm_backend_core.ops.composites import algebra, arithmetic, attention, fake_quantize, order, products  # noqa: F401
from arm_backend_core.ops.composites import block_scaled as blocks  # noqa: F401
from arm_backend_core.ops.composites import movement as moved  # noqa: F401
from arm_backend_core.ops.composites import resize as resized  # noqa: F401
from arm_backend_core.ops.composites import spectra as spectral  # noqa: F401
from arm_backend_core.ops.composites import windows as windowed  # noqa: F401
