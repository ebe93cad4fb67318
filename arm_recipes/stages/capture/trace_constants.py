"""Tracing with constants: the model's Python code may read the values of tensors that do not depend on the inputs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from arm_backend_core.recurrent.recurrent_ops import RECURRENT_OPS
from arm_recipes.stages.capture.constant_propagation import (
    ConstantPropagation,
    KnownValue,
    function_name,
    has_static_shape,
)

#: Tensor methods that read values. The value of each key is a function that computes the method's result.
_VALUE_READS: dict[Any, Callable[[Tensor], Any]] = {
    Tensor.__bool__: bool,
    Tensor.__int__: int,
    Tensor.__float__: float,
    Tensor.__index__: lambda x: x.__index__(),
    Tensor.item: lambda x: x.item(),
    Tensor.tolist: lambda x: x.tolist(),
}
_INTEGER_TYPES = (torch.int8, torch.int16, torch.int32, torch.int64)
#: Functions whose first argument is a tensor. Integers in their other arguments are sizes, positions or lengths.
_SIZE_ARGUMENT_NAMES = {
    *("expand", "narrow", "narrow_copy", "repeat", "reshape", "roll", "split", "split_with_sizes", "tile", "unflatten"),
    *("unsafe_split", "unsafe_split_with_sizes", "view", "chunk", "unsafe_chunk", "pad", "new_zeros", "new_ones"),
    "tensor_split",
}
#: Functions that create a tensor from numbers.
_FACTORY_NAMES = {"arange", "as_tensor", "eye", "full", "linspace", "ones", "tensor", "zeros"}
#: Functions with a data-dependent output shape: the size of the result depends on the values of the operands.
_DATA_DEPENDENT_NAMES = {
    "argwhere",
    "bincount",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
}


class TraceConstants(TorchFunctionMode):
    """Function mode that provides the values that do not depend on the model's inputs while the model is traced.

    - ``item``, ``tolist``, ``int(x)``, ``range(x)`` and branches (``if not self.initialized``) read the values of
      constants, of buffers, and of tensors that are computed from them and from shapes. For a buffer, this is correct
      only if the model does not write it.
    - Known tensors in arguments that are sizes (``x.narrow(0, start, length)``) become numbers.
    - If only ``repeats`` is known, ``repeat_interleave`` becomes ``index_select`` with constant indices.
    - ``x.data`` returns ``x.detach()``. Without this, ``x.data`` would be a constant in PyTorch's trace.

    Args:
        model: the model.
        written_buffers: qualified names of the buffers that the model writes. Their values must not be read.

    Attributes:
        read_buffers: qualified names of the buffers whose values were read.
    """

    def __init__(self, model: torch.nn.Module, written_buffers: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.read_buffers: set[str] = set()
        self._known = ConstantPropagation(model, written_buffers)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``function``. If the function reads a known value, return the value instead.

        Raises:
            ValueError: the model assigns to ``x.data``.
        """
        kwargs, data = kwargs or {}, getattr(Tensor, "data")  # noqa: B009
        if function == data.__set__:
            raise ValueError(
                "the model assigns to x.data, which a program cannot do: compute a new tensor, and use that"
            )
        if function == data.__get__:
            function = Tensor.detach
        if get_proxy_mode() is None:  # the trace has not begun
            return function(*args, **kwargs)
        if function in _VALUE_READS and len(args) == 1 and (known := self._known.find(args[0])) is not None:
            return self._read(known, _VALUE_READS[function])
        args, kwargs = self._read_sizes(function, args, kwargs)
        result = self._compute_data_dependent_result(function, args, kwargs)
        if result is not None:
            return result
        if function is not Tensor.__setitem__ or not _write_by_index_put(*args):
            result = function(*args, **kwargs)
        self._known.propagate(function, args, kwargs, result)
        return result

    def _read(self, known: KnownValue, function: Callable[[Tensor], Any]) -> Any:
        """Compute a Python value from a known value."""
        self.read_buffers |= known.buffers
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return function(known.value)

    def _read_sizes(self, function: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """In arguments that are sizes, replace known integer scalar tensors by numbers.

        ``tensor_split`` also accepts a 1-D tensor of indices. If the tensor is known, it becomes a list.
        """
        name = function_name(function)

        def read(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.dim() > (name == "tensor_split") or x.dtype not in _INTEGER_TYPES:
                return x
            known = self._known.find(x)
            return x if known is None else self._read(known, Tensor.tolist)

        if name in _FACTORY_NAMES and not (args and isinstance(args[0], Tensor) and name.endswith("tensor")):
            return pytree.tree_map(read, (tuple(args), kwargs))
        if name in _SIZE_ARGUMENT_NAMES:
            sizes, keywords = pytree.tree_map(read, (tuple(args[1:]), kwargs))
            return (*args[:1], *sizes), keywords
        return args, kwargs

    def _compute_data_dependent_result(self, function: Any, args: Any, kwargs: Any) -> Tensor | None:
        """If a function has a data-dependent output shape, compute its result from known values.

        Returns None for other functions, and if the values that determine the shape are not known.
        """
        if not _has_data_dependent_shape(function, args):
            return None
        known = self._known.compute(function, args, kwargs)
        if known is not None and isinstance(known.value, Tensor):
            self.read_buffers |= known.buffers
            result = known.value.clone()  # a traced copy, which the model may write
            self._known.record(result, known)
            return result
        if function_name(function) == "repeat_interleave":
            return self._repeat_by_index(*args, **kwargs)
        return None

    def _repeat_by_index(
        self, input: Tensor, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None
    ) -> Tensor | None:
        """Compute ``repeat_interleave`` as ``index_select`` with a constant index, if ``repeats`` is a known tensor."""
        known = self._known.find(repeats)
        if known is None or not has_static_shape(input):
            return None
        axis, x = (0, input.flatten()) if dim is None else (dim, input)
        self.read_buffers |= known.buffers
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            index = torch.arange(x.shape[axis]).repeat_interleave(known.value, output_size=output_size)
        return x.index_select(axis, index)


def _has_data_dependent_shape(function: Any, args: Any) -> bool:
    """Whether a function has a data-dependent output shape."""
    if function is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in index)
    return function_name(function) in _DATA_DEPENDENT_NAMES


def _write_by_index_put(x: Tensor, index: Any, value: Any) -> bool:
    """Execute ``x[index] = value`` by ``index_put_`` if the index contains a scalar integer tensor.

    Returns:
        whether the assignment was executed. This requires that the other parts of the index are integers, slices or an
        Ellipsis.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    is_scalar_tensor = [isinstance(part, Tensor) and not part.dim() and part.dtype in _INTEGER_TYPES for part in parts]
    others = [part for part, is_scalar in zip(parts, is_scalar_tensor, strict=True) if not is_scalar]
    if not any(is_scalar_tensor) or not all(part is Ellipsis or type(part) in (int, slice) for part in others):
        return False
    if Ellipsis in others:
        position = next(i for i, part in enumerate(parts) if part is Ellipsis)
        parts[position : position + 1] = [slice(None)] * (x.dim() - len(parts) + 1)
    view_index = [slice(None) if isinstance(part, Tensor) else part for part in parts]
    put_index = [part if isinstance(part, Tensor) else None for part in parts if type(part) is not int]
    view, new = x[tuple(view_index)], torch.as_tensor(value, dtype=x.dtype)
    rank = view.dim() - sum(is_scalar_tensor)
    new = new.reshape(new.shape[max(new.dim() - rank, 0) :]) if new.dim() > rank else new  # drop leading 1s
    torch.ops.aten.index_put_(view, put_index, new)
    return True


@contextmanager
def skip_distribution_checks() -> Iterator[None]:
    """Disable parameter validation of ``torch.distributions``, which reads values that a trace does not have."""
    previous = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(previous)


@contextmanager
def ignore_weight_assignments(model: torch.nn.Module) -> Iterator[None]:
    """Suppress PyTorch's warning about weights that pruning, normalization and recurrent layers assign in each call.

    PyTorch warns of every tensor that a call assigns to an attribute, because an exported program omits the assignment.
    The program does not need these assignments: pruning and normalization compute the weight from parameters in each
    call, and recurrent layers collect their parameters in the list ``_flat_weights``.
    """
    names = [
        rf"{re.escape(f'self.{prefix}' + '.' * bool(prefix))}_flat_weights\[\d+\]"
        for prefix, module in model.named_modules()
        if isinstance(module, torch.nn.RNNBase)
    ]
    names += sorted(
        re.escape(f"self.{prefix}{'.' * bool(prefix)}{name}")
        for prefix, module in model.named_modules()
        for hook in module._forward_pre_hooks.values()
        if type(hook).__module__.startswith("torch.nn.utils.")
        and (name := getattr(hook, "_tensor_name", getattr(hook, "name", None)))
    )
    if not names:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", rf"The tensor attributes? (({'|'.join(names)})(, )?)+ w(as|ere) assigned")
        yield


@contextmanager
def trace_recurrent_layers_by_shape() -> Iterator[None]:
    """Trace recurrent layers as operators with empty outputs of the right shape, instead of tracing their time steps.

    Not thread-safe: the kernels are global. If two threads are inside the block, the first one that leaves it restores
    the kernels for both.
    """
    try:
        for layer, kernels in RECURRENT_OPS.items():
            _set_kernels(layer, dict.fromkeys(kernels, _empty_outputs))
        yield
    finally:
        for layer, kernels in RECURRENT_OPS.items():
            _set_kernels(layer, kernels)


def _set_kernels(layer: Any, kernels: dict[Any, Any]) -> None:
    layer.py_kernels.update(kernels)
    layer._dispatch_cache.clear()


def _empty_outputs(
    x: Tensor,
    states: Tensor | list[Tensor],
    parameters: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Create empty outputs of a recurrent layer. The memory order of the sequence is [time, batch, features]."""
    initial_states = [states] if isinstance(states, Tensor) else states
    time_first = x.transpose(0, 1) if batch_first else x
    sequence = x.new_empty([*time_first.shape[:-1], (1 + bidirectional) * initial_states[0].shape[-1]])
    return (
        sequence.transpose(0, 1) if batch_first else sequence,
        *(state.new_empty(state.shape) for state in initial_states),
    )
