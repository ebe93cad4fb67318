"""Constant propagation during tracing: the model's Python code may read the values of small buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from arm_backend_core.recurrent.traced_layers import TRACED_LAYERS

#: Maximum number of elements of a buffer (a flag, a counter) whose value Python code may read during tracing.
_MAX_BUFFER_ELEMENTS = 16
#: Maximum number of elements of a tensor that is computed from such buffers.
_MAX_DERIVED_ELEMENTS = 1024
#: Tensor methods that read values -> the Python function that computes their result.
_VALUE_READS: dict[Any, Callable[[Tensor], Any]] = {
    Tensor.__bool__: bool,
    Tensor.__int__: int,
    Tensor.__float__: float,
    Tensor.__index__: lambda x: x.__index__(),
    Tensor.item: lambda x: x.item(),
    Tensor.tolist: lambda x: x.tolist(),
}
_INTEGER_TYPES = (torch.int8, torch.int16, torch.int32, torch.int64)
_COMPARISON_FUNCTIONS = (
    torch.gt,
    torch.ge,
    torch.lt,
    torch.le,
    torch.eq,
    torch.ne,
    torch.any,
    torch.all,
    torch.logical_not,
)
_COMPARISONS = {
    *_COMPARISON_FUNCTIONS,
    *(getattr(Tensor, f"__{name}__") for name in ("gt", "ge", "lt", "le", "eq", "ne", "invert")),
}
_COMPARISONS |= {getattr(Tensor, function.__name__) for function in _COMPARISON_FUNCTIONS}
#: Functions through which known values propagate. ``tolist`` of a traced tensor calls ``unbind`` and indexing.
_PROPAGATED_FUNCTIONS = {*_COMPARISONS, torch.arange, torch.unbind, Tensor.unbind, Tensor.__getitem__}


class TraceConstants(TorchFunctionMode):
    """Function mode that provides the values of small buffers while a model is traced.

    - A branch on a buffer (``if not self.initialized``) is traced for the buffer's current value. This is correct if
      the model does not write the buffer. Values propagate through comparisons and ``torch.arange``.
    - ``x.data`` returns ``x.detach()``. Without this, PyTorch's trace would make it a constant.

    Attributes:
        queried: names of the buffers whose values were read.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.queried: set[str] = set()
        #: Qualified buffer name -> its module, its name in the module, and its value.
        self._buffer_values: dict[str, tuple[torch.nn.Module, str, Tensor]] = {}
        for path, module in model.named_modules():
            for key, x in module._buffers.items():
                if x is not None and x.numel() <= _MAX_BUFFER_ELEMENTS:
                    self._buffer_values[f"{path}.{key}" if path else key] = module, key, x.detach().clone()
        self._derived: Any = WeakIdKeyDictionary()  # tensor computed from buffers -> names of the buffers, value

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
            return args[0].detach()
        if function in _VALUE_READS and len(args) == 1 and (derived := self._find_value(args[0])) is not None:
            self.queried |= derived[0]
            with _disable_current_modes():
                return _VALUE_READS[function](derived[1])
        result = None if function is Tensor.__setitem__ and _write_by_index_put(*args) else function(*args, **kwargs)
        if "out" in kwargs or _is_in_place(function):
            self._derived.clear()  # the mutated tensor may be a view of a derived tensor
        elif function in _PROPAGATED_FUNCTIONS:
            self._propagate(pytree.tree_leaves(result), function, args, kwargs)
        return result

    def _propagate(self, results: list[Any], function: Any, args: Any, kwargs: Any) -> None:
        """Compute and store the values of results whose operands are known."""
        operands = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        operand_values = [self._find_value(x) for x in operands]
        if None in operand_values or not all(
            isinstance(x, Tensor) and x.numel() <= _MAX_DERIVED_ELEMENTS for x in results
        ):
            return
        values = {id(x): found[1] for x, found in zip(operands, operand_values, strict=True) if found is not None}
        args, kwargs = pytree.tree_map(lambda x: values.get(id(x), x), (args, kwargs))
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            computed = pytree.tree_leaves(function(*args, **kwargs))
        names = set[str]().union(*(found[0] for found in operand_values if found is not None))
        self._derived.update((x, (names, value)) for x, value in zip(results, computed, strict=True))

    def _find_value(self, x: Any) -> tuple[set[str], Tensor] | None:
        """Return the names of the buffers that determine ``x``, and its value; None if the value is unknown."""
        if isinstance(x, Tensor) and x in self._derived:
            names, value = self._derived[x]
            return names, value
        names_of_x = (name for name, (module, key, _) in self._buffer_values.items() if module._buffers.get(key) is x)
        name = next(names_of_x, None)
        return None if name is None else ({name}, self._buffer_values[name][2])


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
def trace_recurrent_layers_by_shape() -> Iterator[None]:
    """Trace recurrent layers as operators with empty outputs of the right shape, instead of tracing their time steps.

    Not thread-safe: the kernels are global. If two threads are inside the block, the first one that leaves it restores
    the kernels for both.
    """
    try:
        for layer, kernels in TRACED_LAYERS.items():
            _set_kernels(layer, dict.fromkeys(kernels, _empty_outputs))
        yield
    finally:
        for layer, kernels in TRACED_LAYERS.items():
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


def _is_in_place(function: Any) -> bool:
    """Whether a function mutates its argument: ``add_``, ``__iadd__``, ``__setitem__`` and similar."""
    name = getattr(function, "__name__", "")
    return (
        name == "__setitem__"
        or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
        or (name.endswith("_") and not name.endswith("__"))
    )
