"""The kernels as PyTorch operators: ``arm_cortex_m`` in ATen programs, ``cortex_m`` in edge programs.

PyTorch's registry accepts one definition per name. A definition of ``cortex_m`` operators here would collide with
ExecuTorch's definition. This module does not import ExecuTorch's definition, because that imports ExecuTorch's whole
backend. Therefore, ATen programs use operators of another namespace. These have no scratch arguments, because only edge
programs have scratch tensors. This module does not register the edge operators ``cortex_m``, but gives them a schema
and a function, which ExecuTorch's passes and emitter need. ``torch.ops.cortex_m`` returns these edge operators until
ExecuTorch's definitions are registered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from executorch.exir.dialects.edge._ops import EdgeDialectFunctionSchema, EdgeOpOverload
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from arm_backend_core.cortex_m.catalog import KERNELS
from arm_backend_core.cortex_m.kernels.registry import NAMESPACE, QUANTIZE_OPERATORS, Kernel

_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def _is_scratch(argument: str) -> bool:
    """Whether an argument of a kernel's schema is scratch memory."""
    return argument.rpartition(" ")[2].endswith("scratch")


def _arguments(kernel: Kernel) -> list[str]:
    return [text.strip() for text in kernel.arguments.split(", ")]


def _compute(kernel: Kernel, arguments: tuple[Any, ...]) -> Tensor:
    arrays = [x.detach().contiguous().numpy() if isinstance(x, Tensor) else x for x in arguments]
    return torch.from_numpy(np.array(kernel.compute(*_with_scratch(kernel, arrays)), order="C"))


def _infer(kernel: Kernel, arguments: tuple[Any, ...]) -> Tensor:
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else x for x in arguments]
    like = next(x for x in arguments if isinstance(x, Tensor))
    return like.new_empty(tuple(kernel.result_shape(*_with_scratch(kernel, shapes))), dtype=torch.int8)


def _with_scratch(kernel: Kernel, arguments: list[Any]) -> list[Any]:
    """Append None for the scratch tensors, which are the last arguments of the schema."""
    return [*arguments, *(None for text in _arguments(kernel) if _is_scratch(text))]


def _register(kernel: Kernel) -> None:
    arguments = ", ".join(text for text in _arguments(kernel) if not _is_scratch(text))
    _LIBRARY.define(f"{kernel.name}({arguments}) -> Tensor")
    _LIBRARY.impl(kernel.name, lambda *arguments: _compute(kernel, arguments), "CPU")
    _LIBRARY.impl(kernel.name, lambda *arguments: _infer(kernel, arguments), "Meta")


for _kernel in KERNELS.values():
    if _kernel.name not in QUANTIZE_OPERATORS:
        _register(_kernel)


def kernel_operator(name: str) -> OpOverload:
    """The operator of a kernel in ATen programs, without scratch tensors."""
    overload: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return overload


class _Packet(OpOverloadPacket):
    """The overloads of an operator: a registered overload, or else the one that ``create_unregistered`` made."""

    def create_unregistered(self, overload: str, schema: str, function: Callable[..., Tensor]) -> OpOverload:
        """Create an overload without registering it."""
        created: OpOverload = OpOverload(self, function, function, torch._C.parse_schema(f"cortex_m::{schema}"), [])
        self.__dict__.setdefault("_stand_ins", {})[overload] = created
        return created

    def __getattr__(self, key: str) -> OpOverload:
        try:
            return super().__getattr__(key)
        except AttributeError:
            stand_ins: dict[str, OpOverload] = self.__dict__.get("_stand_ins", {})
            if key not in stand_ins:
                raise
            return stand_ins[key]


@cache
def edge_operator(name: str) -> EdgeOpOverload:
    """The edge operator ``cortex_m.<name>``, with its out variant."""
    kernel = KERNELS[name]
    scratch_count = sum(map(_is_scratch, _arguments(kernel)))

    def functional(*arguments: Any) -> Tensor:
        if name in QUANTIZE_OPERATORS:
            result: Tensor = getattr(torch.ops.quantized_decomposed, name).default(*arguments)
            return result
        return kernel_operator(name)(*arguments[: len(arguments) - scratch_count])

    def out_variant(*arguments: Any, out: Tensor) -> Tensor:
        return out.copy_(functional(*arguments))

    packet = _Packet(f"cortex_m::{name}", name, functional, [])
    packet.__module__ = "torch._ops.cortex_m"  # as in torch.ops; printed graphs show it
    overload = packet.create_unregistered("default", f"{name}({kernel.arguments}) -> Tensor", functional)
    out_overload = packet.create_unregistered(
        "out", f"{name}.out({kernel.arguments}, *, Tensor(a!) out) -> Tensor(a!)", out_variant
    )
    if not hasattr(torch.ops.cortex_m, name):
        setattr(torch.ops.cortex_m, name, packet)
    edge = EdgeOpOverload(overload, EdgeDialectFunctionSchema(overload._schema))
    edge._out_variant = out_overload  # ``to_out_variant`` of ExecuTorch reads this first, then the registry
    return edge
