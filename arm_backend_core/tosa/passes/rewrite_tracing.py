"""Rewrite tracing: ``ARM_BACKEND_CORE_TRACE=rewrite`` prints whether each tried rule applies, or why it declines.

The reason is source text of the rule, so it always matches the code: the condition around the executed ``return
None``. If this condition called a helper that returned None, the reason includes the helper's condition.
Tracing costs time only if it is enabled.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

from arm_backend_core.errors import Unsupported
from arm_backend_core.tosa.graph import Op

Result = TypeVar("Result")

#: Environment variable: a comma-separated list of what to trace.
TRACE_VARIABLE = "ARM_BACKEND_CORE_TRACE"

_PACKAGE = str(Path(__file__).parents[2])


class _NoneReturn(NamedTuple):
    """The return of None from a function: the function's frame and line, and its caller's frame and line."""

    frame: FrameType
    line: int
    caller: FrameType | None
    caller_line: int


def is_rewrite_traced() -> bool:
    """Whether ``ARM_BACKEND_CORE_TRACE`` contains ``rewrite``."""
    return "rewrite" in os.environ.get(TRACE_VARIABLE, "").split(",")


def rule_name(rule: Callable[..., object]) -> str:
    """Return the name of a rule's function, without leading underscores."""
    code = _code_object(rule)
    return code.co_name.lstrip("_") if code is not None else repr(rule)


def trace_rule(name: str, function: Callable[..., Result | None], op: Op, *arguments: object) -> Result | None:
    """Call ``function(op, *arguments)`` and print to standard error whether it applies, or why it declines.

    Args:
        name: name of the rule or alternative in the printed line.

    Raises:
        Unsupported: the target does not support an operator that the rule emitted.
    """
    try:
        result, reason = call_and_explain_none(function, op, *arguments)
    except Unsupported as refusal:
        _print_outcome(op, name, f"declines: {refusal.reason}")
        raise
    _print_outcome(op, name, "applies" if result is not None else f"declines: {reason}")
    return result


def call_and_explain_none(function: Callable[..., Result | None], *arguments: object) -> tuple[Result | None, str]:
    """Call a function; if it returns None, also return the source text of the conditions that caused this."""
    code, returns = _code_object(function), list[_NoneReturn]()

    def trace(frame: FrameType, event: str, value: object) -> Any:
        if event == "call" and not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == "return" and value is None:
            caller = frame.f_back
            returns.append(_NoneReturn(frame, frame.f_lineno, caller, caller.f_lineno if caller is not None else 0))
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        result = function(*arguments)
    finally:
        sys.settrace(previous)
    if result is not None or not returns or returns[-1].frame.f_code is not code:
        return result, ""
    return None, _describe_conditions(returns)


def _describe_conditions(returns: list[_NoneReturn]) -> str:
    """Describe the condition of the last return, and of helpers that returned None within this condition."""
    reasons, current = [], returns[-1]
    while True:
        first, text = _find_condition(current.frame.f_code, current.line)
        name = Path(current.frame.f_code.co_filename).relative_to(_PACKAGE).as_posix()
        reasons.append(f"{text} ({name}:{current.line})")
        helpers = [r for r in returns if r.caller is current.frame and first <= r.caller_line <= current.line]
        if not helpers:
            return ", as ".join(reasons)
        current = helpers[-1]


def _find_condition(code: CodeType, line: int) -> tuple[int, str]:
    """Find the innermost condition around a line of a function.

    Returns:
        the first line and the source text of the condition. If the line belongs to a statement such as ``return
        helper(x)``, the first line of this statement and the text of the returned expression. If there is neither a
        condition nor such a statement, ``line`` and "the rule ended without a match".
    """
    first, text = line, "the rule ended without a match"
    for node in ast.walk(_parse(code.co_filename)):
        if not isinstance(node, ast.stmt) or not node.lineno <= line <= (node.end_lineno or node.lineno):
            continue
        if node.lineno < code.co_firstlineno:
            continue
        if isinstance(node, ast.If):
            inside = any(s.lineno <= line <= (s.end_lineno or s.lineno) for s in node.body)
            first, text = node.lineno, ast.unparse(node.test) if inside else f"not ({ast.unparse(node.test)})"
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Call | ast.IfExp):
            first, text = node.lineno, ast.unparse(node.value)
    return first, text


@functools.cache
def _parse(path: str) -> ast.Module:
    return ast.parse(Path(path).read_text(encoding="utf-8"))


def _code_object(function: Callable[..., object]) -> CodeType | None:
    """Return the code object of a function, or of the function inside a ``functools.partial``."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(inspect.unwrap(function), "__code__", None)


def _print_outcome(op: Op, name: str, outcome: str) -> None:
    node = op.origin.node if op.origin is not None else "no node"
    result = f"{op.output.dtype.value}{list(op.output.shape)}"
    print(f"rewrite: {op.kind} {result} of {node}: {name} {outcome}", file=sys.stderr)
