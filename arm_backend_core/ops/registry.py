"""One record per operator: how it is annotated for quantization and lowered, or what other operators it is made of.

The partitioner, the quantizer, the tests and the documentation read these records; there is no second list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload

Rule = Callable[..., Any]


class Kind(Enum):
    """How an operator's tensors get quantization parameters."""

    CONV = "weight per channel, bias in the accumulator's scale"
    ELEMENTWISE = "every floating-point input and the result have parameters of their own"
    SHARED = "the result keeps the input's parameters"
    PASSTHROUGH = "nothing to annotate: integers, booleans, constants"


@dataclass(eq=False)
class Record:
    """Everything the compiler knows of an ATen operator that it lowers.

    Attributes:
        overloads: the ATen overloads that share this record.
        kind: how it is annotated.
        lower: rule for plain values (floating point, integers, booleans).
        lower_integer: rule for quantized values, None when there is none.
        activations: positions of the arguments that are quantized as activations; None for every tensor argument.
        weight: position of the weight (CONV only).
        bias: position of the bias (CONV only).
        weight_axis: the weight's output-channel dimension, given the node (CONV only).
        univariate: an elementwise function that may be merged with its neighbours into one TABLE.
        is_discontinuous: not of int16 then, as its integer rule is exact there and a TABLE is not.
        clamp: for relu and its kin: the arguments -> (low, high); such a function merges into its producer's rescale.
        factor: for multiplication by a positive number: the arguments -> that number, or None; merges likewise.
        absorbs_activation: its integer result leaves through a RESCALE, into which ``clamp`` and ``factor`` users can
            merge.
        fixed_range: (low, high) of the result whatever the input, None if it depends on the data.
        reads_int16: keeps precision inside, so an int16 input is worth having in an INT8 program.
        is_select: between numbers too, so its result may be quantized though no operand is.
        error: what the integer rule may be off by besides rounding its result, relative to the largest element of
            operands and result: 2**-14 is two steps of int16 at most.
    """

    overloads: tuple[OpOverload, ...]
    kind: Kind
    lower: Rule
    lower_integer: Rule | None = None
    activations: tuple[int, ...] | None = None
    weight: int = 1
    bias: int = 2
    weight_axis: Callable[[torch.fx.Node], int] = field(default=lambda node: 0)
    univariate: bool = False
    is_discontinuous: bool = False
    clamp: Callable[..., tuple[float, float]] | None = None
    factor: Callable[..., float | None] | None = None
    absorbs_activation: bool = False
    fixed_range: tuple[float, float] | None = None
    reads_int16: bool = False
    is_select: bool = False
    error: float = 0.0

    def integer(self, rule: Rule) -> Rule:
        """Decorator: ``rule`` lowers the operator on quantized values."""
        assert self.lower_integer is None, f"{self.overloads[0]} has an integer rule already"
        self.lower_integer = rule
        return rule


@dataclass(frozen=True)
class Composite:
    """An ATen operator that is made of others.

    Attributes:
        overloads: the ATen overloads that share this record.
        decompose: what it does, as a function of tensors with the arguments of the operator's schema. PyTorch traces
            it. A result that it does not give (indices, say) is None.
        takes_quantized: it has another form for a program that is going to be quantized, and takes ``quantized``.
        stepwise: ``decompose`` writes nodes and takes what writes them before the arguments, see ``ops/recurrent``.
        reads_memory: its numbers depend on where its operands begin in memory, not on shapes and strides alone.
    """

    overloads: tuple[OpOverload, ...]
    decompose: Rule
    takes_quantized: bool = False
    stepwise: bool = False
    reads_memory: bool = False


_RECORDS: dict[OpOverload, Record | Composite] = {}
_CUSTOM: dict[OpOverload, Record | Composite] = {}  #: of operators of our own
_BY_NAME: dict[str, Composite] = {}  #: of operators of libraries that may not be loaded, by name
Entry = TypeVar("Entry", Record, Composite)


def register(record: Entry) -> Entry:
    """Add ``record`` under each of its overloads.

    Raises:
        TypeError: an overload packet or something else than an ATen overload was given.
        ValueError: an overload has a record already.
    """
    for overload in record.overloads:
        if not isinstance(overload, OpOverload):
            raise TypeError(f"register an overload such as aten.add.Tensor, not {overload!r}")
        table = _RECORDS if overload.namespace == "aten" else _CUSTOM
        if overload in table:
            raise ValueError(f"{overload} is registered twice")
        table[overload] = record
    return record


def op(
    *overloads: OpOverload, kind: Kind = Kind.ELEMENTWISE, compute_fp32: bool = False, **facts: Any
) -> Callable[[Rule], Record]:
    """Decorator that registers the rule below it, for plain values; see ``Record`` for ``facts``.

    ``compute_fp32``: a floating-point formula of several steps or a sum, computed in FP32 (``Context.widened``).

    A rule takes a ``Context`` and the operator's arguments as ATen's schema has them, tensors being ``Tensor``, and
    returns the resulting value or ``Tensor`` (several in a list). A data-movement rule serves quantized values too.
    """

    def decorate(rule: Rule) -> Record:
        lower = (lambda cx, *args, **kwargs: cx.widened(rule, *args, **kwargs)) if compute_fp32 else rule
        record = Record(overloads, kind, lower, **facts)
        if kind is Kind.SHARED and record.lower_integer is None:
            record.lower_integer = rule
        return register(record)

    return decorate


def decomposition(*overloads: OpOverload, **facts: bool) -> Callable[[Rule], Rule]:
    """Decorator that registers the function below it as what an operator is made of; see ``Composite``."""

    def decorate(parts: Rule) -> Rule:
        register(Composite(overloads, parts, **facts))
        return parts

    return decorate


def foreign_decomposition(name: str) -> Callable[[Rule], Rule]:
    """Decorator as ``decomposition`` for an operator of a library that may not be loaded, such as ``library::name``.

    Raises:
        ValueError: the operator has a record already.
    """

    def decorate(parts: Rule) -> Rule:
        if name in _BY_NAME:
            raise ValueError(f"{name} is registered twice")
        _BY_NAME[name] = Composite((), parts)
        return parts

    return decorate
