"""Integer softmax, normalization, reductions, rounding and elementary functions (exp, ln, sqrt, 1 / x).

Intermediates are int16 and int32. Every function appends TOSA 1.0 operators (PRO-INT, EXT-INT16) that all Ethos-U
families support. Costs in this package are Vela's estimates. On int8 or int16, an elementwise operator and the RESCALE
after it are one NPU operation; on int32 they are two. A RESCALE of an operand fuses into SUB and REDUCE_SUM; a CAST
does not. REDUCE_MAX along the last dimension costs four cycles an element, so ``ReductionView.max`` uses elementwise
maxima there.
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
