"""Trace of rewrites: with ``ARM_BACKEND_CORE_TRACE=rewrite``, every rule that declines prints the condition it failed.

The reason is the rule's own source: the condition around the ``return None`` that ran, and, if that condition called a
helper that returned None, the helper's condition too. So a reason cannot differ from the code, and a rule needs no
second description of its conditions. Tracing costs time only when it is enabled.
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

#: Name of the environment variable; its value lists, with commas, what to trace.
VARIABLE = "ARM_BACKEND_CORE_TRACE"

_PACKAGE = str(Path(__file__).parents[2])


class _Return(NamedTuple):
    """A function that returned None: its frame and line, and the frame and line that called it."""

    frame: FrameType
    line: int
    caller: FrameType | None
    caller_line: int


def is_rewrite_traced() -> bool:
    """Whether ``ARM_BACKEND_CORE_TRACE`` contains ``rewrite``."""
    return "rewrite" in os.environ.get(VARIABLE, "").split(",")


def rule_name(rule: Callable[..., object]) -> str:
    """Return the name of the function that is a rule, without leading underscores."""
    code = _code(rule)
    return code.co_name.lstrip("_") if code is not None else repr(rule)


def trace_rule(name: str, function: Callable[..., Result | None], op: Op, *arguments: object) -> Result | None:
    """Call ``function(op, *arguments)`` and print to standard error whether it rewrites the operator, or why not.

    Args:
        name: name of the rule or alternative, for the line that is printed.

    Raises:
        Unsupported: the target refuses an operator that the rule emitted, as without tracing.
    """
    try:
        result, reason = call_with_reason(function, op, *arguments)
    except Unsupported as refusal:
        _print(op, name, f"declines: {refusal.reason}")
        raise
    _print(op, name, "applies" if result is not None else f"declines: {reason}")
    return result


def call_with_reason(function: Callable[..., Result | None], *arguments: object) -> tuple[Result | None, str]:
    """Call a function; if it returns None, also return the conditions in its source that led there."""
    code, returns = _code(function), list[_Return]()

    def trace(frame: FrameType, event: str, value: object) -> Any:
        if event == "call" and not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == "return" and value is None:
            caller = frame.f_back
            returns.append(_Return(frame, frame.f_lineno, caller, caller.f_lineno if caller is not None else 0))
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        result = function(*arguments)
    finally:
        sys.settrace(previous)
    if result is not None or not returns or returns[-1].frame.f_code is not code:
        return result, ""
    return None, _describe(returns)


def _describe(returns: list[_Return]) -> str:
    """Describe the last return and, if its condition called a function that returned None, that one too."""
    reasons, current = [], returns[-1]
    while True:
        first, text = _condition(current.frame.f_code, current.line)
        name = Path(current.frame.f_code.co_filename).relative_to(_PACKAGE).as_posix()
        reasons.append(f"{text} ({name}:{current.line})")
        helpers = [r for r in returns if r.caller is current.frame and first <= r.caller_line <= current.line]
        if not helpers:
            return ", as ".join(reasons)
        current = helpers[-1]


def _condition(code: CodeType, line: int) -> tuple[int, str]:
    """Find the condition around a line of a function: its first line, and its source text.

    Without one, the statement itself is returned: ``return helper(x)``.
    """
    first, text = line, "no condition holds"
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


def _code(function: Callable[..., object]) -> CodeType | None:
    """Return the code of a function or of what a ``functools.partial`` calls."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(inspect.unwrap(function), "__code__", None)


def _print(op: Op, name: str, outcome: str) -> None:
    node = op.origin.node if op.origin is not None else "no node"
    result = f"{op.output.dtype.value}{list(op.output.shape)}"
    print(f"rewrite: {op.kind} {result} of {node}: {name} {outcome}", file=sys.stderr)
