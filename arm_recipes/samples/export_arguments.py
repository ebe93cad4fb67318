"""Arguments ``model`` and ``samples``: validation, and normalization to a dict by method name."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from executorch.export import ExportRecipe, RecipeType
from torch.export import ExportedProgram
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data import DataLoader

from arm_recipes._internal.file_kinds import STATE_DICT
from arm_recipes._internal.files import check_saved_program
from arm_recipes.samples.call_inputs import Inputs, InputSignature, as_inputs, rebatch
from arm_recipes.samples.operand_dtypes import check_operand_dtypes
from arm_recipes.samples.optional_labels import optional_input_notes, reject_optional_label
from arm_recipes.samples.quantized_models import reject_quantized_model

Model = torch.nn.Module | ExportedProgram
#: Samples by method name. The first sample is used to capture the model, all samples to calibrate it.
Examples = dict[str, list[Inputs]]


def models_by_method(model: Any) -> dict[str, Model]:
    """Return the models by method name. A single model is the method 'forward'. Files are loaded.

    Raises:
        ValueError: the file does not exist or is not a saved program, a program has an operator with operands of
            unequal dtypes, the name of a method is not an identifier, or the dict is empty.
        TypeError: a value is not a model (a state dict, for example), is a quantized model, or has a weight of a tensor
            subclass without ``dequantize()``.
    """
    by_method = model if isinstance(model, Mapping) else {"forward": model}
    if any(_is_state_dict(value) for value in (model, *by_method.values())):
        raise TypeError(f"model: got {STATE_DICT}, and pass the model")
    if not by_method:
        raise ValueError("model: the dict of methods is empty")
    return _dequantize_weights({method: _check_model(method, value) for method, value in by_method.items()})


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(item, torch.Tensor) for item in value.values())


def _dequantize_weights(models: dict[str, Model]) -> dict[str, Model]:
    """Dequantize the weights that torchao's ``quantize_`` quantized.

    If there are such weights, all modules are copied; the copies share the other weights with the originals. Other
    effects of ``quantize_``, such as dynamic quantization of activations, are dropped: the recipe quantizes the model.
    """
    modules = {method: model for method, model in models.items() if isinstance(model, torch.nn.Module)}
    tensors: list[Any] = [x for model in modules.values() for x in (*model.parameters(), *model.buffers())]
    if not any(map(is_traceable_wrapper_subclass, tensors)):
        return models
    return models | copy.deepcopy(modules, {id(x): _dequantize(x) for x in tensors})


def _dequantize(weight: Any) -> Any:
    if not is_traceable_wrapper_subclass(weight):
        return weight
    if not hasattr(weight, "dequantize"):
        raise TypeError(f"model: a weight is a {type(weight).__name__}, which has no dequantize(); use a plain tensor")
    tensor_subclass: Any = weight
    return torch.nn.Parameter(tensor_subclass.detach().dequantize(), requires_grad=False)


def _check_model(method: Any, value: Any) -> Model:
    if not isinstance(method, str) or not method.isidentifier():
        raise ValueError(f"model: method name {method!r} is not an identifier")
    if isinstance(value, (str, Path)):
        return _check_program(method, _load_program(value))
    if isinstance(value, type) and issubclass(value, torch.nn.Module):
        raise TypeError(f"model: got the class {value.__name__}; pass an instance")
    if isinstance(value, torch.jit.ScriptModule):
        raise TypeError("model: a ScriptModule cannot be captured; pass the nn.Module that it was created from")
    if not isinstance(value, (torch.nn.Module, ExportedProgram)):
        raise TypeError(
            "model: must be an nn.Module, an ExportedProgram, a path to a saved one, or a dict of them by "
            f"method name; got {type(value).__name__}"
        )
    if isinstance(value, torch.nn.Module):
        reject_quantized_model(value)
        return value
    return _check_program(method, value)


def _check_program(method: str, program: ExportedProgram) -> ExportedProgram:
    try:
        check_operand_dtypes(program.graph)
    except RuntimeError as error:
        raise ValueError(f"model: the program of '{method}' cannot run: {error}, and capture the model again") from None
    return program


def _load_program(path: str | Path) -> ExportedProgram:
    file = check_saved_program(path)
    try:
        return torch.export.load(str(file))
    except Exception as error:
        raise ValueError(
            f"model: '{path}' is not a program saved by torch.export.save ({type(error).__name__}: {error})"
        ) from error


def examples_by_method(samples: Any, models: Mapping[str, Model], *, from_loader: bool = False) -> Examples:
    """Return the samples by method, as ``Inputs``. Without samples, an exported program uses its example inputs.

    Args:
        samples: the argument ``samples``.
        models: models by method.
        from_loader: whether the samples come from a ``DataLoader``, although ``samples`` is another iterable, such as a
            list of its batches.

    Raises:
        ValueError: a method has no samples, or a sample is not a valid model input.
    """
    by_method = dict(samples) if isinstance(samples, Mapping) else {}
    if not isinstance(samples, Mapping) and samples is not None:
        if len(models) > 1:
            raise ValueError(f"samples: give a dict of lists of input tuples for {_quote_names(models)}")
        by_method = {next(iter(models)): samples}
    unknown = [method for method in by_method if method not in models]
    if unknown:
        hint = f"; keyword inputs go into a list: [{{'{unknown[0]}': ...}}]" if len(models) == 1 else ""
        raise ValueError(f"samples: no method '{unknown[0]}' in the model; it has {_quote_names(models)}{hint}")
    return {
        method: _normalize_examples(method, model, by_method.get(method), from_loader)
        for method, model in models.items()
    }


def _quote_names(models: Mapping[str, Model]) -> str:
    return ", ".join(f"'{method}'" for method in models)


def _normalize_examples(method: str, model: Model, method_samples: Any, from_loader: bool) -> list[Inputs]:
    if method_samples is None and isinstance(model, ExportedProgram) and model.example_inputs is not None:
        args, kwargs = model.example_inputs
        method_samples = [Inputs(*args, **kwargs)]
    if method_samples is None:
        raise ValueError(f"samples is missing for method '{method}': give a list of input tuples, [(x,)]")
    is_loader = from_loader or isinstance(method_samples, DataLoader)
    samples = to_sample_list(method, method_samples)
    if is_loader:
        samples = [without_labels(model, sample) for sample in samples]
        for sample in samples[:1]:
            reject_optional_label(model, sample, f" of method '{method}'")
    if not samples:
        raise ValueError(f"samples of method '{method}' is empty: give a list of input tuples, [(x,)]")
    suffix = f" of method '{method}'"
    first, *others = (as_inputs(sample, f"samples[{i}]", suffix) for i, sample in enumerate(samples))
    input_signature = InputSignature.from_inputs(first)
    if is_loader:
        others = list(rebatch(others, input_signature))
    checked = (
        input_signature.check_structure(sample, f"samples[{index}]{suffix}") for index, sample in enumerate(others, 1)
    )
    return [first, *map(input_signature.unflatten, checked)]


def to_sample_list(method: str, method_samples: Any, argument: str = "samples") -> list[Any]:
    """Convert the samples of a method to a list. The samples themselves are not converted.

    Args:
        method: name of the method, for messages.
        method_samples: the argument for this method.
        argument: name of the argument, for messages.

    Raises:
        ValueError: ``method_samples`` is not an iterable of samples.
    """
    if isinstance(method_samples, (torch.Tensor, np.ndarray)):
        return [(method_samples,)]
    if isinstance(method_samples, Inputs) or (
        isinstance(method_samples, tuple) and not all(isinstance(item, (tuple, Mapping)) for item in method_samples)
    ):
        return [method_samples]
    source = method_samples() if callable(method_samples) else method_samples
    if not isinstance(source, Iterable) or isinstance(source, (str, bytes)):
        raise ValueError(
            f"{argument} of method '{method}' must be a list of input tuples, [(x,)], a DataLoader or any other "
            f"iterable of samples; got {type(source).__name__}"
        )
    samples = list(source)
    if isinstance(method_samples, (list, tuple)) and any(
        isinstance(sample, (torch.Tensor, np.ndarray)) for sample in samples
    ):
        # Ambiguous: one sample with several inputs, or several samples with one input each.
        index = next(i for i, sample in enumerate(samples) if isinstance(sample, (torch.Tensor, np.ndarray)))
        kind = type(samples[index]).__name__
        raise ValueError(
            f"{argument}[{index}] of method '{method}' must be a tuple of the model's inputs, got {kind}; write [(x,)] "
            "for one sample, and [(x, label)] with labels=True to measure accuracy"
        )
    return samples


def without_labels(model: Model, sample: Any) -> Any:
    """Remove the labels that a ``DataLoader`` appends: (image, label) becomes (image,).

    The result has at most as many items as ``forward`` has positional parameters, including those with a default value.
    If ``forward`` has ``*args``, the sample is returned unchanged.
    """
    if not isinstance(sample, (tuple, list)) or isinstance(sample, Inputs):
        return sample
    if isinstance(model, ExportedProgram):
        return sample[: model.call_spec.in_spec.children()[0].num_children]
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return sample
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sample[: sum(parameter.kind in positional for parameter in parameters)]


def resolve_loaders(samples: Any) -> Any:
    """Replace each function that returns a ``DataLoader`` by that loader, also in a dict of methods.

    Any other function is called once, and replaced by a function that returns the same result.
    """
    if isinstance(samples, Mapping):
        return {method: resolve_loaders(method_samples) for method, method_samples in samples.items()}
    if not callable(samples):
        return samples
    source = samples()
    return source if isinstance(source, DataLoader) else lambda: source


def batch_size_notes(samples: Any, models: Mapping[str, Model], examples: Examples) -> list[str]:
    """Return notes on the batch size of methods whose samples are a ``DataLoader`` or a bare tensor.

    A second note names items of a ``DataLoader``'s batches that become inputs of the model, but may be labels.

    An ``ExportedProgram`` gets no note, because its batch size is fixed. A method with other samples, such as a list,
    gets none, because the user chose their batch size.

    Args:
        samples: the argument ``samples``, after ``resolve_loaders``.
        models: models by method.
        examples: the result of ``examples_by_method``.
    """
    samples_by_method = samples if isinstance(samples, Mapping) else dict.fromkeys(models, samples)
    notes: list[str] = []
    for method, model in models.items():
        loader = samples_by_method.get(method)
        if isinstance(model, ExportedProgram):
            continue
        if isinstance(loader, (torch.Tensor, np.ndarray)):
            notes += _bare_tensor_notes(method, loader)
        if not isinstance(loader, DataLoader):
            continue
        notes += optional_input_notes(method, model, examples[method][0])
        size = _batch_size(loader, examples[method][0])
        if size > 1:
            notes.append(
                f"'{method}' is compiled for batch size {size}, the batch size of the DataLoader, and computes {size} "
                "items in every run. For batch size 1 use DataLoader(..., batch_size=1), or pass one sample as samples "
                "and the DataLoader as calibration_samples of the recipe, which splits its batches"
            )
    return notes


def _bare_tensor_notes(method: str, tensor: torch.Tensor | np.ndarray[Any, Any]) -> Iterator[str]:
    """Yield a note on samples that are one tensor, which may hold several samples or lack the batch dimension."""
    shape = tuple(tensor.shape)
    if shape and shape[0] > 1:
        remedies = [f"if it holds {shape[0]} samples, pass [(part,) for part in x.split(1)]"] * (len(shape) > 1)
        remedies += ["if it lacks the batch dimension, pass [(x.unsqueeze(0),)]"] * (len(shape) in (1, 3))
        yield (
            f"the samples of '{method}' are one tensor x, which is used as one sample: the program takes "
            f"[{', '.join(map(str, shape))}] in every run; {'; '.join(remedies)}"
        )


def _batch_size(loader: DataLoader[Any], first: Inputs) -> int:
    """Return the number of items of the first batch.

    Returns 1 if the loader yields single samples (``batch_size=None``). Also returns 1 if the first dimension of the
    inputs cannot be the batch dimension, because its size differs among the inputs or exceeds the loader's batch size.
    """
    tensors = [leaf for leaf in InputSignature.from_inputs(first).leaves if isinstance(leaf, torch.Tensor)]
    sizes = {tensor.shape[0] if tensor.dim() else 1 for tensor in tensors}
    if loader.batch_sampler is None or len(sizes) != 1:
        return 1
    (size,) = sizes
    return size if loader.batch_size is None or size <= loader.batch_size else 1


def reject_dynamic_shapes(models: Mapping[str, Model], dynamic_shapes: Any) -> None:
    """Reject dynamic shapes, for recipes whose partitioners all compile for fixed shapes.

    Raises:
        ValueError: ``dynamic_shapes`` is set, or a program has a symbolic dimension.
    """
    advice = (
        "Arm targets are compiled for fixed shapes: list the sizes to export, sizes={'name of a dimension': [1, 8]}"
    )
    if dynamic_shapes:
        raise ValueError(f"dynamic_shapes={dynamic_shapes!r}: {advice}")
    for method, model in models.items():
        if not isinstance(model, ExportedProgram):
            continue
        input_signature = InputSignature.from_program(model)
        for name, leaf in zip(input_signature.names, input_signature.leaves, strict=True):
            shape = leaf.shape if isinstance(leaf, torch.Tensor) else ()
            axes = [axis for axis, size in enumerate(shape) if not isinstance(size, int)]
            if axes:
                text = ", ".join("?" if axis in axes else str(size) for axis, size in enumerate(shape))
                raise ValueError(
                    f"input '{name}' of method '{method}' has the dynamic shape [{text}]. Arm targets are compiled for "
                    f"fixed shapes: list the sizes to export, sizes={{'{name}_{axes[0]}': [1, 8]}} (command line: "
                    f"--sizes {name}_{axes[0]}=1,8)"
                )


@contextmanager
def evaluation_mode(models: Mapping[str, Model]) -> Iterator[list[str]]:
    """Put every module in evaluation mode. The training flag of each module is restored on exit.

    Yields:
        names of the methods whose model was in training mode. A ``GraphModule`` is not named.
    """
    flags: list[tuple[torch.nn.Module, bool]] = []
    training = []
    for method, model in models.items():
        if isinstance(model, ExportedProgram):
            continue
        modules = list(model.modules())
        flags += [(module, module.training) for module in modules]
        if any(module.training for module in modules) and not isinstance(model, torch.fx.GraphModule):
            training.append(method)
    try:
        for module, _ in flags:
            module.training = False
        yield training
    finally:
        for module, flag in flags:
            module.training = flag


def check_argument_order(function: str, parameter: str, recipe: Any, samples: Any) -> None:
    """Detect swapped arguments. Functions that take a recipe have the order (model, recipe, samples).

    Raises:
        TypeError: ``samples`` is a recipe, or ``recipe`` is samples.
    """
    if isinstance(samples, (ExportRecipe, RecipeType)) or _is_samples(recipe):
        raise TypeError(
            f"{parameter}: got {type(recipe).__name__}; the order is {function}(model, {parameter}, samples)"
        )


def _is_samples(value: Any) -> bool:
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return isinstance(first, (torch.Tensor, tuple, Inputs))
