"""Training behavior: operators of a captured program that use batch statistics, dropout or random numbers.

``model.eval()`` has no effect on a captured program, nor on ``F.dropout(x, p)``, which is active unless the model
passes ``training=self.training``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

#: Maximum number of layers or source lines that a message names.
_MAX_LOCATIONS = 4
# Remedies.
_CALL_EVAL = "call model.eval() before torch.export.export()"
_PASS_TRAINING = "pass training=self.training"
_INPUT_RANDOM = "pass the random numbers as an input if runs must be reproducible"
# Kinds of training behavior.
_BATCH_STATISTICS = "normalizes with the statistics of each batch, not with the running statistics"
_RANDOM_ACTIVATION = "is random at every run, as in training"
#: ExecuTorch's ``native_dropout`` kernel does not divide the elements that it keeps by 1 - p.
_ACTIVE_DROPOUT = "is random at every run, and the elements that it keeps are not divided by 1 - p, unlike in training"
_ATTENTION_DROPOUT = "asks for dropout at every call, as in training, but the exported program omits it"
_RANDOM_NUMBERS = "draws random numbers at every run, so that its results differ"


def describe_training_behavior(program: ExportedProgram, *, captured_by_user: bool = False) -> list[str]:
    """Describe operators with training behavior: a sentence for each kind, with the layers or lines and a remedy.

    Args:
        program: the captured program.
        captured_by_user: whether the user captured the program. The model may then have been in training mode.
    """
    groups: dict[tuple[str, str], dict[str, None]] = {}
    for node in program.graph.nodes:
        behavior = _training_behavior(node)
        if behavior is not None:
            remedy = _remedy(node, behavior, captured_by_user)
            groups.setdefault((behavior, remedy), {})[_describe_location(node)] = None
    return [
        f"{behavior}: {_join_limited(list(locations))}; {remedy}" for (behavior, remedy), locations in groups.items()
    ]


def _training_behavior(node: Node) -> str | None:
    """The training behavior of ``node``, or None."""
    from arm_backend_core.nodes import arguments_of, has_mutable_schema, is_random, overload_of

    overload = overload_of(node.target)
    if node.op != "call_function" or overload is None or overload.namespace != "aten":
        return None
    arguments = arguments_of(node)
    is_training = any(arguments.get(name) is True for name in ("training", "train", "use_input_stats"))
    if is_training and arguments.get("running_mean") is not None:
        return _BATCH_STATISTICS
    if not is_random(node) or not (node.users or has_mutable_schema(node)):
        return None
    if "dropout_p" in arguments:
        return _ATTENTION_DROPOUT
    if "alpha_dropout" in str(overload) or "rrelu" in str(overload):
        return _RANDOM_ACTIVATION
    return _ACTIVE_DROPOUT if is_training or "dropout" in str(overload) else _RANDOM_NUMBERS


def _remedy(node: Node, behavior: str, captured_by_user: bool) -> str:
    layer = _innermost_module(node)
    is_torch_layer = layer is not None and layer[1].startswith("torch.nn.")
    if captured_by_user and (is_torch_layer or behavior == _BATCH_STATISTICS):
        return _CALL_EVAL
    if behavior == _RANDOM_NUMBERS and not is_torch_layer:
        only_training = f"if the model draws them only in training, {_CALL_EVAL}"
        return f"{_INPUT_RANDOM}; {only_training}" if captured_by_user else _INPUT_RANDOM
    fix_call = "pass dropout_p=p if self.training else 0.0" if behavior == _ATTENTION_DROPOUT else _PASS_TRAINING
    return f"{fix_call}, and {_CALL_EVAL}" if captured_by_user else fix_call


def _innermost_module(node: Node) -> tuple[str, str] | None:
    """Path and type of the innermost module that ``node`` was traced in."""
    from arm_backend_core.nodes import modules_of

    layers = list(modules_of(node).items())
    if not layers:
        return None
    path, kind = layers[-1]
    return path, f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)


def _describe_location(node: Node) -> str:
    """``'encoder.norm' (BatchNorm1d)``, or the operator and the line of the user's own code."""
    from arm_backend_core.nodes import operator_name, source_line

    layer = _innermost_module(node)
    if layer is not None and layer[1].startswith("torch.nn."):
        return f"'{layer[0]}' ({layer[1].rpartition('.')[2]})"
    line = source_line(node)
    position = [f"'{layer[0]}'"] if layer is not None and layer[0] else []
    position += [f"{os.path.basename(line.rpartition(':')[0])}:{line.rpartition(':')[2]}"] if line else []
    return f"{operator_name(node)} ({', '.join(position) or node.name})"


def _join_limited(locations: list[str]) -> str:
    more = f" and {len(locations) - _MAX_LOCATIONS} more" if len(locations) > _MAX_LOCATIONS else ""
    return ", ".join(locations[:_MAX_LOCATIONS]) + more
