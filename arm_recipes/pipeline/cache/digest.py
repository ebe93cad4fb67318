"""A digest of Python objects by what they hold: the same in every process, and never the same for different things.

What it cannot tell apart, code of the user's above all, it refuses.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch._subclasses import FakeTensor
from torch.fx import Node
from torch.utils import _pytree as pytree

#: Packages whose code is known by their version, or by their sources.
PACKAGES = (
    "arm_recipes",
    "arm_backend_core",
    "torch",
    "torchao",
    "executorch",
    "numpy",
    "math",
    "operator",
    "builtins",
)
#: Operators that these packages bring.
_NAMESPACES = ("aten", "prims", "prim", "quantized_decomposed", "torchao", "higher_order", "dim_order_ops", "cortex_m")
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme)
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, type)


class NotCacheable(Exception):
    """What something holds cannot be told; the message names it."""


class Digest:
    """Of objects that are added one after the other. What holds itself is told by how far above it that is."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._known: dict[int, bytes] = {}
        self._around: dict[int, int] = {}
        self._alive: list[Any] = []  # an id is that of another object once this one is gone

    def hexdigest(self) -> str:
        """Of all that was added."""
        return self._hash.hexdigest()

    def add(self, value: Any) -> None:
        """Add an object with all that it holds.

        Raises:
            Unknown: part of it is code that no version tells, or of a kind that cannot be told.
        """
        self._hash.update(self._of(value))

    def _of(self, value: Any) -> bytes:
        if isinstance(value, _PLAIN):
            return _hash(type(value).__name__, value if isinstance(value, bytes) else repr(value).encode())
        if isinstance(value, _NAMED):
            return _hash("named", str(value).encode())
        if id(value) in self._around:
            return _hash("around", str(len(self._around) - self._around[id(value)]).encode())
        if id(value) not in self._known:
            self._around[id(value)] = len(self._around)
            made = self._of_new(value)
            del self._around[id(value)]
            self._known[id(value)] = made
            self._alive.append(value)
        return self._known[id(value)]

    def _of_new(self, value: Any) -> bytes:
        if isinstance(value, Enum):
            return _hash("enum", f"{_name(type(value))}.{value.name}".encode())
        if isinstance(value, torch.Tensor):
            return _tensor(value)
        if isinstance(value, np.ndarray):
            return _hash("array", f"{value.dtype.str}{value.shape}".encode(), np.ascontiguousarray(value).data)
        if isinstance(value, Mapping):
            parts = (self._of(part) for pair in value.items() for part in pair)
            return _hash("mapping", _kind(value).encode(), *parts)
        if isinstance(value, (set, frozenset)):
            return _hash("set", *sorted(map(self._of, value)))
        if isinstance(value, (list, tuple)):
            keywords = [getattr(value, "keywords", None)]  # of ``Inputs``
            return _hash("list", _kind(value).encode(), *map(self._of, [*value, *keywords]))
        return self._of_object(value)

    def _of_object(self, value: Any) -> bytes:
        if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)):
            return _hash("operator", _operator(value).encode())
        if isinstance(value, _CODE):
            held: list[Any] = []
            if isinstance(value, types.FunctionType):
                _check_source(value)
                held = [value.__code__.co_firstlineno, value.__defaults__, value.__kwdefaults__]
                held += [cell.cell_contents for cell in value.__closure__ or ()]
            return _hash("code", _name(value).encode(), *map(self._of, held))
        if isinstance(value, functools.partial):
            return _hash("partial", *map(self._of, (value.func, value.args, value.keywords)))
        if isinstance(value, types.MethodType):
            return _hash("method", *map(self._of, (value.__func__, value.__self__)))
        if isinstance(value, (Node, PurePath, pytree.TreeSpec, slice, range)):
            return _hash(type(value).__name__, str(value).encode())
        slots = {name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())}
        if not slots and not hasattr(value, "__dict__"):
            raise NotCacheable(f"a {_name(type(value))}")
        names = sorted(
            (slots | vars(value).keys() if hasattr(value, "__dict__") else slots) - {"__weakref__", "__dict__"}
        )
        state = {name: getattr(value, name) for name in names if hasattr(value, name)}
        return _hash("object", _name(type(value)).encode(), self._of(state))


def _hash(kind: str, *parts: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(f"{kind} {[len(part) for part in parts]}:".encode())
    for part in parts:
        digest.update(part)
    return digest.digest()


def _tensor(tensor: torch.Tensor) -> bytes:
    told = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}"
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return _hash("shape", f"{told} {tensor.stride()}".encode())
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise NotCacheable(f"a tensor on {tensor.device}, {tensor.layout}")
    return _hash("tensor", f"{told} {tensor.stride()}".encode(), _content(tensor))


def _content(tensor: torch.Tensor) -> memoryview:
    """The numbers of a tensor in the order of its dimensions."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    found: memoryview = flat.view(torch.uint8).numpy().data
    return found


def _kind(value: Any) -> str:
    """Of a container: those of the user's may do anything."""
    kind = type(value)
    return kind.__name__ if kind.__module__ in ("builtins", "collections", "types") else _name(kind)


def _operator(value: Any) -> str:
    name = str(value)
    namespace = getattr(value, "namespace", None) or getattr(value, "_qualified_op_name", name).split("::")[0]
    if isinstance(value, torch._ops.HigherOrderOperator) or namespace in _NAMESPACES:
        return f"{namespace} {name}"
    raise NotCacheable(f"the operator {name}, which is none of PyTorch's")


def _check_source(function: types.FunctionType) -> None:
    """A function may only say that it is of a module: what wraps another one takes its name."""
    module = sys.modules.get(function.__module__ or "")
    if function.__code__.co_filename != getattr(module, "__file__", None):
        raise NotCacheable(f"'{function.__module__}.{function.__qualname__}', which is defined elsewhere")


def _name(value: Any) -> str:
    """Where code is defined, if that is in a package whose version tells what it does."""
    module, name = getattr(value, "__module__", None) or "builtins", getattr(value, "__qualname__", repr(value))
    package = module.split(".")[0]
    if package not in PACKAGES and package not in sys.stdlib_module_names:
        raise NotCacheable(f"'{module}.{name}', whose code may change")
    return f"{module}.{name}"
