"""Training behaviour: operators of a captured program that use batch statistics, dropout or random numbers.

``model.eval()`` has no effect on a captured program, nor on ``F.dropout(x, p)``, which is active unless the model
passes ``training=self.training``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

#: Number of layers or lines that a message names.
_NAMED = 4
_EVAL = "call model.eval() before torch.export.export()"
_ARGUMENT = "pass training=self.training"
_BATCH = "normalizes with the statistics of each batch, not with the running ones"
_AS_TRAINED = "is random at every run, as in training"
#: ExecuTorch's ``native_dropout`` kernel does not divide what it keeps by 1 - p.
_DROPS = "is random at every run, and the elements that it keeps are not divided by 1 - p, unlike in training"
_ATTENTION = "asks for dropout at every call, as in training, and is computed without it"
_DRAWS = "draws random numbers at every run, so that its results differ"
_AS_INPUT = "give random numbers as an input where runs are to be equal"


def training_behavior(program: ExportedProgram, *, captured_elsewhere: bool = False) -> list[str]:
    """Describe the operators with training behaviour: a sentence per kind, with layers or lines, and the remedy.

    Args:
        program: the captured program.
        captured_elsewhere: the user captured the program, so the model may have been in training mode.
    """
    found: dict[tuple[str, str], dict[str, None]] = {}
    for node in program.graph.nodes:
        what = _behavior(node)
        if what is not None:
            remedy = _remedy(node, what, captured_elsewhere)
            found.setdefault((what, remedy), {})[_place(node)] = None
    return [f"{what}: {_join_limited(list(places))}; {remedy}" for (what, remedy), places in found.items()]


def _behavior(node: Node) -> str | None:
    """The training behaviour of ``node``, or None."""
    from arm_backend_core.nodes import arguments_of, is_random, mutates, overload_of

    overload = overload_of(node.target)
    if node.op != "call_function" or overload is None or overload.namespace != "aten":
        return None
    known = arguments_of(node)
    trains = any(known.get(name) is True for name in ("training", "train", "use_input_stats"))
    if trains and known.get("running_mean") is not None:
        return _BATCH
    if not is_random(node) or not (node.users or mutates(node)):
        return None
    if "dropout_p" in known:
        return _ATTENTION
    if "alpha_dropout" in str(overload) or "rrelu" in str(overload):
        return _AS_TRAINED
    return _DROPS if trains or "dropout" in str(overload) else _DRAWS


def _remedy(node: Node, what: str, captured_elsewhere: bool) -> str:
    layer = _layer(node)
    theirs = layer is not None and layer[1].startswith("torch.nn.")
    if captured_elsewhere and (theirs or what == _BATCH):
        return _EVAL
    if what == _DRAWS and not theirs:
        return f"{_AS_INPUT}; {_EVAL} where it draws in training alone" if captured_elsewhere else _AS_INPUT
    own = "pass dropout_p=p if self.training else 0.0" if what == _ATTENTION else _ARGUMENT
    return f"{own}, and {_EVAL}" if captured_elsewhere else own


def _layer(node: Node) -> tuple[str, str] | None:
    """Path and type of the innermost module that ``node`` was traced in."""
    from arm_backend_core.nodes import modules_of

    layers = list(modules_of(node).items())
    if not layers:
        return None
    path, kind = layers[-1]
    return path, f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)


def _place(node: Node) -> str:
    """``'encoder.norm' (BatchNorm1d)``, or the operator and the line of the user's own code."""
    from arm_backend_core.nodes import operator_name, source_line

    layer = _layer(node)
    if layer is not None and layer[1].startswith("torch.nn."):
        return f"'{layer[0]}' ({layer[1].rpartition('.')[2]})"
    line = source_line(node)
    where = [f"'{layer[0]}'"] if layer is not None and layer[0] else []
    where += [f"{os.path.basename(line.rpartition(':')[0])}:{line.rpartition(':')[2]}"] if line else []
    return f"{operator_name(node)} ({', '.join(where) or node.name})"


def _join_limited(places: list[str]) -> str:
    more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
    return ", ".join(places[:_NAMED]) + more
