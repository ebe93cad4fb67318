"""Constant propagation in a trace: compute the tensors that depend only on constants, buffers and shapes.

The traced tensors are fake: they have no values. This module computes each PyTorch function a second time, on the
values of its operands. If traced tensors share memory, their values share memory, too. A write in place therefore also
changes the values of the aliases.
"""

from __future__ import annotations

import types
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

#: Maximum number of elements of a tensor whose value is stored. It is enough for two numbers per 16 x 16 patch of an
#: image of 2048 x 1024 pixels.
_MAX_ELEMENTS = 1 << 14
_BUILTIN_TYPES = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
)
#: Functions whose results are uninitialized memory.
_UNINITIALIZED_NAMES = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
#: Functions whose result depends on the shape and dtype of their first operand, but not on its values.
_SHAPE_ONLY_NAMES = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_tensor"}
_PLAIN_TYPES = (int, float, complex, str, type(None), type(...), torch.dtype, torch.device, torch.layout)
_COMPUTE_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError)


class KnownValue(NamedTuple):
    """A known value, and the names of the buffers that determine it."""

    buffers: frozenset[str]
    value: Any


class _Unknown(Exception):
    """An operand has no known value."""


class ConstantPropagation:
    """Constant propagation in one trace. The object stores the known values of traced tensors.

    Args:
        model: the model. The values of its buffers with at most ``_MAX_ELEMENTS`` elements are known.
        written_buffers: qualified names of the buffers that the model writes. Their values are not known.
    """

    def __init__(self, model: torch.nn.Module, written_buffers: frozenset[str]) -> None:
        #: Buffers by (dtype, shape). An entry is (qualified name, module, name in the module, value).
        self._buffers: dict[Any, list[tuple[str, torch.nn.Module, str, Tensor]]] = {}
        for path, module in model.named_modules():
            for key, x in module._buffers.items():
                name = f"{path}.{key}" if path else key
                if x is not None and x.numel() <= _MAX_ELEMENTS and name not in written_buffers:
                    entry = name, module, key, x.detach().clone()
                    self._buffers.setdefault((x.dtype, x.shape), []).append(entry)
        self._computed: Any = WeakIdKeyDictionary()  # by traced tensor: (address of its storage, known value)

    def find(self, x: Any) -> KnownValue | None:
        """Return the known value of a traced tensor; None if it is not known."""
        if not isinstance(x, Tensor) or not _is_small(x):
            return None
        if x in self._computed:
            return self._computed[x][1]
        for name, module, key, value in self._buffers.get((x.dtype, x.shape), ()):
            if module._buffers.get(key) is x:
                return KnownValue(frozenset([name]), value)
        if _is_constant(x):
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                known = KnownValue(frozenset(), x.detach().clone())
            self._record(x, known)
            return known
        return None

    def compute(self, function: Any, args: Any, kwargs: Any) -> KnownValue | None:
        """Call ``function`` on the known values of its operands.

        Returns:
            The result. None if an operand is unknown, or if the function is not part of PyTorch, is random, returns
            uninitialized memory, or raises an exception.
        """
        if not _is_deterministic(function) or kwargs.get("generator") is not None:
            return None
        leaves, spec = pytree.tree_flatten((args, kwargs))
        shape_only = function_name(function) in _SHAPE_ONLY_NAMES
        buffers = frozenset[str]()
        try:
            for i, leaf in enumerate(leaves):
                if i == 0 and shape_only and isinstance(leaf, Tensor) and has_static_shape(leaf):
                    leaves[0] = _Shape(leaf)
                elif isinstance(leaf, Tensor):
                    known = self._require(leaf)
                    leaves[i], buffers = known.value, buffers | known.buffers
                else:
                    leaves[i] = _require_plain(leaf)
        except _Unknown:
            return None
        with (
            _disable_current_modes(),
            torch._C.DisableTorchFunction(),
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
        ):
            leaves = [leaf.create() if isinstance(leaf, _Shape) else leaf for leaf in leaves]
            values, keywords = pytree.tree_unflatten(leaves, spec)
            state = torch.get_rng_state()
            try:
                result = function(*values, **keywords)
            except _COMPUTE_ERRORS:
                return None
            return KnownValue(buffers, result) if torch.equal(state, torch.get_rng_state()) else None

    def propagate(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record the values of ``result``, which ``function`` returned, and of the tensors that ``function`` wrote.

        If the written values are unknown, the values of all tensors in the written memory are forgotten. A function of
        another library may write any of its operands, so the values of all operands are forgotten, too.
        """
        results = pytree.tree_leaves(result)
        writes = _is_in_place(function, kwargs)
        is_recordable = bool(results) and all(isinstance(x, Tensor) and _is_small(x) for x in results)
        known = self.compute(function, args, kwargs) if writes or is_recordable else None
        if known is None and (writes or not _is_torch_function(function)):
            for x in pytree.tree_leaves((args[:1] if _is_torch_function(function) else args, kwargs)):
                if isinstance(x, Tensor):
                    self._forget(x)
        elif known is not None and is_recordable:
            for x, value in zip(results, pytree.tree_leaves(known.value), strict=True):
                self.record(x, KnownValue(known.buffers, value))

    def record(self, x: Tensor, known: KnownValue) -> None:
        """Record the value of a traced tensor. A value of another shape or dtype is ignored."""
        if (known.value.shape, known.value.dtype) == (x.shape, x.dtype):
            self._record(x, known)

    def _record(self, x: Tensor, known: KnownValue) -> None:
        self._computed[x] = _storage_address(x), known

    def _forget(self, written: Tensor) -> None:
        """Forget the values of all tensors that may share memory with ``written``."""
        address = _storage_address(written)
        for x, (other, _) in list(self._computed.items()):
            if address is None or other is None or address == other:
                del self._computed[x]

    def _require(self, x: Tensor) -> KnownValue:
        known = self.find(x)
        if known is None:
            raise _Unknown
        return known


class _Shape:
    """Shape and dtype of a tensor; its elements are not needed."""

    def __init__(self, x: Tensor) -> None:
        self._size, self._stride, self._dtype = tuple(x.shape), tuple(x.stride()), x.dtype

    def create(self) -> Tensor:
        """Return an uninitialized tensor."""
        return torch.empty_strided(self._size, self._stride, dtype=self._dtype)


def function_name(function: Any) -> str:
    """Name of a PyTorch function without its overload: ``add_`` for ``aten.add_.Tensor``."""
    return str(getattr(function, "__name__", "")).split(".")[0]


def has_static_shape(x: Tensor) -> bool:
    """Whether ``x`` is strided, and none of its sizes and strides is symbolic."""
    return x.layout is torch.strided and all(isinstance(size, int) for size in (*x.shape, *x.stride()))


def _is_small(x: Tensor) -> bool:
    return has_static_shape(x) and x.numel() <= _MAX_ELEMENTS


def _is_constant(x: Tensor) -> bool:
    """Whether a tensor existed before the trace: traced tensors are fake, or wrapped (inside ``vmap``)."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x) or torch._is_functional_tensor(x)
    return type(x) is Tensor and x.device.type != "meta" and not is_wrapped


def _require_plain(leaf: Any) -> Any:
    """Return an argument that is a constant.

    Raises:
        _Unknown: it is symbolic, or an object that the function may change.
    """
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    parts = leaf if isinstance(leaf, torch.Size) else [leaf]
    parts = [leaf.start, leaf.stop, leaf.step] if isinstance(leaf, slice) else parts
    if not all(isinstance(part, (*_PLAIN_TYPES, torch.memory_format)) for part in parts):
        raise _Unknown
    return leaf


def _is_torch_function(function: Any) -> bool:
    """Whether ``function`` is PyTorch's own, not an operator of another library, and not a higher-order operator."""
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return str(function).startswith(("aten.", "prims."))
    module = str(getattr(function, "__module__", ""))
    return isinstance(function, _BUILTIN_TYPES) or (
        isinstance(function, types.FunctionType) and module.split(".")[0] == "torch"
    )


def _is_deterministic(function: Any) -> bool:
    return _is_torch_function(function) and function_name(function) not in _UNINITIALIZED_NAMES


def _is_in_place(function: Any, kwargs: Any) -> bool:
    """Whether a function writes an argument: ``add_``, ``__iadd__``, ``__setitem__``, ``relu(x, inplace=True)``."""
    name = function_name(function)
    return (
        name == "__setitem__"
        or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__", "__iter__"))
        or (name.endswith("_") and not name.endswith("__"))
        or kwargs.get("out") is not None
        or bool(kwargs.get("inplace"))
    )


def _storage_address(x: Tensor) -> int | None:
    """Address of the storage object of ``x``; None if PyTorch does not give access to it."""
    try:
        return x.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return None
