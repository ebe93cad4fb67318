"""Samples that do not fit the model: find the wrong input, the dtype and shape that it must have, and a conversion.

A conversion is tried before a message suggests it: the model runs on fake tensors of the converted dtypes and shapes.
"""

from __future__ import annotations

import inspect
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from arm_backend_core.scalar_kind import ScalarKind, kind_of
from arm_recipes._internal.conversions import (
    Conversion,
    describe_tensor,
    dtype_conversion_code,
    dtype_name,
    list_shape_conversions,
)
from arm_recipes.samples.call_inputs import Inputs, InputSignature, input_description
from arm_recipes.samples.operand_dtypes import RequireEqualDtypes

#: Trials stop after this number of seconds.
_MAX_SECONDS = 20.0
#: Spatial sizes are tried if they differ from the estimated size by at most this number.
_SIZE_RADIUS = 3
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_arguments(model: Any, sample: Inputs, description: str) -> None:
    """Check that the model can be called with a sample: the number of inputs, and their names.

    Args:
        model: the model. For an ``ExportedProgram``, dtypes and shapes are also checked.
        sample: the sample.
        description: name of the sample in messages.

    Raises:
        ValueError: the sample does not fit the model. The message lists the inputs of the model, or names the input
            that does not fit.
    """
    if isinstance(model, ExportedProgram):
        input_signature = InputSignature.from_program(model)
        arity = input_signature.spec.children()[0].num_children
        if len(sample) > arity:
            raise ValueError(_describe_surplus(sample, description, input_signature.names[:arity], arity))
        input_signature.check(sample, description)
        return
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*sample, **sample.keywords)
        return
    except TypeError as error:
        problem = str(error)
    parameters = signature.parameters
    known = [name for name, item in parameters.items() if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]
    listed = f"the model takes {', '.join(known) or 'none'}"
    accepts_any = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
    unknown = [name for name in sample.keywords if name not in known and not accepts_any]
    positional = [name for name in known if parameters[name].kind in _POSITIONAL]
    if unknown:
        raise ValueError(
            f"{description} has the key '{unknown[0]}', which is not an input; {listed}; rename or drop it"
        )
    if len(sample) > len(positional):
        raise ValueError(_describe_surplus(sample, description, known, len(positional)))
    required = [name for name in known[len(sample) :] if parameters[name].default is inspect.Parameter.empty]
    missing = [name for name in required if name not in sample.keywords]
    if missing:
        raise ValueError(f"{description} lacks the input '{missing[0]}'; {listed}; add it to each sample")
    raise ValueError(f"{description} does not fit the model: {problem}; {listed}")


def _describe_surplus(sample: Inputs, description: str, names: Sequence[str], count: int) -> str:
    """Describe a sample with more items than the ``count`` positional inputs of the model, and what to do."""
    samples = "[(sample[0],) for sample in samples]" if count == 1 else f"[sample[:{count}] for sample in samples]"
    return (
        f"{description} has {len(sample)} inputs; the model takes {', '.join(names) or 'none'}; if labels follow the "
        f"inputs, pass labels=True to export(), and the report has the accuracy; else leave out additional items, "
        f"{samples}, or pass a DataLoader itself, whose additional items are left out"
    )


def input_names(model: torch.nn.Module, sample: Inputs) -> list[str]:
    """Return the name of each leaf of a sample, from the parameters of ``forward``, such as ``x`` or ``states[0]``."""
    bound = inspect.signature(model.forward).bind(*sample, **sample.keywords)
    positional: list[str] = []
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind in _POSITIONAL:
            positional.append(name)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            positional += [f"{name}[{index}]" for index in range(len(value))]
    paths, _ = pytree.tree_flatten_with_path((tuple(sample), sample.keywords))
    names = []
    for path, _ in paths:
        side, first, *rest = cast(tuple[Any, ...], path)
        name = positional[first.idx] if side.idx == 0 else first.key
        names.append(name + pytree.keystr(tuple(rest)))
    return names


@dataclass(frozen=True)
class _Change:
    """A change of one leaf of a sample to another dtype or shape.

    Attributes:
        leaf: index of the leaf.
        dtype: the new dtype.
        shape: the new shape.
        code: code to append to the leaf, such as ``.unsqueeze(0)``; "" if no code can convert the leaf.
        reason: why the leaf does not fit, or "".
    """

    leaf: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    code: str
    reason: str


