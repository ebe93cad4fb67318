"""Operator registry: one record per ATen operator with its quantization annotation and lowering, or its decomposition.

Lowering, fusion, quantization, ATen rewrites, the comparison of layers and tests read these records. The lowering to
Cortex-M kernels has separate rules (``cortex_m.rules.context``). Some ATen rewrites and quantization algorithms have
their own lists of operators; ``docs/contributors/add_operator.md`` names these lists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload

from arm_backend_core.ops import intervals
from arm_backend_core.ops.intervals import IntervalRule

#: A lowering rule (see ``op``) or a decomposition (see ``decomposition``).
Rule = Callable[..., Any]


class AnnotationKind(Enum):
    """How an operator's tensors get quantization parameters."""

    CONV = "weight per channel, bias in the accumulator's scale"
    ELEMENTWISE = "every floating-point input and the result have parameters of their own"
    SHARED = "the result keeps the input's parameters"
    PASSTHROUGH = "nothing to annotate: integers, booleans, constants, block-scaled layers"


@dataclass(eq=False)
class Record:
    """An ATen operator that the compiler lowers: its lowering rules, quantization annotation and properties.

    Attributes:
        overloads: the ATen overloads that share this record.
        kind: how its tensors are annotated for quantization.
        lower: rule that lowers the operator on plain values (floating point, integers, booleans).
        lower_integer: rule that lowers it on quantized values; None if there is none.
        activation_operands: positions of the arguments that are quantized as activations; None for all tensors.
        weight: position of the weight (CONV only).
        bias: position of the bias (CONV only).
        weight_axis: function that returns the output-channel dimension of the weight of an FX node (CONV only).
        is_univariate: whether it is elementwise and fusion may merge it with its neighbours into one TABLE.
        is_discontinuous: whether the function has jumps and an integer rule. An int16 TABLE would interpolate across a
            jump, so int16 operands use this rule, which is exact.
        evaluate: function that computes the entries of a TABLE from a tensor of operand values; the ATen operator
            itself if None.
        clamp_bounds: for ReLU-like functions, the function that computes (low, high) from the operator's arguments. If
            the operator that computes its operand has ``absorbs_activation``, it is fused into the RESCALE of that
            operator.
        scale_factor: for a multiplication, the function that returns its positive constant factor, or None if it has
            none. A multiplication by such a constant is fused like a clamp.
        absorbs_activation: whether its integer rule ends in a RESCALE, into which users with ``clamp_bounds`` or
            ``scale_factor`` are fused.
        fixed_range: (low, high) of the result for any input, None if the range depends on the input.
        prefers_int16_input: whether its integer rule computes with more than 8 bits. In an INT8 program, an int16 input
            then improves accuracy.
        is_select: whether it selects between two operands. Both may be Python numbers, so the result can be quantized
            even if no operand is.
        is_cast: whether it only changes the element type.
        is_recurrent_gate: whether it is an activation function of the gates of LSTM and GRU layers. There, its int16
            result has the range [-1, 1]. An int16 operand that only gates read has the range [-16, 16], beyond which
            gates saturate.
        is_sinusoid: whether it is the sine or cosine of its operand.
        is_gather: whether it gathers elements of its first operand. The other operands are indices.
        is_average: whether it averages elements. With ``AnnotationKind.SHARED``, the averages are rounded to the shared
            scale.
        interval: rule that computes the interval of an integer result. If the operator has several results, the rule
            takes the ``getitem`` node of one result. None if the interval is unknown. The default for
            ``AnnotationKind.SHARED`` is ``intervals.data_movement``.
        error_bound: bound of the integer rule's error before the result is rounded, divided by the largest magnitude
            of operands and result. A bound of 2**-14 is an error of at most two int16 steps.
    """

    overloads: tuple[OpOverload, ...]
    kind: AnnotationKind
    lower: Rule
    lower_integer: Rule | None = None
    activation_operands: tuple[int, ...] | None = None
    weight: int = 1
    bias: int = 2
    weight_axis: Callable[[torch.fx.Node], int] = field(default=lambda node: 0)
    is_univariate: bool = False
    is_discontinuous: bool = False
    evaluate: Callable[..., torch.Tensor] | None = None
    clamp_bounds: Callable[..., tuple[float, float]] | None = None
    scale_factor: Callable[..., float | None] | None = None
    absorbs_activation: bool = False
    fixed_range: tuple[float, float] | None = None
    prefers_int16_input: bool = False
    is_select: bool = False
    is_cast: bool = False
    is_recurrent_gate: bool = False
    is_sinusoid: bool = False
    is_gather: bool = False
    is_average: bool = False
    interval: IntervalRule | None = None
    error_bound: float = 0.0

    def integer_rule(self, rule: Rule) -> Rule:
        """Decorator: ``rule`` lowers the operator on quantized values."""
        assert self.lower_integer is None, f"{self.overloads[0]} has an integer rule already"
        self.lower_integer = rule
        return rule


