"""Constants during tracing: values of small buffers that the model's Python code may read while PyTorch traces it."""

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

#: Maximum number of elements of a buffer whose value Python code may read, such as a flag or a counter.
_FEW = 16
#: Maximum number of elements of a tensor that is computed from such buffers.
_MOST = 1024
_QUESTIONS: dict[Any, Callable[[Tensor], Any]] = {
    Tensor.__bool__: bool,
    Tensor.__int__: int,
    Tensor.__float__: float,
    Tensor.__index__: lambda x: x.__index__(),
    Tensor.item: lambda x: x.item(),
    Tensor.tolist: lambda x: x.tolist(),
}
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
_COMPARED = (torch.gt, torch.ge, torch.lt, torch.le, torch.eq, torch.ne, torch.any, torch.all, torch.logical_not)
_COMPARES = {*_COMPARED, *(getattr(Tensor, f"__{name}__") for name in ("gt", "ge", "lt", "le", "eq", "ne", "invert"))}
_COMPARES |= {getattr(Tensor, function.__name__) for function in _COMPARED}
#: Functions through which values are propagated. ``tolist`` of a traced tensor reads it by ``unbind`` and indexing.
_FOLLOWED = {*_COMPARES, torch.arange, torch.unbind, Tensor.unbind, Tensor.__getitem__}


class TraceConstants(TorchFunctionMode):
    """Function mode that provides the values of small buffers while a model is traced.

    - ``if not self.initialized`` on a buffer takes the branch for the buffer's value, which is the same in each call
      unless the model writes it. Comparisons of such a buffer with numbers, and ``torch.arange``, are known too.
    - ``x.data`` is ``x.detach()``: PyTorch's trace would treat it as a constant.

    Attributes:
        queried: names of the buffers whose values were read.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.queried: set[str] = set()
        #: Name of a buffer -> its module, its name in the module, and its value.
        self._held: dict[str, tuple[torch.nn.Module, str, Tensor]] = {}
        for path, module in model.named_modules():
            for key, x in module._buffers.items():
                if x is not None and x.numel() <= _FEW:
                    self._held[f"{path}.{key}" if path else key] = module, key, x.detach().clone()
        self._derived: Any = WeakIdKeyDictionary()  # tensor computed from buffers -> names of the buffers, value

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``function``, or return the known value.

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
        if function in _QUESTIONS and len(args) == 1 and (found := self._known(args[0])) is not None:
            self.queried |= found[0]
            with _disable_current_modes():
                return _QUESTIONS[function](found[1])
        result = None if function is Tensor.__setitem__ and _put_at_index(*args) else function(*args, **kwargs)
        if "out" in kwargs or _writes(function):
            self._derived.clear()  # the written tensor may be a view of a derived one
        elif function in _FOLLOWED:
            self._propagate(pytree.tree_leaves(result), function, args, kwargs)
        return result

    def _propagate(self, results: list[Any], function: Any, args: Any, kwargs: Any) -> None:
        """Compute and store the values of results whose operands are known."""
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        known = [self._known(x) for x in given]
        if None in known or not all(isinstance(x, Tensor) and x.numel() <= _MOST for x in results):
            return
        values = {id(x): found[1] for x, found in zip(given, known, strict=True) if found is not None}
        args, kwargs = pytree.tree_map(lambda x: values.get(id(x), x), (args, kwargs))
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            made = pytree.tree_leaves(function(*args, **kwargs))
        names = set[str]().union(*(found[0] for found in known if found is not None))
        self._derived.update((x, (names, value)) for x, value in zip(results, made, strict=True))

    def _known(self, x: Any) -> tuple[set[str], Tensor] | None:
        if isinstance(x, Tensor) and x in self._derived:
            names, value = self._derived[x]
            return names, value
        held = (name for name, (module, key, _) in self._held.items() if module._buffers.get(key) is x)
        name = next(held, None)
        return None if name is None else ({name}, self._held[name][2])


def _put_at_index(x: Tensor, index: Any, value: Any) -> bool:
    """Write ``x[index] = value`` by ``index_put_`` if the index contains an integer tensor without dimensions.

    Returns:
        whether the index has this form, with other parts that are integers and slices.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    chosen = [isinstance(part, Tensor) and not part.dim() and part.dtype in _INTEGERS for part in parts]
    others = [part for part, known in zip(parts, chosen, strict=True) if not known]
    if not any(chosen) or not all(part is Ellipsis or type(part) in (int, slice) for part in others):
        return False
    if Ellipsis in others:
        place = next(i for i, part in enumerate(parts) if part is Ellipsis)
        parts[place : place + 1] = [slice(None)] * (x.dim() - len(parts) + 1)
    kept = [slice(None) if isinstance(part, Tensor) else part for part in parts]
    places = [part if isinstance(part, Tensor) else None for part in parts if type(part) is not int]
    view, new = x[tuple(kept)], torch.as_tensor(value, dtype=x.dtype)
    rank = view.dim() - sum(chosen)
    new = new.reshape(new.shape[max(new.dim() - rank, 0) :]) if new.dim() > rank else new  # 1s in front
    torch.ops.aten.index_put_(view, places, new)
    return True


@contextmanager
def skip_distribution_checks() -> Iterator[None]:
    """Disable parameter validation of ``torch.distributions``: a trace does not know the values."""
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(before)


@contextmanager
def recurrent_layers_by_shape() -> Iterator[None]:
    """Trace only the output shapes of recurrent layers.

    Not thread-safe: with two threads, the first one that leaves the block ends it for both.
    """
    try:
        for layer, kernels in TRACED_LAYERS.items():
            _set(layer, dict.fromkeys(kernels, _results))
        yield
    finally:
        for layer, kernels in TRACED_LAYERS.items():
            _set(layer, kernels)


def _set(layer: Any, kernels: dict[Any, Any]) -> None:
    layer.py_kernels.update(kernels)
    layer._dispatch_cache.clear()


def _results(
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
    """Empty outputs of a recurrent layer; the sequence has PyTorch's strides, [time, batch, features]."""
    held = [states] if isinstance(states, Tensor) else states
    time_first = x.transpose(0, 1) if batch_first else x
    sequence = x.new_empty([*time_first.shape[:-1], (1 + bidirectional) * held[0].shape[-1]])
    return (sequence.transpose(0, 1) if batch_first else sequence, *(state.new_empty(state.shape) for state in held))


def _writes(function: Any) -> bool:
    """Whether a function mutates its argument: ``add_``, ``__iadd__``, ``__setitem__`` and similar."""
    name = getattr(function, "__name__", "")
    return (
        name == "__setitem__"
        or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
        or (name.endswith("_") and not name.endswith("__"))
    )
