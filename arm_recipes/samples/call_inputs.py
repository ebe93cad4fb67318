"""Inputs of one call (``Inputs``), and the input signature that checks them (``InputSignature``)."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree

from arm_recipes._internal.conversions import describe_tensor, dtype_name, suggest_conversion

_ACCEPTED_INPUTS = (
    "inputs are tensors, NumPy arrays, numbers, booleans, strings and None, and lists, tuples, dicts and dataclasses "
    "of these"
)


class Inputs(tuple[Any, ...]):
    """Inputs of one call: ``Inputs(x, mask=m)`` stands for ``model(x, mask=m)``.

    Attributes:
        keywords: the keyword inputs. The tuple itself holds the positional inputs.
    """

    keywords: dict[str, Any]

    def __new__(cls, *args: Any, **keywords: Any) -> Inputs:
        """Create the inputs from the arguments of a call."""
        inputs = super().__new__(cls, args)
        inputs.keywords = keywords
        return inputs

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        arguments = [*map(repr, self), *(f"{name}={value!r}" for name, value in self.keywords.items())]
        return f"Inputs({', '.join(arguments)})"


def as_inputs(sample: Any, description: str, suffix: str = "") -> Inputs:
    """Normalize a sample: NumPy arrays become tensors, NumPy scalars become Python numbers.

    A tensor that occurs twice is copied, because PyTorch would capture both occurrences as one input.

    Args:
        sample: a tensor or array, a tuple or list of inputs, a dict of keyword inputs, or ``Inputs``.
        description: name of the sample in messages. The path of an invalid item is appended, for example ``['x']``.
        suffix: text to append after that path, such as " of method 'forward'".

    Raises:
        ValueError: the sample has another type, or contains a value of another type.
    """
    args, keywords = _split_arguments(sample, description + suffix)
    paths, spec = _flatten((args, keywords))
    seen_tensors: set[int] = set()
    leaves = []
    for path, leaf in paths:
        value = _normalize_leaf(leaf, f"{description}{pytree.keystr(path[1:])}{suffix}")
        if isinstance(value, torch.Tensor):
            value = value.detach().clone() if id(value) in seen_tensors else value
            seen_tensors.add(id(value))
        leaves.append(value)
    args, keywords = pytree.tree_unflatten(leaves, spec)
    return Inputs(*args, **keywords)


def _split_arguments(sample: Any, description: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample, Inputs):
        return tuple(sample), sample.keywords
    if isinstance(sample, (torch.Tensor, np.ndarray)):
        return (sample,), {}
    if isinstance(sample, (tuple, list)):
        return tuple(sample), {}
    if isinstance(sample, Mapping) and all(isinstance(name, str) for name in sample):
        return (), dict(sample)
    raise ValueError(
        f"{description} is of type {type(sample).__name__}; each sample must be a tensor or a tuple of the model's "
        "inputs, or a dict of its keyword inputs"
    )


def register_dataclasses(value: Any) -> bool:
    """Register unregistered dataclasses in ``value`` as pytree nodes. Returns whether there were any."""
    unregistered = {type(leaf) for leaf in pytree.tree_leaves(value) if dataclasses.is_dataclass(leaf)}
    for dataclass_type in unregistered:
        torch.export.register_dataclass(dataclass_type)
    return bool(unregistered)


def _flatten(value: Any) -> tuple[list[tuple[tuple[Any, ...], Any]], pytree.TreeSpec]:
    """Return the (path, leaf) pairs of ``value``, and its pytree structure."""
    while register_dataclasses(value):  # a field may also be an unregistered dataclass
        pass
    return pytree.tree_flatten_with_path(value)


def _normalize_leaf(value: Any, description: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(np.array(value, order="C"))
        except TypeError as error:
            raise ValueError(
                f"{description} is an array of {value.dtype}, which PyTorch does not support: {error}"
            ) from error
    if isinstance(value, torch.Tensor) and value.is_quantized:
        raise ValueError(f"{description} is a quantized tensor; pass its numbers, x.dequantize()")
    if value is None or isinstance(value, (torch.Tensor, bool, int, float, str)):
        return value
    text = repr(value)
    text = text if len(text) <= 80 else f"{text[:77]}..."
    raise ValueError(f"{description} is {text} ({type(value).__name__}); {_ACCEPTED_INPUTS}")


def input_description(sample: str, index: int, name: str) -> str:
    """Describe an input of a sample, for messages."""
    return f"{sample}, input {index} ('{name}')"


@dataclass(frozen=True)
class InputSignature:
    """The input signature of a model: the structure of its inputs as a pytree, and what each leaf must be.

    Attributes:
        names: names of the leaves, for messages.
        leaves: for each leaf a tensor (or fake tensor) with the expected shape and dtype, or the expected constant.
        spec: pytree structure of ``(args, kwargs)``.
    """

    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    @classmethod
    def from_inputs(cls, sample: Inputs) -> InputSignature:
        """The signature of a sample."""
        paths, spec = pytree.tree_flatten_with_path((tuple(sample), sample.keywords))
        return cls(tuple(pytree.keystr(path[1:]) for path, _ in paths), tuple(leaf for _, leaf in paths), spec)

    @classmethod
    def from_program(cls, program: ExportedProgram) -> InputSignature:
        """The signature of the inputs that a program was captured with."""
        values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
        args = [spec.arg for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
        leaves = (arg.value if isinstance(arg, ConstantArgument) else values[arg.name] for arg in args)
        return cls(tuple(arg.name for arg in args), tuple(leaves), program.call_spec.in_spec)

    @property
    def constants(self) -> dict[str, Any]:
        """The expected constants (the leaves that are not tensors), by name."""
        pairs = zip(self.names, self.leaves, strict=True)
        return {name: leaf for name, leaf in pairs if not isinstance(leaf, torch.Tensor)}

    def without_labels(self, sample: Inputs) -> Inputs:
        """Return the sample without surplus positional inputs, such as the labels of a ``DataLoader``."""
        return Inputs(*sample[: self.spec.children()[0].num_children], **sample.keywords)

    def flatten(self, sample: Inputs, description: str) -> list[Any]:
        """Return the sample's leaves in the model's order of inputs. Dicts may have their keys in any order.

        Raises:
            ValueError: the sample has another structure.
        """
        positional, named = self.spec.children()
        arity, keywords = positional.num_children, list(named.context or ())
        if len(sample) != arity:
            unknown = ", ".join(f"'{name}'" for name in sample.keywords if name not in keywords)
            hint = f" by position, and has no keyword input {unknown}" if unknown else ""
            raise ValueError(f"{description} has {len(sample)} inputs, the model takes {arity}{hint}")
        if sorted(sample.keywords) != sorted(keywords):
            listed = ", ".join(sample.keywords) or "none", ", ".join(keywords) or "none"
            raise ValueError(
                f"{description} has the keyword inputs {listed[0]}, the model was captured with {listed[1]}"
            )
        leaves, spec = pytree.tree_flatten((tuple(sample), sample.keywords))
        args, named_args = spec.children()
        try:
            return [
                *_reorder_leaves(leaves[: args.num_leaves], args, positional),
                *_reorder_leaves(leaves[args.num_leaves :], named_args, named),
            ]
        except ValueError as error:
            raise ValueError(
                f"{description} has another structure than the inputs that the model was captured with: {error}"
            ) from None

    def check_structure(self, sample: Inputs, description: str) -> list[Any]:
        """Check the structure: tensors where the model expects tensors, equal constants elsewhere.

        Returns:
            the leaves of the sample.

        Raises:
            ValueError: the sample differs; the message names the input.
        """
        leaves = self.flatten(sample, description)
        for index, (name, expected, value) in enumerate(zip(self.names, self.leaves, leaves, strict=True)):
            location = input_description(description, index, name)
            if isinstance(expected, torch.Tensor) and not isinstance(value, torch.Tensor):
                raise ValueError(f"{location} is of type {type(value).__name__}, not a tensor")
            if not isinstance(expected, torch.Tensor) and (type(value) is not type(expected) or value != expected):
                raise ValueError(
                    f"{location} is {value!r}, but the model was captured with {expected!r}: numbers, strings and "
                    "None are constants of the program; pass a tensor, or export a method for each value"
                )
        return leaves

    def check(self, sample: Inputs, description: str) -> list[Any]:
        """Check structure, shapes and dtypes of a sample.

        Returns:
            the leaves of the sample.

        Raises:
            ValueError: the sample differs; the message names the input.
        """
        leaves = self.check_structure(sample, description)
        for index, (name, expected, value) in enumerate(zip(self.names, self.leaves, leaves, strict=True)):
            if not isinstance(expected, torch.Tensor):
                continue
            if _matches_shape(value.shape, expected.shape) and value.dtype == expected.dtype:
                continue
            types = dtype_name(value.dtype), dtype_name(expected.dtype)
            is_static = all(isinstance(size, int) for size in expected.shape)
            hint = suggest_conversion(types[0], value.shape, types[1], expected.shape) if is_static else ""
            if value.dim() == expected.dim() and types[0] == types[1]:
                hint = hint or "; resize it, or export several sizes with dynamic_shapes= and sizes="
            raise ValueError(
                f"{input_description(description, index, name)} is {describe_tensor(types[0], value.shape)}, "
                f"the model takes {describe_tensor(types[1], expected.shape)}{hint}"
            )
        return leaves

    def unflatten(self, leaves: Sequence[Any]) -> Inputs:
        """Build the sample from its leaves."""
        args, keywords = pytree.tree_unflatten(list(leaves), self.spec)
        return Inputs(*args, **keywords)


def _reorder_leaves(
    leaves: Sequence[Any], spec: pytree.TreeSpec, captured: pytree.TreeSpec, path: str = ""
) -> list[Any]:
    """Reorder leaves to the captured structure, whose dicts may have their keys in another order.

    Args:
        leaves: the leaves.
        spec: their structure.
        captured: the structure that the model was captured with.
        path: path of the structure in the sample.

    Raises:
        ValueError: the structures differ in more than the order of keys. The message names the path.
    """
    if spec == captured:
        return list(leaves)
    names, expected = _child_keys(spec), _child_keys(captured)
    if spec.type is not captured.type:
        raise ValueError(f"{path} is a {_container_name(spec)}, not a {_container_name(captured)}")
    if sorted(map(repr, names)) != sorted(map(repr, expected)):
        for name in expected:
            if name not in names:
                raise ValueError(f"{path} has no item {name!r}")
        raise ValueError(f"{path} has an additional item {next(x for x in names if x not in expected)!r}")
    if spec.type not in pytree.STANDARD_DICT_TYPES and spec.context != captured.context:
        raise ValueError(f"{path} is a {_container_name(spec)} with other fields")
    remaining, children = list(leaves), {}
    for name, child in zip(names, spec.children(), strict=True):
        children[name], remaining = (child, remaining[: child.num_leaves]), remaining[child.num_leaves :]
    ordered = []
    for name, captured_child in zip(expected, captured.children(), strict=True):
        child, child_leaves = children[name]
        ordered += _reorder_leaves(child_leaves, child, captured_child, f"{path}[{name!r}]")
    return ordered


def _child_keys(spec: pytree.TreeSpec) -> list[Any]:
    """Return the keys of a dict, or the indices of another container."""
    if spec.type not in pytree.STANDARD_DICT_TYPES:
        return list(range(spec.num_children))
    return list(spec.context[1] if spec.type is defaultdict else spec.context)


def _container_name(spec: pytree.TreeSpec) -> str:
    return "single value" if spec.is_leaf() else spec.type.__name__


def _matches_shape(shape: torch.Size, expected: torch.Size) -> bool:
    if len(shape) != len(expected):
        return False
    # A symbolic dimension accepts any size here. The guards of torch.export check its range.
    return all(not isinstance(e, int) or size == e for size, e in zip(shape, expected, strict=True))


def rebatch(samples: Iterable[Inputs], input_signature: InputSignature) -> Iterator[Inputs]:
    """Rebatch the batches of a ``DataLoader`` to the batch size of ``input_signature``, by splitting or concatenating.

    The first dimension is the batch dimension. If the last batch is incomplete, its items are repeated to fill it, so
    that every item is used. A sample that has the right batch size already is yielded unchanged. A sample that differs
    in more than the batch size is yielded unchanged too, because later checks report it.
    """
    pending: list[torch.Tensor] = []
    leaves: list[Any] = []
    indices: list[int] = []
    size = 0
    for index, sample in enumerate(samples):
        leaves = input_signature.flatten(sample, f"sample {index}")
        batched = _batched_leaves(leaves, input_signature)
        if not batched or (pending and batched != indices):
            yield sample
            continue
        indices, size = batched, input_signature.leaves[batched[0]].shape[0]
        batch = [leaves[i] for i in indices]
        pending = [torch.cat(pair) for pair in zip(pending, batch, strict=True)] if pending else batch
        while pending and pending[0].shape[0] >= size:
            yield _replace_leaves(input_signature, leaves, indices, [tensor[:size] for tensor in pending])
            rest = [tensor[size:] for tensor in pending]
            pending = rest if rest[0].shape[0] else []
    if pending:
        count = pending[0].shape[0]
        wrapped = torch.arange(size) % count
        yield _replace_leaves(input_signature, leaves, indices, [tensor[wrapped] for tensor in pending])


def _batched_leaves(leaves: Sequence[Any], input_signature: InputSignature) -> list[int]:
    """Indices of the leaves that differ from the model's inputs in the first dimension only, the batch dimension.

    Empty if these leaves have different batch sizes, or a batch size is 0.
    """
    indices = []
    for i, (value, expected) in enumerate(zip(leaves, input_signature.leaves, strict=True)):
        if not isinstance(value, torch.Tensor) or not isinstance(expected, torch.Tensor):
            continue
        is_static = all(isinstance(size, int) for size in expected.shape)
        if not is_static or value.dim() != expected.dim() or value.dim() == 0 or value.shape == expected.shape:
            continue
        if value.shape[1:] == expected.shape[1:]:
            indices.append(i)
    batch_sizes = {(leaves[i].shape[0], input_signature.leaves[i].shape[0]) for i in indices}
    return indices if len(batch_sizes) == 1 and all(actual and model for actual, model in batch_sizes) else []


def _replace_leaves(
    input_signature: InputSignature, leaves: Sequence[Any], indices: Sequence[int], values: Sequence[Any]
) -> Inputs:
    changed = list(leaves)
    for i, value in zip(indices, values, strict=True):
        changed[i] = value
    return input_signature.unflatten(changed)
