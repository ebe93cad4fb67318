"""Work of the operators that ExecuTorch's portable kernels compute on the CPU. These estimates are rough."""

from __future__ import annotations

import math
from collections.abc import Sequence

from arm_backend_core.cortex_m.cost import instructions as per
from arm_backend_core.cortex_m.cost.processors import PerCodeVariant, code_variant_of, has_fpu
from arm_backend_core.cortex_m.cost.work import Work
from arm_backend_core.cortex_m.kernels.registry import Shape
from arm_backend_core.targets.cortex_m import Processor

#: Operators that read and write no elements: ExecuTorch's memory planning removes the copy of ``view_copy`` and others.
_VIEWS = ("view_copy", "squeeze_copy", "unsqueeze_copy", "alias_copy", "getitem", "alloc")
#: Operators that copy runs of elements.
_COPIES = ("cat", "slice_copy", "clone", "split_with_sizes_copy", "select_copy", "_clone_dim_order", "stack", "full")
#: Operators that copy each element by itself, not in runs.
_MOVES = (
    "permute_copy",
    "transpose_copy",
    "expand_copy",
    "index",
    "index_select",
    "gather",
    "flip",
    "repeat",
    "t_copy",
)
#: {operator that sums products: index of the operand with the weights, or of the second factor}.
_PRODUCTS = {"convolution": 1, "linear": 1, "mm": 1, "bmm": 1, "addmm": 2}
#: Operators that compute a function of each element.
_FUNCTIONS = ("exp", "log", "sigmoid", "tanh", "gelu", "erf", "sin", "cos", "pow", "sqrt", "rsqrt", "_softmax", "elu")


def operator_work(name: str, processor: Processor, result: Shape, operands: Sequence[Shape]) -> Work:
    """The work of an operator with a portable kernel.

    Args:
        name: name of the operator without namespace and overload, for example ``permute_copy``.
        processor: the processor.
        result: shape of the (first) result.
        operands: shapes of the tensors that it reads.
    """
    elements = max(map(math.prod, (result, *operands)))
    written = math.prod(result)
    if name in _VIEWS:
        return Work(0, 0)
    if name in _COPIES:
        return Work(0, per.CALL + written * per.COPY.of(code_variant_of(processor)))
    if name in _MOVES:
        return Work(0, per.CALL + written * per.PORTABLE_MOVE)
    if name in _PRODUCTS and len(operands) > _PRODUCTS[name]:
        macs = written * _depth(name, operands[_PRODUCTS[name]])
        of_product = _choose(processor, per.FLOAT_PRODUCT_WITH_FPU, per.FLOAT_PRODUCT_WITHOUT_FPU)
        return Work(macs, per.CALL + macs * of_product)
    if name in _FUNCTIONS:
        return Work(0, per.CALL + elements * _choose(processor, per.FUNCTION_WITH_FPU, per.FUNCTION_WITHOUT_FPU))
    return Work(0, per.CALL + elements * _choose(processor, per.FLOAT_WITH_FPU, per.FLOAT_WITHOUT_FPU))


def _depth(name: str, weights: Shape) -> int:
    """Number of products per element of the result.

    For a convolution or a linear layer with weights [O, ...], this is the number of weights of one output channel. For
    a matrix product with second factor [..., I, O], this is I.
    """
    return math.prod(weights[1:]) if name in ("convolution", "linear") else weights[-2]


def _choose(processor: Processor, with_fpu: float, without_fpu: PerCodeVariant) -> float:
    return with_fpu if has_fpu(processor) else without_fpu.of(code_variant_of(processor))
