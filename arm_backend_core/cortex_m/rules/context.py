"""Context of a lowering rule, and the registry of the rules."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch._ops import OpOverload
from torch.fx import Node

from arm_backend_core.cortex_m.emitter import Emitter
from arm_backend_core.cortex_m.fixed_point import quantize_multiplier
from arm_backend_core.cortex_m.kernels.registry import Array
from arm_backend_core.cortex_m.quantized_value import QuantizedValue
from arm_backend_core.errors import Unsupported
from arm_backend_core.lowering.qparams_reader import QParamsReader
from arm_backend_core.nodes import is_dequantize, is_empty, overload_of
from arm_backend_core.qparams import QParams
from arm_backend_core.targets.cortex_m import Isa


@dataclass(frozen=True)
class Weight:
    """A constant weight.

    Attributes:
        data: integers, int8.
        scale: one number, or one per output channel (1-D).
    """

    data: Array
    scale: Array


@dataclass(frozen=True)
class ResultQuantization:
    """Quantization parameters and limits of the result that a rule computes.

    Attributes:
        q: quantization parameters of the operator's own result.
        low: smallest integer of the result, after the clamps that follow the operator.
        high: largest integer of the result.
    """

    q: QParams
    low: int
    high: int


class KernelContext:
    """Operands, constants and emitter of a rule.

    Attributes:
        emit: inserts kernel calls.
        isa: instruction set of the kernels.
        node: the operator that is lowered.
        result: quantization of its result.
    """

    def __init__(
        self,
        emit: Emitter,
        isa: Isa,
        values: Mapping[Node, QuantizedValue],
        constants: Mapping[Node, Any],
        node: Node,
        result: ResultQuantization,
    ) -> None:
        self.emit, self.isa, self.node, self.result = emit, isa, node, result
        self._values, self._constants = values, constants
        self._qparams = QParamsReader(constants)

    def operand(self, argument: Any) -> QuantizedValue:
        """The quantized tensor that an argument dequantizes.

        Raises:
            Unsupported: the argument is not quantized to int8 per tensor, or has no elements.
        """
        value = read_operand(argument, self._values, self._constants, self._qparams)
        value.require_int8()
        return value

    def constant_data(self, argument: Any) -> Array | None:
        """The elements of a constant that is not quantized; None for a computed tensor or a number."""
        constant = self._constants.get(argument) if isinstance(argument, Node) else None
        return None if constant is None else constant.detach().numpy()

    def weight(self, argument: Any, axis: int) -> Weight:
        """A constant weight with output channels along ``axis``.

        Raises:
            Unsupported: the weight is not quantized, is computed at run time, or is quantized along another dimension.
        """
        if not isinstance(argument, Node) or not is_dequantize(argument):
            raise Unsupported("its weight is not quantized")
        source, q = argument.all_input_nodes[0], self._qparams.read(argument)
        if source not in self._constants:
            raise Unsupported("its weight is computed at run time, and the kernel takes a constant")
        if q.axis is not None and q.axis != axis:
            raise Unsupported(f"its weight is quantized along dimension {q.axis}, and the kernel needs {axis}")
        return Weight(self._constants[source].detach().numpy(), np.asarray(q.scale, np.float64))

    def bias(self, argument: Any, scale: Array, channels: int) -> Array | None:
        """A constant bias as int32, quantized with the accumulator's ``scale``; None if absent.

        Raises:
            Unsupported: the bias is computed at run time.
        """
        if argument is None:
            return None
        q = self._qparams.read(argument) if is_dequantize(argument) else None
        source = argument if q is None else argument.all_input_nodes[0]
        if source not in self._constants:
            raise Unsupported("its bias is computed at run time, and the kernel takes a constant")
        data = self._constants[source].detach().numpy()
        if q is not None and np.allclose(q.scale, scale, rtol=1e-5, atol=0.0):
            return np.broadcast_to(data, channels).astype(np.int32)
        real = data.astype(np.float64) if q is None else q.dequantize(data)
        limits = np.iinfo(np.int32)
        return np.clip(np.rint(real / scale), limits.min, limits.max).astype(np.int32)

    def requantization_constants(self, accumulator_scale: Array, channels: int) -> tuple[Node, Node]:
        """Constants with the multiplier and the shift of each channel, for the requantization of the accumulator.

        Raises:
            Unsupported: a factor is too large for the kernels.
        """
        multiplier, shift = _multipliers(accumulator_scale / float(self.result.q.scale), channels)
        return self.emit.constant(multiplier, "multiplier"), self.emit.constant(shift, "shift")

    def make_result(self, node: Node, layout: Sequence[int] | None = None) -> QuantizedValue:
        """Describe the rule's result, which ``node`` computes in ``layout`` (default: the program's)."""
        return QuantizedValue.from_node(node, self.result.q, None if layout is None else tuple(layout))

    def clamp(self, value: QuantizedValue) -> QuantizedValue:
        """Clamp ``value`` to the limits of ``result``. Needed after kernels that have no arguments for these limits."""
        if (self.result.low, self.result.high) == (-128, 127):
            return value
        table = np.clip(np.arange(-128, 128), self.result.low, self.result.high).astype(np.int8)
        return apply_table(self.emit, value, table, self.result.q)

    def requantize(self, value: QuantizedValue, q: QParams) -> QuantizedValue:
        """Convert ``value`` to the quantization parameters ``q``."""
        return requantize(self.emit, value, q)


def read_operand(
    argument: Any, values: Mapping[Node, QuantizedValue], constants: Mapping[Node, Any], qparams: QParamsReader
) -> QuantizedValue:
    """The quantized tensor that ``argument``, a dequantize node, reads.

    Raises:
        Unsupported: ``argument`` is not a per-tensor dequantize node, or the tensor has no elements.
    """
    if not isinstance(argument, Node) or not is_dequantize(argument):
        raise Unsupported(f"it reads '{argument}', which is not quantized")
    source, q = argument.all_input_nodes[0], qparams.read(argument)
    if q.axis is not None:
        raise Unsupported(f"it reads '{source.name}', which is quantized per channel")
    if is_empty(argument.meta["val"]):
        raise Unsupported(f"it reads '{source.name}', which has no elements")
    if source in values:
        return values[source]
    if source in constants:
        return QuantizedValue.from_constant(constants[source].detach().numpy(), q)
    return QuantizedValue.from_node(source, q)


def apply_table(emit: Emitter, value: QuantizedValue, table: Array, q: QParams) -> QuantizedValue:
    """Apply a look-up table of 256 int8 entries: entry i is the result for the integer i - 128."""
    if value.data is not None:
        return QuantizedValue.from_constant(table[value.data.astype(np.int64) + 128], q)
    assert value.node is not None
    node = emit.call_kernel("quantized_activation", value.node, emit.constant(table, "table"))
    return QuantizedValue.from_node(node, q, value.layout)


def requantize(emit: Emitter, value: QuantizedValue, q: QParams) -> QuantizedValue:
    """Convert ``value`` to the quantization parameters ``q``, by a look-up table if they differ."""
    if value.q.is_equivalent(q):
        return value
    real = value.q.dequantize(np.arange(-128, 128))
    return apply_table(emit, value, q.quantize(real).astype(np.int8), q)


Rule = Callable[[KernelContext], QuantizedValue]
RULES: dict[OpOverload, Rule] = {}
"""The rules by ATen overload. ``arm_backend_core.cortex_m.lower`` imports all modules with rules."""


MULTI_RESULT_RULES: dict[OpOverload, Rule] = {}
"""The rules of operators with several results. Such a rule computes one of the results:
``KernelContext.node`` is the ``getitem`` node of this result."""


def rule(*overloads: OpOverload, table: dict[OpOverload, Rule] = RULES) -> Callable[[Rule], Rule]:
    """Register the decorated function as the lowering rule of ATen overloads, in ``RULES`` or ``MULTI_RESULT_RULES``.

    Raises:
        ValueError: an overload has a rule already.
    """

    def register(function: Rule) -> Rule:
        for overload in overloads:
            if overload in table:
                raise ValueError(f"{overload} has a kernel rule already")
            table[overload] = function
        return function

    return register


def find_rule(node: Node) -> Rule | None:
    """The rule of an operator, or of a ``getitem`` node of an operator with several results; None without a rule."""
    if node.target is operator.getitem:
        source = node.all_input_nodes[0]
        return MULTI_RESULT_RULES.get(overload_of(source.target))  # type: ignore[arg-type]
    return RULES.get(overload_of(node.target))  # type: ignore[arg-type]


def _multipliers(real: Array | float, channels: int) -> tuple[Array, Array]:
    """Multiplier and shift of each channel, int32.

    Raises:
        Unsupported: a factor is too large for the kernels.
    """
    try:
        pairs = [quantize_multiplier(float(x)) for x in np.broadcast_to(np.asarray(real, np.float64), channels)]
    except ValueError as error:
        raise Unsupported(f"its requantization is out of range: {error}") from error
    table = np.array(pairs, np.int32).reshape(-1, 2)
    return table[:, 0].copy(), table[:, 1].copy()


def quantize_single_multiplier(real: float) -> tuple[int, int]:
    """Multiplier and shift of a per-tensor requantization (``quantize_multiplier``).

    Raises:
        Unsupported: the factor is too large for the kernels.
    """
    multiplier, shift = _multipliers(real, 1)
    return int(multiplier[0]), int(shift[0])
