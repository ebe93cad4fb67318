"""Arguments of a call: those that are given by name, what an input takes, samples one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from arm_recipes.runtime.errors import RunError
from arm_recipes.runtime.pte import PteTensor
from arm_recipes.runtime.signature import Signature, Value


def bind_arguments(method: str, expected: Signature, tensors: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Any]:
    """All inputs in order.

    Raises:
        ValueError: a name is that of no input, or of one that is given already; or one is missing between them.
    """
    names = [value.name for value in expected.inputs]
    for name in named:
        if name not in names[len(tensors) :]:
            problem = "is given twice" if name in names else f"is none of its inputs: {', '.join(names)}"
            raise ValueError(f"'{method}': '{name}' {problem}")
    if not named:
        return tensors
    missing = [name for name in names[len(tensors) :] if name not in named]
    if missing:
        raise ValueError(f"'{method}': the input '{missing[0]}' is missing")
    return [*tensors, *(named[name] for name in names[len(tensors) :])]


def check_input(index: int, expected: Value, described: PteTensor | str, given: Any) -> Any:
    """The input as the runtime takes it.

    Raises:
        ValueError: it is something else.
    """
    import torch

    from arm_backend_core.kinds import ScalarKind, kind_of

    what = f"input {index} ('{expected.name}')"
    if isinstance(described, str):  # a number or the like: the runtime checks it
        return given
    if not isinstance(given, torch.Tensor):
        raise ValueError(f"{what} must be a tensor, {expected}; got {type(given).__name__}")
    dtype = str(given.dtype).removeprefix("torch.")
    if dtype != described.dtype or not described.takes(tuple(given.shape)):
        hint = ""
        if kind_of(given.dtype) is ScalarKind.FLOAT and getattr(expected, "scale", None) is not None:
            hint = f"; quantize real numbers with inputs[{index}].quantize(...)"
        raise ValueError(f"{what} must be {expected}; got {dtype}{list(given.shape)}{hint}")
    # The runtime takes memory as it lies, so it must lie as the program says.
    order = described.dim_order
    back = [order.index(axis) for axis in range(len(order))]
    return given.detach().cpu().permute(order).contiguous().permute(back)


def call_batch(run: Callable[..., list[Any]], samples: Iterable[Any]) -> Iterator[list[Any]]:
    """Call ``run`` for one sample after the other; yields what it returns.

    Args:
        samples: tuples of tensors, dicts of them by name, or tensors for a method with one input.

    Raises:
        ValueError, RunError: as ``run``; the message begins with the number of the sample.
    """
    for index, sample in enumerate(samples):
        named = sample if isinstance(sample, Mapping) else {}
        tensors = sample if isinstance(sample, (tuple, list)) else () if named else (sample,)
        try:
            outputs = run(*tensors, **named)
        except (ValueError, RunError) as error:
            raise type(error)(f"sample {index}: {error}") from error
        yield outputs
