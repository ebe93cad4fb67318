"""Whether a target may be given an operator: the operator's own record, and what the hardware behind it lacks."""

from __future__ import annotations

from collections.abc import Sequence

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Op
from arm_backend_core.tosa.operators import OPERATORS


def refusal(target: Target, kind: str, inputs: Sequence[DType], output: DType) -> str | None:
    """Why ``target`` has no ``kind`` on any operands of these element types, or None if it has."""
    reason = OPERATORS[kind].type_refusal(inputs, output, target)
    return reason or _named(target, target.hardware.refusal(kind, inputs, output))


def op_refusal(target: Target, op: Op) -> str | None:
    """Why ``target`` cannot run ``op`` with its shapes, attributes and constants, or None if it can.

    Raises:
        AssertionError: ``op`` is not what any graph may have (see ``Operator.refusal``).
    """
    reason = _control_refusal(target, op) if op.graphs else OPERATORS[op.kind].refusal(op, target)
    if reason or op.graphs:
        return reason
    types = [value.dtype for value in op.inputs]
    return _named(target, target.hardware.refusal(op.kind, types, op.output.dtype, op))


def emission_refusal(target: Target, op: Op) -> str | None:
    """Why ``op`` cannot be written for ``target``: as ``op_refusal``, but booleans may be numbers in the end."""
    hardware, types = target.hardware, [value.dtype for value in (*op.inputs, op.output)]
    kept = OPERATORS[op.kind].moves or op.kind == "IDENTITY"
    if hardware.booleans or DType.BOOL not in types or not (op.kind in hardware.bool_as_int8 or kept):
        return op_refusal(target, op)
    counted = [DType.INT8 if dtype is DType.BOOL else dtype for dtype in types]
    lack = None if op.kind in hardware.bool_as_int8 else hardware.refusal(op.kind, counted[:-1], counted[-1], op)
    return OPERATORS[op.kind].refusal(op, target) or _named(target, lack)


def _control_refusal(target: Target, op: Op) -> str | None:
    """Why ``target`` cannot run a COND_IF or WHILE_LOOP; the operators of its graphs are not looked at."""
    if "controlflow" not in target.extensions:
        return f"{op.kind} needs TOSA EXT-CONTROLFLOW, which {target.name} lacks"
    taken, (first, second) = op.inputs, op.graphs
    if op.kind == "COND_IF":
        condition, *taken = op.inputs
        given = [(first.outputs, op.results), (second.outputs, op.results)]
    else:
        (condition,) = first.outputs
        given = [(second.outputs, op.results), (op.inputs, op.results)]
    if condition.dtype is not DType.BOOL or condition.size != 1:
        return f"{op.kind} by {condition!r} (one boolean)"
    for values, wanted in [(first.inputs, taken), (second.inputs, taken), *given]:
        if [(x.shape, x.dtype) for x in values] != [(x.shape, x.dtype) for x in wanted]:
            return f"{op.kind} with {values} for {wanted} (as many, of the same shapes and types)"
    return None


def _named(target: Target, lack: str | None) -> str | None:
    return f"{target.name} has no {lack}" if lack else None
