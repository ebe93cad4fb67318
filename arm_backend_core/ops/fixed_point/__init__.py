"""Softmax, normalization and reductions in integers, with int16 and int32 intermediates.

Every function appends TOSA 1.0 operators (PRO-INT, EXT-INT16) that all Ethos-U families have. The notes on
cost come from Vela's estimates: an elementwise pass over int8 or int16 operands that ends in a RESCALE is one
operation, over int32 it is two; a RESCALE of an operand merges into SUB and REDUCE_SUM where a CAST does not;
REDUCE_MAX along the last dimension costs four cycles an element, so ``Rows.max`` goes another way.
"""

from arm_backend_core.ops.fixed_point.elementary_functions import exponential, logarithm, reciprocal, rsqrt, sqrt
from arm_backend_core.ops.fixed_point.norms import group_norm, layer_norm
from arm_backend_core.ops.fixed_point.reductions import maximum, mean, std, sum_, var
from arm_backend_core.ops.fixed_point.softmax import log_softmax, softmax

__all__ = [
    "exponential",
    "group_norm",
    "layer_norm",
    "log_softmax",
    "logarithm",
    "maximum",
    "mean",
    "reciprocal",
    "rsqrt",
    "softmax",
    "sqrt",
    "std",
    "sum_",
    "var",
]
