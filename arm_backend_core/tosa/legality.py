"""Legality: whether a target supports an operator.

The operator's record (``tosa.operators``) checks the TOSA specification. ``targets.hardware`` checks the limits of the
hardware.
"""

from __future__ import annotations

from collections.abc import Sequence

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Op
from arm_backend_core.tosa.operators import OPERATORS


def type_refusal(target: Target, kind: str, inputs: Sequence[DType], output: DType) -> str | None:
    """Why ``target`` does not support ``kind`` on these element types; None if it does."""
    reason = OPERATORS[kind].type_refusal(inputs, output, target)
    return reason or _format_refusal(target, target.hardware.refusal(kind, inputs, output))


def op_refusal(target: Target, op: Op) -> str | None:
    """Why ``target`` cannot run ``op`` with its shapes, attributes and constants; None if it can.

    Raises:
        AssertionError: ``op`` is malformed on all targets (see ``Operator.refusal``).
    """
    reason = _control_flow_refusal(target, op) if op.regions else OPERATORS[op.kind].refusal(op, target)
    if reason or op.regions:
        return reason
    types = [value.dtype for value in op.inputs]
    return _format_refusal(target, target.hardware.refusal(op.kind, types, op.output.dtype, op))


def op_refusal_before_bool_lowering(target: Target, op: Op) -> str | None:
    """Why ``op`` cannot be emitted for ``target``; None if it can.

    On hardware with booleans, the result is equal to ``op_refusal``. On hardware without booleans, the function also
    accepts boolean operators that ``lower_bool_to_int8`` will lower to int8, and data movement of booleans that the
    hardware supports for int8.
    """
    hardware, types = target.hardware, [value.dtype for value in (*op.inputs, op.output)]
    keeps_values = OPERATORS[op.kind].is_data_movement
    if hardware.has_booleans or DType.BOOL not in types or not (op.kind in hardware.bool_as_int8 or keeps_values):
        return op_refusal(target, op)
    lowered_types = [DType.INT8 if dtype is DType.BOOL else dtype for dtype in types]
    unsupported = (
        None
        if op.kind in hardware.bool_as_int8
        else hardware.refusal(op.kind, lowered_types[:-1], lowered_types[-1], op)
    )
    return OPERATORS[op.kind].refusal(op, target) or _format_refusal(target, unsupported)


def _control_flow_refusal(target: Target, op: Op) -> str | None:
    """Why ``target`` cannot run a COND_IF or WHILE_LOOP. This does not check the operators of its regions."""
    if "controlflow" not in target.extensions:
        return f"{op.kind} needs TOSA EXT-CONTROLFLOW, which {target.name} lacks"
    operands, (first, second) = op.inputs, op.regions
    if op.kind == "COND_IF":
        condition, *operands = op.inputs
        results = [(first.outputs, op.results), (second.outputs, op.results)]
    else:
        (condition,) = first.outputs
        results = [(second.outputs, op.results), (op.inputs, op.results)]
    if condition.dtype is not DType.BOOL or condition.size != 1:
        return f"{op.kind} needs a condition of one boolean, got {condition!r}"
    for values, expected in [(first.inputs, operands), (second.inputs, operands), *results]:
        if [(x.shape, x.dtype) for x in values] != [(x.shape, x.dtype) for x in expected]:
            return f"{op.kind} needs values with the number, shapes and types of {expected}, got {values}"
    return None


def _format_refusal(target: Target, unsupported: str | None) -> str | None:
    return f"{target.name} has {unsupported}" if unsupported else None
