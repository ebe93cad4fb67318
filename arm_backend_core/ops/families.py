"""Importing this module registers every operator family."""

from arm_backend_core.ops import (  # noqa: F401
    casting,
    composites,
    convolution,
    elementwise,
    indexing,
    linear,
    logical,
    movement,
    normalization,
    pooling,
    recurrent,
    reduction,
    resize,
    unary,
)