@dataclass(frozen=True)
class Composite:
    """An ATen operator that is decomposed into other ATen operators.

    Attributes:
        overloads: the ATen overloads that share this record.
        decompose: the decomposition, a function of tensors. PyTorch traces it with the arguments of the operator's
            schema. It returns None in place of a result that it does not compute, for example indices.
        takes_quantized: whether ``decompose`` takes the keyword ``quantized`` and decomposes differently in a program
            that will be quantized.
        emits_nodes: whether ``decompose`` takes FX nodes instead of tensors, and also takes a ``NodeEmitter``
            (``ops/recurrent``) as its first argument.
        reads_storage_offset: whether the result depends on the storage offset of operands, not only on shapes and
            strides.
        interval: as in ``Record``.
    """

    overloads: tuple[OpOverload, ...]
    decompose: Rule
    takes_quantized: bool = False
    emits_nodes: bool = False
    reads_storage_offset: bool = False
    interval: IntervalRule | None = None


_RECORDS: dict[OpOverload, Record | Composite] = {}
_CUSTOM_RECORDS: dict[OpOverload, Record | Composite] = {}  #: custom operators of this package
#: {"library::name": decomposition}, for operators of libraries that are possibly not loaded: they have no overload yet.
_DECOMPOSITIONS_BY_NAME: dict[str, Composite] = {}
Entry = TypeVar("Entry", Record, Composite)


def register(record: Entry) -> Entry:
    """Add ``record`` under each of its overloads.

    Raises:
        TypeError: ``record`` lists an object that is not an ``OpOverload``, for example an overload packet.
        ValueError: an overload has a record already.
    """
    for overload in record.overloads:
        if not isinstance(overload, OpOverload):
            raise TypeError(f"register an overload such as aten.add.Tensor, not {overload!r}")
        table = _RECORDS if overload.namespace == "aten" else _CUSTOM_RECORDS
        if overload in table:
            raise ValueError(f"{overload} is registered twice")
        table[overload] = record
    return record


def op(
    *overloads: OpOverload,
    kind: AnnotationKind = AnnotationKind.ELEMENTWISE,
    compute_fp32: bool = False,
    **attributes: Any,
) -> Callable[[Rule], Record]:
    """Decorator that registers a function as the rule that lowers ``overloads`` on plain values.

    A rule takes a ``Context`` and the operator's arguments in the order of ATen's schema, with each tensor as an
    ``Operand``. It returns the resulting value or ``Operand``, or a list of several. A rule with
    ``AnnotationKind.SHARED`` also lowers quantized values, unless ``lower_integer`` is given. For other kinds,
    ``Record.integer_rule`` registers the rule for quantized values.

    Args:
        overloads: the ATen overloads.
        kind: how the operator is annotated for quantization.
        compute_fp32: whether narrower types are computed in FP32 or INT32 (``Context.compute_in_fp32_or_int32``). Set
            it for a rule that rounds several times or sums elements.
        attributes: other attributes of ``Record``.
    """

    def decorate(rule: Rule) -> Record:
        lower = (
            (lambda cx, *args, **kwargs: cx.compute_in_fp32_or_int32(rule, *args, **kwargs)) if compute_fp32 else rule
        )
        record = Record(overloads, kind, lower, **attributes)
        if kind is AnnotationKind.SHARED:
            record.lower_integer = record.lower_integer or rule
            record.interval = record.interval or intervals.data_movement
        return register(record)

    return decorate


def decomposition(*overloads: OpOverload, **attributes: Any) -> Callable[[Rule], Rule]:
    """Decorator that registers a function as the decomposition of ``overloads``; it returns the function unchanged.

    The function has the arguments of the operator's ATen schema and calls other ATen operators on tensors::

        @decomposition(aten.max.default)
        def max_all(x: Tensor) -> Tensor:
            return torch.amax(x)

    Args:
        overloads: the ATen overloads.
        attributes: other attributes of ``Composite``, such as ``takes_quantized=True``.
    """

    def decorate(decompose: Rule) -> Rule:
        register(Composite(overloads, decompose, **attributes))
        return decompose

    return decorate


def decomposition_by_name(name: str) -> Callable[[Rule], Rule]:
    """Like ``decomposition``, for an operator of a library that is possibly not loaded.

    Args:
        name: the operator as "library::name".

    Raises:
        ValueError: the operator has a record already.
    """

    def decorate(decompose: Rule) -> Rule:
        if name in _DECOMPOSITIONS_BY_NAME:
            raise ValueError(f"{name} is registered twice")
        _DECOMPOSITIONS_BY_NAME[name] = Composite((), decompose)
        return decompose

    return decorate
