"""``cortex_m`` quantize and dequantize: the boundary operators of delegates, for the edge dialect.

ExecuTorch's own definitions import its whole Arm backend, about 350 modules, and PyTorch's registry accepts one
definition per name. Therefore, this module does not register its operators. They have a schema and a function, which
ExecuTorch's passes and emitter need. ``torch.ops`` returns them until ExecuTorch's definitions are registered, so the
order of the imports does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from executorch.exir.dialects.edge._ops import EdgeDialectFunctionSchema, EdgeOpOverload
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

#: Integer types that the kernels support.
DTYPES = (torch.int8, torch.int16)
_ARGUMENTS = "Tensor input, float scale, int zero_point, int quant_min, int quant_max, ScalarType dtype"


class _Packet(OpOverloadPacket):
    """The overloads of an operator: the registered overloads, else those of ``create_unregistered``."""

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


def _edge_operator(name: str) -> EdgeOpOverload:
    """Create the edge operator ``cortex_m.<name>``, which computes the same as ``quantized_decomposed.<name>``."""
    compute = getattr(torch.ops.quantized_decomposed, name).default

    def functional(*arguments: Any) -> Tensor:
        result: Tensor = compute(*arguments)
        return result

    def out_variant(*arguments: Any, out: Tensor) -> Tensor:
        return out.copy_(compute(*arguments))

    packet = _Packet(f"cortex_m::{name}", name, functional, [])
    packet.__module__ = "torch._ops.cortex_m"  # as in torch.ops; printed graphs show it
    functional_overload = packet.create_unregistered("default", f"{name}({_ARGUMENTS}) -> Tensor", functional)
    out_overload = packet.create_unregistered(
        "out", f"{name}.out({_ARGUMENTS}, *, Tensor(a!) out) -> Tensor(a!)", out_variant
    )
    if not hasattr(torch.ops.cortex_m, name):
        setattr(torch.ops.cortex_m, name, packet)
    edge = EdgeOpOverload(functional_overload, EdgeDialectFunctionSchema(functional_overload._schema))
    edge._out_variant = out_overload  # ``to_out_variant`` reads this attribute before it searches the registry
    return edge


QUANTIZE, DEQUANTIZE = _edge_operator("quantize_per_tensor"), _edge_operator("dequantize_per_tensor")
