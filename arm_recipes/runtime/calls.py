"""Method calls: bind arguments to inputs, validate them, and call a method for a sequence of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from arm_recipes._internal.conversions import dtype_name, suggest_conversion
from arm_recipes.runtime.errors import RunError
from arm_recipes.runtime.pte import PteTensor
from arm_recipes.runtime.signature import IOValue, Signature
from arm_recipes.runtime.tensor_info import TensorInfo


def reject_old_backend_argument(named: Mapping[str, Any]) -> None:
    """Reject ``via="tosa"``, and suggest ``backend``, the new name of this argument.

    Other values of ``via`` are accepted, because a model may have an input with this name.

    Raises:
        TypeError: ``named`` has ``via="tosa"``.
    """
    if isinstance(named.get("via"), str) and named["via"] == "tosa":
        raise TypeError("run() has no argument 'via'; did you mean 'backend'?")


def describe_packed_sample(tensors: Sequence[Any], named: Mapping[str, Any]) -> str | None:
    """Describe a call whose only argument is a sample (tuple, list, dict) or a list of samples; else return None."""
    if len(tensors) != 1 or named or not isinstance(tensors[0], (tuple, list, Mapping)):
        return None
    sample = tensors[0]
    is_mapping = isinstance(sample, Mapping)
    if isinstance(sample, list) and sample and isinstance(sample[0], (tuple, list, Mapping)):
        return "got a list of samples: call run(*samples[i]) for each of them"
    call = "**sample" if is_mapping else "*sample, **sample.keywords" if hasattr(sample, "keywords") else "*sample"
    return f"got a {'dict' if is_mapping else type(sample).__name__}: call run({call})"


def bind_arguments(method: str, expected: Signature, tensors: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Any]:
    """Bind positional and named arguments to the inputs of a method, in order.

    The caller checks the number of arguments if all are positional.

    Raises:
        ValueError: a name is unknown or given twice, some arguments are named and an input is missing, or the only
            argument is a whole sample.
    """
    packed = describe_packed_sample(tensors, named)
    if packed is not None and expected.inputs and isinstance(expected.inputs[0], TensorInfo):
        raise ValueError(f"'{method}' {packed}")
    names = [value.name for value in expected.inputs]
    for name in named:
        if name not in names[len(tensors) :]:
            problem = "is given twice" if name in names else f"is not an input; the inputs are: {', '.join(names)}"
            raise ValueError(f"'{method}': '{name}' {problem}")
    if not named:
        return tensors
    missing = [name for name in names[len(tensors) :] if name not in named]
    if missing:
        raise ValueError(f"'{method}': the input '{missing[0]}' is missing")
    return [*tensors, *(named[name] for name in names[len(tensors) :])]


def check_input(
    index: int, expected: IOValue, layout: PteTensor | str, value: Any, *, reads_int32: bool = False
) -> Any:
    """Validate an argument, and convert it to the memory layout of the program.

    Args:
        index: index of the input.
        expected: description of the input.
        layout: dtype, shape and dimension order of the input in the program; the type name if it is not a tensor.
        value: the argument.
        reads_int32: whether the program converts int64 inputs to int32.

    Raises:
        ValueError: the argument is not a tensor of the expected dtype and shape, or ``reads_int32`` is True and the
            argument has an int64 value that int32 cannot hold.
    """
    import torch
    from torch._prims_common import make_contiguous_strides_for

    from arm_backend_core.scalar_kind import ScalarKind, kind_of

    what = f"input {index} ('{expected.name}')"
    if isinstance(layout, str):  # not a tensor, for example a number, which the runtime checks
        return value
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{what} must be a tensor, {expected}; got {type(value).__name__}")
    dtype = dtype_name(value.dtype)
    if dtype != layout.dtype or not layout.accepts_shape(tuple(value.shape)):
        hint = ""
        if kind_of(value.dtype) is ScalarKind.FLOAT and getattr(expected, "scale", None) is not None:
            hint = f"; quantize floats with inputs[{index}].quantize(...)"
        elif not layout.dynamic:
            hint = suggest_conversion(dtype, tuple(value.shape), layout.dtype, layout.shape)
        raise ValueError(f"{what} must be {expected}; got {dtype}{list(value.shape)}{hint}")
    if reads_int32 and value.dtype is torch.int64 and value.numel():
        limits, extremes = torch.iinfo(torch.int32), value.aminmax()
        out_of_range = next((int(x) for x in extremes if not limits.min <= x <= limits.max), None)
        if out_of_range is not None:
            raise ValueError(
                f"{what} has the value {out_of_range}, which int32 cannot hold: the program computes in int32"
            )
    # The runtime copies the raw memory, so the tensor must have the dimension order of the program.
    order = layout.dim_order
    inverse = [order.index(axis) for axis in range(len(order))]
    value = value.detach().cpu().permute(order).contiguous()
    if not value.numel():  # contiguous() keeps any strides of an empty tensor, but the runtime compares them
        value = value.as_strided(value.shape, make_contiguous_strides_for(value.shape))
    return value.permute(inverse)


def call_batch(run: Callable[..., Any], samples: Iterable[Any]) -> Iterator[Any]:
    """Call ``run`` for each sample, and yield its results.

    Args:
        samples: each sample is a tuple of tensors, an ``Inputs`` (a tuple with keyword inputs), a dict of tensors by
            name, or a tensor for a method with one input.

    Raises:
        ValueError, RunError: as for ``run``. The message begins with the index of the sample.
    """
    for index, sample in enumerate(samples):
        is_mapping = isinstance(sample, Mapping)
        named = sample if is_mapping else getattr(sample, "keywords", {})
        tensors = sample if isinstance(sample, (tuple, list)) else () if is_mapping else (sample,)
        try:
            outputs = run(*tensors, **named)
        except (ValueError, RunError) as error:
            raise type(error)(f"sample {index}: {error}") from error
        yield outputs
