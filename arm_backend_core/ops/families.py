"""Importing this module registers every operator family."""

from arm_backend_core.ops import (  # noqa: F401
    convolution,
    elementwise,
    indexing,
    linear,
    movement,
    normalization,
    pooling,
    reduction,
    unary,
)