def describe_input_mismatch(model: torch.nn.Module, sample: Inputs, description: str, error: Exception) -> str | None:
    """Describe the input that does not fit the model, after a call of the model failed.

    Args:
        model: the model, in evaluation mode.
        sample: the inputs of the call.
        description: name of the sample in messages.
        error: the exception that the call raised.

    Returns:
        one sentence: the input, its dtype and shape, the dtype and shape that the model takes, and the remedy. None if
        the model runs on fake tensors without a conversion, if no conversion helps, or after ``_MAX_SECONDS``.
    """
    leaves, spec = pytree.tree_flatten((tuple(sample), sample.keywords))
    tensors = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    deadline = time.monotonic() + _MAX_SECONDS
    with _preserve_attributes(model):
        if not tensors or _runs(model, leaves, spec, ()):
            return None
        layer = _find_layer(error, model)
        weight_dtype = _weight_dtype(model)
        for changes in (*_list_changes(tensors, weight_dtype), *_list_changes_for_layer(tensors, layer)):
            if time.monotonic() > deadline:
                return None
            if _runs(model, leaves, spec, changes):
                names = input_names(model, sample)
                return _describe_changes(changes, tensors, names, description, weight_dtype)
    return None


def _runs(model: torch.nn.Module, leaves: Sequence[Any], spec: Any, changes: Sequence[_Change]) -> bool:
    """Whether the model runs on fake tensors with some leaves changed."""
    changed = {change.leaf: change for change in changes}
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            state: dict[str, torch.Tensor] = {
                name: mode.from_tensor(value)
                for name, value in (*model.named_parameters(), *model.named_buffers())
                if isinstance(value, torch.Tensor)
            }
            fakes = [
                torch.empty(changed[index].shape, dtype=changed[index].dtype)
                if index in changed
                else mode.from_tensor(leaf)
                if isinstance(leaf, torch.Tensor)
                else leaf
                for index, leaf in enumerate(leaves)
            ]
            args, keywords = pytree.tree_unflatten(fakes, spec)
            with RequireEqualDtypes():
                torch.func.functional_call(model, state, args, keywords)
    except Exception:
        return False
    return True


@contextmanager
def _preserve_attributes(model: torch.nn.Module) -> Iterator[None]:
    """Restore attributes that ``forward`` assigns."""
    saved = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in saved:
            vars(module).clear()
            vars(module).update(attributes)


def _weight_dtype(model: torch.nn.Module) -> torch.dtype:
    """The dtype of all floating-point weights; float32 if there are none or several."""
    dtypes = {weight.dtype for weight in model.parameters() if kind_of(weight.dtype) is ScalarKind.FLOAT}
    return next(iter(dtypes)) if len(dtypes) == 1 else torch.float32


def _list_changes(tensors: Mapping[int, torch.Tensor], weight_dtype: torch.dtype) -> Iterator[tuple[_Change, ...]]:
    """Yield the changes of dtype, axis order and batch dimension to try.

    Every item converts the floating-point inputs to the dtype of the weights. The first item does only this; it is
    omitted if all have this dtype. In each later item, one input also gets another dtype or shape, or all inputs get a
    batch dimension.
    """
    dtypes = {
        index: weight_dtype if kind_of(tensor.dtype) is ScalarKind.FLOAT else tensor.dtype
        for index, tensor in tensors.items()
    }
    base = tuple(
        _change(index, tensor, dtypes[index]) for index, tensor in tensors.items() if dtypes[index] != tensor.dtype
    )
    if base:
        yield base
    for index, tensor in tensors.items():
        others = tuple(change for change in base if change.leaf != index)
        for dtype in dict.fromkeys((dtypes[index], weight_dtype, torch.int64)):
            if dtype != dtypes[index]:
                yield (_change(index, tensor, dtype), *others)
            for conversion in list_shape_conversions(tensor.shape):
                yield (_change(index, tensor, dtype, conversion), *others)
    if len(tensors) > 1:
        yield tuple(_change(index, tensor, dtypes[index], _add_batch(tensor)) for index, tensor in tensors.items())


