"""Legality: whether a target supports an operator, by the operator's record and the hardware's limits."""

from __future__ import annotations

from collections.abc import Sequence

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Op
from arm_backend_core.tosa.operators import OPERATORS


def refusal(target: Target, kind: str, inputs: Sequence[DType], output: DType) -> str | None:
    """Why ``target`` has no ``kind`` on any operands of these element types, or None if it has."""
    reason = OPERATORS[kind].type_refusal(inputs, output, target)
    return reason or _name_target(target, target.hardware.refusal(kind, inputs, output))


def op_refusal(target: Target, op: Op) -> str | None:
    """Why ``target`` cannot run ``op`` with its shapes, attributes and constants, or None if it can.

    Raises:
        AssertionError: ``op`` is malformed on any target (see ``Operator.refusal``).
    """
    reason = _control_refusal(target, op) if op.graphs else OPERATORS[op.kind].refusal(op, target)
    if reason or op.graphs:
        return reason
    types = [value.dtype for value in op.inputs]
    return _name_target(target, target.hardware.refusal(op.kind, types, op.output.dtype, op))


def emission_refusal(target: Target, op: Op) -> str | None:
    """Why ``op`` cannot be emitted for ``target``: as ``op_refusal``, but booleans may still be lowered to int8."""
    hardware, types = target.hardware, [value.dtype for value in (*op.inputs, op.output)]
    is_unchanged = OPERATORS[op.kind].is_data_movement or op.kind == "IDENTITY"
    if hardware.booleans or DType.BOOL not in types or not (op.kind in hardware.bool_as_int8 or is_unchanged):
        return op_refusal(target, op)
    lowered_types = [DType.INT8 if dtype is DType.BOOL else dtype for dtype in types]
    lack = (
        None
        if op.kind in hardware.bool_as_int8
        else hardware.refusal(op.kind, lowered_types[:-1], lowered_types[-1], op)
    )
    return OPERATORS[op.kind].refusal(op, target) or _name_target(target, lack)


def _control_refusal(target: Target, op: Op) -> str | None:
    """Why ``target`` cannot run a COND_IF or WHILE_LOOP; the operators of its graphs are not checked."""
    if "controlflow" not in target.extensions:
        return f"{op.kind} needs TOSA EXT-CONTROLFLOW, which {target.name} lacks"
    operands, (first, second) = op.inputs, op.graphs
    if op.kind == "COND_IF":
        condition, *operands = op.inputs
        results = [(first.outputs, op.results), (second.outputs, op.results)]
    else:
        (condition,) = first.outputs
        results = [(second.outputs, op.results), (op.inputs, op.results)]
    if condition.dtype is not DType.BOOL or condition.size != 1:
        return f"{op.kind} by {condition!r} (one boolean)"
    for values, expected in [(first.inputs, operands), (second.inputs, operands), *results]:
        if [(x.shape, x.dtype) for x in values] != [(x.shape, x.dtype) for x in expected]:
            return f"{op.kind} with {values} for {expected} (as many, of the same shapes and types)"
    return None


def _name_target(target: Target, lack: str | None) -> str | None:
    return f"{target.name} has no {lack}" if lack else None
