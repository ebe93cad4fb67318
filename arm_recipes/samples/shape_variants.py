"""Dynamic shapes on fixed-shape targets: one method for each combination of the listed sizes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import sympy
import torch
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from arm_recipes.samples.call_inputs import Inputs, InputSignature
from arm_recipes.samples.export_arguments import Examples, Model
from arm_recipes.types import Sizes

#: The dynamic dimensions of a tensor: ``{1: Dim("seq")}`` for axis 1.
DynamicAxes = dict[int, Any]


@dataclass
class ShapeVariants:
    """A method with dynamic shapes, exported once per combination of sizes.

    Attributes:
        sizes_by_method: sizes of the dimensions by exported method, for example ``{"forward__seq_8": {"seq": 8}}``.
        inputs: names of the dynamic dimensions of each input tensor, by axis, for example ``[{1: "seq"}]``.
        outputs: names of the dynamic dimensions of each output tensor, by axis. ``infer_output_axes`` sets it.
    """

    sizes_by_method: dict[str, dict[str, int]]
    inputs: list[dict[int, str]]
    outputs: list[dict[int, str]] = field(default_factory=list)

    def infer_output_axes(self, shapes: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Infer which axes of the outputs are dynamic dimensions, from ``shapes``: the output shapes by method."""
        first, *_ = self.sizes_by_method
        self.outputs = [
            {
                axis: name
                for axis in range(len(shape))
                if (name := self._find_dimension(index, axis, shapes)) is not None
            }
            for index, shape in enumerate(shapes[first])
        ]

    def _find_dimension(self, index: int, axis: int, shapes: Mapping[str, Sequence[Sequence[int]]]) -> str | None:
        """Find the dimension whose size equals the size of the output's axis in all methods.

        The dimension must have at least two sizes. With only one size, an unrelated axis could have this size, too.
        """
        first, *_ = self.sizes_by_method.values()
        for name in first:
            listed = {sizes[name] for sizes in self.sizes_by_method.values()}
            if len(listed) > 1 and all(
                shapes[m][index][axis] == sizes[name] for m, sizes in self.sizes_by_method.items()
            ):
                return name
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the sizes (key ``methods``), ``inputs`` and ``outputs`` as a dict, ready for JSON."""
        return {"methods": self.sizes_by_method, "inputs": self.inputs, "outputs": self.outputs}


def expand_methods_by_size(
    models: Mapping[str, Model], examples: Examples, dynamic_shapes: Any, sizes: Sizes
) -> tuple[dict[str, Model], Examples, dict[str, ShapeVariants]]:
    """Replace each method that has dynamic shapes by one method per combination of sizes.

    A sample fits a method if it is at least as large as the method's sizes in all dimensions. Each sample except the
    first calibrates the fitting method with the largest product of sizes, and is truncated to these sizes. A sample
    that fits no method is not used. The first sample calibrates every method. It is truncated, and repeated where it is
    too short.

    Returns:
        models, samples, and shape variants, by method name.

    Raises:
        ValueError: ``sizes`` names an unknown dimension or lacks one, a size is out of the dimension's bounds, inputs
            have only a derived dimension (``2 * n``, but not ``n``), or ``dynamic_shapes`` is invalid.
    """
    is_by_method = isinstance(dynamic_shapes, Mapping) and dynamic_shapes.keys() <= models.keys()
    by_method = dynamic_shapes if is_by_method else {"forward": dynamic_shapes}
    variants: dict[str, ShapeVariants] = {}
    all_models: dict[str, Model] = {}
    all_examples: Examples = {}
    all_dims: dict[str, Any] = {}
    for method, model in models.items():
        shape_spec = by_method.get(method)
        if shape_spec is not None:
            axes = _dynamic_axes(model, examples[method][0], shape_spec)
        else:
            axes = program_axes(model) if isinstance(model, ExportedProgram) else []
        dims = {dim.__name__: dim for leaf_axes in axes for dim in map(_root_dimension, leaf_axes.values())}
        all_dims |= dims
        if not dims:
            all_models[method], all_examples[method] = model, examples[method]
            continue
        _check_sizes(dims, sizes)
        combinations = [dict(zip(dims, values, strict=True)) for values in product(*(sizes[name] for name in dims))]
        sizes_by_method = {_variant_name(method, combination): combination for combination in combinations}
        for name, samples in _distribute_samples(examples[method], axes, sizes_by_method).items():
            all_models[name] = model.module() if isinstance(model, ExportedProgram) else model
            all_examples[name] = samples
        names_on_inputs = {dim.__name__ for leaf_axes in axes for dim in leaf_axes.values()}
        for name in dims.keys() - names_on_inputs:
            raise ValueError(
                f"dynamic_shapes: no input has the dimension '{name}' itself, only a derived one, so the program "
                "cannot select a size by it"
            )
        dimension_names = [
            {axis: dim.__name__ for axis, dim in leaf_axes.items() if _root_dimension(dim) is dim} for leaf_axes in axes
        ]
        tensors = pytree.tree_leaves((tuple(examples[method][0]), examples[method][0].keywords))
        inputs = [
            leaf_axes
            for leaf_axes, tensor in zip(dimension_names, tensors, strict=True)
            if isinstance(tensor, torch.Tensor)
        ]
        variants[method] = ShapeVariants(sizes_by_method, inputs)
    for name in sizes:
        if name not in all_dims:
            listed = ", ".join(f"'{dim}'" for dim in all_dims) or "none"
            raise ValueError(f"sizes: there is no dynamic dimension '{name}'; there are: {listed}")
    return all_models, all_examples, variants


def program_axes(program: ExportedProgram) -> list[DynamicAxes]:
    """Return the dynamic dimensions of each input of a program, in the order of ``InputSignature``.

    A saved program lacks the names of its dimensions. If the size of an axis is a symbol, the dimension is named after
    the first input and axis with this symbol: ``x_0`` for axis 0 of input ``x``. All other symbolic sizes must be
    linear in one of these symbols, such as ``2 * x_0``.

    Raises:
        ValueError: the size of an axis is another expression.
    """
    input_signature = InputSignature.from_program(program)
    shapes: list[Any] = [leaf.shape if isinstance(leaf, torch.Tensor) else () for leaf in input_signature.leaves]
    expressions = {
        name: {axis: size.node.expr for axis, size in enumerate(shape) if not isinstance(size, int)}
        for name, shape in zip(input_signature.names, shapes, strict=True)
    }
    dims: dict[sympy.Symbol, Any] = {}
    for name, axes in expressions.items():
        for axis, expression in axes.items():
            if expression.is_Symbol and expression not in dims:
                bounds = program.range_constraints[expression]
                upper = int(bounds.upper) if bounds.upper.is_Integer else None
                dims[expression] = Dim(f"{name}_{axis}", min=int(bounds.lower), max=upper)
    return [
        {axis: derive_dimension(expression, dims, f"{name}_{axis}") for axis, expression in axes.items()}
        for name, axes in expressions.items()
    ]


def derive_dimension(expression: sympy.Expr, dims: Mapping[sympy.Symbol, Any], name: str) -> Any:
    """Convert a size expression to a ``Dim``: one of ``dims``, or ``factor * dim + offset``.

    Args:
        expression: the size of a dimension.
        dims: dimensions by the symbol of their size.
        name: name of the dimension in the message.

    Raises:
        ValueError: the expression has another form.
    """
    symbols = expression.free_symbols
    if len(symbols) == 1 and (symbol := next(iter(symbols))) in dims:
        factor, offset = expression.coeff(symbol, 1), expression.coeff(symbol, 0)
        if factor.is_Integer and offset.is_Integer and factor * symbol + offset == expression:
            scaled = dims[symbol] if factor == 1 else dims[symbol] * int(factor)
            return scaled if offset == 0 else scaled + int(offset)
    raise ValueError(
        f"sizes: the dynamic dimension '{name}' is {expression}, which is not linear in the size of another input: "
        "export the program with dynamic_shapes and sizes from Python"
    )


def _variant_name(method: str, sizes: Mapping[str, int]) -> str:
    return method + "".join(f"__{name}_{size}" for name, size in sizes.items())


def _check_sizes(dims: Mapping[str, Any], sizes: Sizes) -> None:
    for name, dim in dims.items():
        listed = sizes.get(name)
        if not listed:
            raise ValueError(
                f"sizes: there are none for the dynamic dimension '{name}', and Arm targets are compiled for "
                f"fixed shapes: list the sizes to export, sizes={{'{name}': [1, 8]}}"
            )
        for size in listed:
            if type(size) is not int or not dim.min <= size <= dim.max:
                raise ValueError(f"sizes: {size!r} of '{name}' is not a size from {dim.min} to {dim.max}, its bounds")


def _root_dimension(dim: Any) -> Any:
    """Return the dimension that a derived dimension is computed from; for other dimensions, the dimension itself."""
    return getattr(dim, "root", dim)


def _dynamic_axes(model: Model, sample: Inputs, shape_spec: Any) -> list[DynamicAxes]:
    """Return the dynamic dimensions of each leaf of a sample, in the order of ``InputSignature``.

    Raises:
        ValueError: a dimension has no name, or ``shape_spec`` does not match the structure of the sample.
    """
    forward = (model.module() if isinstance(model, ExportedProgram) else model).forward
    names = [name for name in inspect.signature(forward).parameters if name not in sample.keywords]
    argument_names = [*names[: len(sample)], *sample.keywords]

    def spec_of(index: int, name: str) -> Any:
        if isinstance(shape_spec, Mapping):
            return shape_spec.get(name)
        return shape_spec[index] if index < len(shape_spec) else None

    argument_names += ["*"] * (len(sample) + len(sample.keywords) - len(argument_names))
    values = [*sample, *sample.keywords.values()]
    return [
        leaf_axes
        for i, (value, name) in enumerate(zip(values, argument_names, strict=True))
        for leaf_axes in _leaf_axes(value, spec_of(i, name), name)
    ]


def _leaf_axes(value: Any, shape_spec: Any, name: str) -> Iterator[DynamicAxes]:
    if isinstance(value, torch.Tensor):
        pairs = shape_spec.items() if isinstance(shape_spec, Mapping) else enumerate(shape_spec or ())
        yield {axis % max(value.dim(), 1): dim for axis, dim in pairs if _is_dynamic(dim, name)}
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaf_axes(item, (shape_spec or {}).get(key), name)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaf_axes(item, None if shape_spec is None else shape_spec[index], name)
    else:
        yield from ({} for _ in pytree.tree_leaves(value))


def _is_dynamic(dim: Any, name: str) -> bool:
    if dim is None or isinstance(dim, int) or dim is Dim.STATIC:
        return False
    if not isinstance(dim, Dim):
        raise ValueError(
            f"dynamic_shapes: a dimension of '{name}' is {dim}, which has no name to list sizes for: name it, "
            "torch.export.Dim('seq', min=1, max=64)"
        )
    return True


def _distribute_samples(
    samples: Sequence[Inputs], axes: Sequence[DynamicAxes], sizes_by_method: Mapping[str, Mapping[str, int]]
) -> Examples:
    """Resize and assign the samples to methods, as ``expand_methods_by_size`` describes."""
    by_method = {name: [_resize(samples[0], axes, sizes)] for name, sizes in sizes_by_method.items()}
    for index, sample in enumerate(samples):
        fitting = [name for name, sizes in sizes_by_method.items() if _is_large_enough(sample, axes, sizes)]
        if fitting:
            largest = max(fitting, key=lambda name: math.prod(sizes_by_method[name].values()))
            resized = _resize(sample, axes, sizes_by_method[largest])
            if index == 0:
                by_method[largest][0] = resized
            else:
                by_method[largest].append(resized)
    return by_method


def _is_large_enough(sample: Inputs, axes: Sequence[DynamicAxes], sizes: Mapping[str, int]) -> bool:
    leaves = pytree.tree_leaves((tuple(sample), sample.keywords))
    pairs = (
        (leaf.shape[axis], dim) for leaf, leaf_axes in zip(leaves, axes, strict=True) for axis, dim in leaf_axes.items()
    )
    return all(_resolve_size(dim, sizes) <= size for size, dim in pairs)


def _resolve_size(dim: Any, sizes: Mapping[str, int]) -> int:
    size = sizes[_root_dimension(dim).__name__]
    return int(dim.fn(size)) if _root_dimension(dim) is not dim else size


def _resize(sample: Inputs, axes: Sequence[DynamicAxes], sizes: Mapping[str, int]) -> Inputs:
    """Truncate or repeat a sample along the dynamic dimensions to the given sizes."""
    leaves, spec = pytree.tree_flatten((tuple(sample), sample.keywords))
    resized = []
    for leaf, leaf_axes in zip(leaves, axes, strict=True):
        for axis, dim in leaf_axes.items():
            indices = torch.arange(_resolve_size(dim, sizes)) % max(leaf.shape[axis], 1)
            leaf = leaf.index_select(axis, indices)
        resized.append(leaf)
    args, keywords = pytree.tree_unflatten(resized, spec)
    return Inputs(*args, **keywords)