def _add_batch(tensor: torch.Tensor) -> Conversion:
    return Conversion(".unsqueeze(0)", (1, *tensor.shape), "the batch dimension is missing")


def _change(index: int, tensor: torch.Tensor, dtype: torch.dtype, conversion: Conversion | None = None) -> _Change:
    code = dtype_conversion_code(dtype_name(tensor.dtype), dtype_name(dtype))
    if conversion is None:
        return _Change(index, dtype, tuple(tensor.shape), code, "")
    return _Change(index, dtype, conversion.shape, conversion.code + code, conversion.reason)


def _find_layer(error: Exception, model: torch.nn.Module) -> tuple[str, torch.nn.Module, torch.Tensor] | None:
    """Find the innermost layer whose call raised ``error``, and return its name, the layer, and the layer's input."""
    names = {id(module): name for name, module in model.named_modules()}
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module, value = frame.f_locals.get("self"), frame.f_locals.get("input")
        if isinstance(module, torch.nn.Module) and id(module) in names and isinstance(value, torch.Tensor):
            found = names[id(module)], module, value
    return found


def _list_changes_for_layer(
    tensors: Mapping[int, torch.Tensor], layer: tuple[str, torch.nn.Module, torch.Tensor] | None
) -> Iterator[tuple[_Change, ...]]:
    """Yield changes of an input's shape with which the layer may get its ``in_channels`` or ``in_features``.

    The first changes set the axis of the channels or features to this number. Further changes set the spatial sizes, on
    which the number of features may depend.
    """
    if layer is None:
        return
    name, module, value = layer
    channels, features = getattr(module, "in_channels", None), getattr(module, "in_features", None)
    what = f"'{name}' ({type(module).__name__}) takes {channels or features} {'channels' if channels else 'features'}"
    for index, tensor in tensors.items():
        for axis, size in ((1, channels), (-1, features)):
            if size and tensor.dim() > 1:
                shape = list(tensor.shape)
                shape[axis] = size
                yield (_Change(index, tensor.dtype, tuple(shape), "", what),)
        if features and value.dim() and tensor.dim() > 2:
            yield from _list_spatial_changes(index, tensor, features / value.shape[-1], what)


def _list_spatial_changes(index: int, tensor: torch.Tensor, ratio: float, reason: str) -> Iterator[tuple[_Change, ...]]:
    """Yield spatial sizes whose product is about ``ratio`` times that of the tensor. Multiples of 8 come first."""
    spatial = tensor.shape[2:]
    scale = float(ratio ** (1 / len(spatial)))
    offsets = range(-_SIZE_RADIUS, _SIZE_RADIUS + 1)
    candidates = [tuple(max(1, round(size * scale) + offset) for size in spatial) for offset in offsets]
    for sizes in sorted(candidates, key=lambda sizes: sum(size % 8 != 0 for size in sizes)):
        yield (_Change(index, tensor.dtype, (*tensor.shape[:2], *sizes), "", reason),)


def _describe_changes(
    changes: Sequence[_Change],
    tensors: Mapping[int, torch.Tensor],
    names: Sequence[str],
    description: str,
    weight_dtype: torch.dtype,
) -> str:
    change = changes[0]
    tensor, name = tensors[change.leaf], names[change.leaf]
    got = describe_tensor(dtype_name(tensor.dtype), tensor.shape)
    expected = describe_tensor(dtype_name(change.dtype), change.shape)
    text = f"{input_description(description, change.leaf, name)} is {got}, the model takes {expected}"
    if change.shape == tuple(tensor.shape) and change.dtype == weight_dtype != torch.float32:
        weight = f"its weights are {dtype_name(weight_dtype)}"
        converted = "" if tensor.dtype == torch.float32 else " and float32 samples"
        return f"{text}: {weight}; pass the model converted with model.float(){converted}"
    if change.reason:
        text += f": {change.reason}"
    if not change.code:
        return f"{text}; pass samples of that shape"
    codes = [f"{names[item.leaf]}{item.code}" for item in changes]
    scaled = kind_of(tensor.dtype) is not ScalarKind.FLOAT and kind_of(change.dtype) is ScalarKind.FLOAT
    return f"{text}; pass {', '.join(codes)}{', scaled as in training' if scaled else ''}"
