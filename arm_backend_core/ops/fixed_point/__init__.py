"""Integer softmax, normalization, reductions, rounding and elementary functions (exp, ln, sqrt, 1 / x).

Intermediates are int16 and int32. Every function appends TOSA 1.0 operators (PRO-INT, EXT-INT16) that all Ethos-U
families support. Cycles in the docstrings of this package are Vela's estimates. On int8 or int16, an elementwise
operator and the RESCALE after it are one NPU operation; on int32 they are two. Vela fuses a RESCALE, but not a CAST,
into the SUB or REDUCE_SUM that reads it. REDUCE_MAX along the last dimension takes four cycles an element, so
``ReductionView.max`` uses elementwise maxima there.
"""

from arm_backend_core.ops.fixed_point.elementary_functions import exponential, logarithm, reciprocal, rsqrt, sqrt
from arm_backend_core.ops.fixed_point.norms import group_norm, layer_norm
from arm_backend_core.ops.fixed_point.reductions import mean, reduce_max, std, sum_, var
from arm_backend_core.ops.fixed_point.softmax import log_softmax, softmax

__all__ = [
    "exponential",
    "group_norm",
    "layer_norm",
    "log_softmax",
    "logarithm",
    "mean",
    "reciprocal",
    "reduce_max",
    "rsqrt",
    "softmax",
    "sqrt",
    "std",
    "sum_",
    "var",
]
