"""Errors for NaN and infinities in calibration: which tensor contains them, and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch.export.graph_signature import InputKind, InputSpec
from torch.fx import Node

from arm_backend_core.errors import ModelError
from arm_backend_core.nodes import constant_nodes, describe_node, source_location

NonFiniteKind = Literal["NaN", "an infinity"]

_INFINITE_CONSTANT = (
    "use a finite number near the other values, with which it shares one integer range: in a mask, a number a little "
    "below the smallest score instead of -inf (-inf is supported in a mask of scores that only a softmax reads)"
)
_ADVICE: Mapping[tuple[str, NonFiniteKind], str] = {
    ("input", "NaN"): "give samples without NaN",
    ("input", "an infinity"): "give finite samples, such as masks with a number below all scores instead of -inf",
    ("constant", "NaN"): "replace the NaN by numbers, for example with torch.nan_to_num",
    ("constant", "an infinity"): _INFINITE_CONSTANT,
    ("result", "NaN"): (
        "limit the operands to values for which the result is a number, for example with clamp() before a logarithm or "
        "a square root, or a small number added to a divisor"
    ),
    ("result", "an infinity"): (
        "limit the operands to values for which the result is finite, for example with clamp(); if a constant of the "
        f"model is infinite, {_INFINITE_CONSTANT}"
    ),
}


class NonFiniteError(ModelError):
    """A calibration sample produced NaN or an infinity, which no scale can represent.

    Attributes:
        kind: whether the tensor contains NaN or an infinity.
    """

    def __init__(self, message: str, kind: NonFiniteKind) -> None:
        super().__init__(message)
        self.kind = kind


def describe_non_finite(node: Node, kind: NonFiniteKind, specs: Mapping[str, InputSpec]) -> str:
    """Describe a tensor that contains NaN or an infinity.

    Args:
        node: the tensor, in a graph whose parameters and buffers are attributes.
        kind: the non-finite value that it contains.
        specs: input specs by attribute name, with the names of parameters and buffers in the model.
    """
    return format_non_finite_message(_describe(node, specs), kind)


def format_non_finite_message(tensor: str, kind: NonFiniteKind) -> str:
    """Format the message about a NaN or an infinity in ``tensor``, a description of the tensor."""
    return f"{tensor} holds {kind}, which no scale can represent"


def suggest_remedy(node: Node, kind: NonFiniteKind) -> str:
    """Return the advice for an input, constant or result that contains NaN or an infinity."""
    if node.op == "placeholder":
        return _ADVICE["input", kind]
    return _ADVICE["constant" if node in constant_nodes(node.graph) else "result", kind]


def _describe(node: Node, specs: Mapping[str, InputSpec]) -> str:
    spec = specs.get(str(node.target)) if node.op == "get_attr" else None
    if spec is None:
        return describe_node(node)
    word = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer"}.get(spec.kind, "constant")
    line = next((line for line in map(source_location, node.users) if line), "")
    return f"{word} '{spec.target}'{line and f' (read at {line})'}"
