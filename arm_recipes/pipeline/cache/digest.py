"""Content digest of Python objects: equal in every process, and different for different content.

Objects whose content cannot be determined are refused with ``NotCacheable``. Usually, they are user code.
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

from arm_recipes.samples.call_inputs import Inputs

#: Packages whose code is identified by their version or by a digest of their sources.
VERSIONED_PACKAGES = (
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
#: Operator namespaces that ``VERSIONED_PACKAGES`` define.
_VERSIONED_NAMESPACES = (
    "aten",
    "prims",
    "prim",
    "quantized_decomposed",
    "torchao",
    "higher_order",
    "dim_order_ops",
    "cortex_m",
)
_PRIMITIVE_TYPES = (type(None), bool, int, float, complex, str, bytes)
_TORCH_CONSTANT_TYPES = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme)
_CODE_TYPES = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, type)


class NotCacheable(Exception):
    """The content of an object cannot be determined; the message names the object."""


class Digest:
    """Digest of a sequence of objects.

    Objects may contain references to themselves. A reference to an enclosing object is hashed as the number of nesting
    levels up to that object.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._memo: dict[int, bytes] = {}
        self._enclosing: dict[int, int] = {}
        self._hashed_objects: list[Any] = []  # keeps objects alive, because ids are reused after deletion

    def hexdigest(self) -> str:
        """Digest of all objects that were added."""
        return self._hash.hexdigest()

    def add(self, value: Any) -> None:
        """Add an object and everything that it refers to.

        Raises:
            NotCacheable: the object refers to code without a known version, to a tensor that is sparse or not on the
                CPU, or to an object of an unsupported type.
        """
        self._hash.update(self._hash_value(value))

    def add_sample(self, sample: Inputs) -> None:
        """Add the inputs of one call: their structure, tensors and constants. Does not keep the sample alive.

        Raises:
            NotCacheable: a tensor is sparse, or another input is refused as in ``add``.
        """
        leaves, spec = pytree.tree_flatten((tuple(sample), sample.keywords))
        parts = (
            _hash_tensor(leaf.cpu()) if isinstance(leaf, torch.Tensor) else self._hash_value(leaf) for leaf in leaves
        )
        self._hash.update(_hash_parts("sample", str(spec).encode(), *parts))

    def _hash_value(self, value: Any) -> bytes:
        if isinstance(value, _PRIMITIVE_TYPES):
            return _hash_parts(type(value).__name__, value if isinstance(value, bytes) else repr(value).encode())
        if isinstance(value, _TORCH_CONSTANT_TYPES):
            return _hash_parts("named", str(value).encode())
        if id(value) in self._enclosing:
            return _hash_parts("cycle", str(len(self._enclosing) - self._enclosing[id(value)]).encode())
        if id(value) not in self._memo:
            self._enclosing[id(value)] = len(self._enclosing)
            digest = self._hash_by_type(value)
            del self._enclosing[id(value)]
            self._memo[id(value)] = digest
            self._hashed_objects.append(value)
        return self._memo[id(value)]

    def _hash_by_type(self, value: Any) -> bytes:
        if isinstance(value, Enum):
            return _hash_parts("enum", f"{_qualified_name(type(value))}.{value.name}".encode())
        if isinstance(value, torch.Tensor):
            return _hash_tensor(value)
        if isinstance(value, np.ndarray):
            return _hash_parts("array", f"{value.dtype.str}{value.shape}".encode(), np.ascontiguousarray(value).data)
        if isinstance(value, Mapping):
            parts = (self._hash_value(part) for pair in value.items() for part in pair)
            return _hash_parts("mapping", _container_name(value).encode(), *parts)
        if isinstance(value, (set, frozenset)):
            return _hash_parts("set", *sorted(map(self._hash_value, value)))
        if isinstance(value, (list, tuple)):
            return _hash_parts("list", _container_name(value).encode(), *map(self._hash_value, value))
        return self._hash_object(value)

    def _hash_object(self, value: Any) -> bytes:
        if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)):
            return _hash_parts("operator", _operator_name(value).encode())
        if isinstance(value, _CODE_TYPES):
            captured: list[Any] = []
            if isinstance(value, types.FunctionType):
                _check_defining_file(value)
                captured = [value.__code__.co_firstlineno, value.__defaults__, value.__kwdefaults__]
                captured += [cell.cell_contents for cell in value.__closure__ or ()]
            return _hash_parts("code", _qualified_name(value).encode(), *map(self._hash_value, captured))
        if isinstance(value, functools.partial):
            return _hash_parts("partial", *map(self._hash_value, (value.func, value.args, value.keywords)))
        if isinstance(value, types.MethodType):
            return _hash_parts("method", *map(self._hash_value, (value.__func__, value.__self__)))
        if isinstance(value, (Node, PurePath, pytree.TreeSpec, slice, range)):
            return _hash_parts(type(value).__name__, str(value).encode())
        slots = {name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())}
        if not slots and not hasattr(value, "__dict__"):
            raise NotCacheable(f"a {_qualified_name(type(value))}")
        names = sorted(
            (slots | vars(value).keys() if hasattr(value, "__dict__") else slots) - {"__weakref__", "__dict__"}
        )
        state = {name: getattr(value, name) for name in names if hasattr(value, name)}
        return _hash_parts("object", _qualified_name(type(value)).encode(), self._hash_value(state))


def _hash_parts(kind: str, *parts: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(f"{kind} {[len(part) for part in parts]}:".encode())
    for part in parts:
        digest.update(part)
    return digest.digest()


def _hash_tensor(tensor: torch.Tensor) -> bytes:
    kind = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}"
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return _hash_parts("shape", f"{kind} {tensor.stride()}".encode())
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise NotCacheable(f"a tensor on {tensor.device}, {tensor.layout}")
    return _hash_parts("tensor", f"{kind} {tensor.stride()}".encode(), _element_bytes(tensor))


def _element_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor's elements, in row-major order."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    content: memoryview = flat.view(torch.uint8).numpy().data
    return content


def _container_name(value: Any) -> str:
    """Return the type name of a container. Raises ``NotCacheable`` for user-defined containers."""
    kind = type(value)
    return kind.__name__ if kind.__module__ in ("builtins", "collections", "types") else _qualified_name(kind)


def _operator_name(value: Any) -> str:
    name = str(value)
    namespace = getattr(value, "namespace", None) or getattr(value, "_qualified_op_name", name).split("::")[0]
    if isinstance(value, torch._ops.HigherOrderOperator) or namespace in _VERSIONED_NAMESPACES:
        return f"{namespace} {name}"
    raise NotCacheable(f"the operator {name}, whose namespace has no known version")


def _check_defining_file(function: types.FunctionType) -> None:
    """Check that a function is defined in the file of its ``__module__``. ``functools.wraps`` may change that name."""
    module = sys.modules.get(function.__module__ or "")
    if function.__code__.co_filename != getattr(module, "__file__", None):
        name = f"{function.__module__}.{function.__qualname__}"
        raise NotCacheable(f"'{name}', which is not defined in the file of its __module__")


def _qualified_name(value: Any) -> str:
    """Return the qualified name of a function or class. Raises ``NotCacheable`` if its package has no known version."""
    module, name = getattr(value, "__module__", None) or "builtins", getattr(value, "__qualname__", repr(value))
    package = module.split(".")[0]
    if package not in VERSIONED_PACKAGES and package not in sys.stdlib_module_names:
        raise NotCacheable(f"'{module}.{name}', whose code may change")
    return f"{module}.{name}"
