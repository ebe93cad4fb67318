"""Computed size of the method allocator, for kinds of values that delegated programs seldom have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge
from executorch.exir._serialize._program import deserialize_pte_binary
from torch import Tensor, nn
from torch.export import Dim

from arm_recipes.firmware.host_run import FirmwareTestCase
from arm_recipes.firmware.memory_pools import measure_pools
from arm_recipes.runtime.inspect import inspect_program
from arm_recipes.runtime.method_memory import method_allocator_bytes

pytestmark = pytest.mark.xdist_group("firmware")


class Lists(nn.Module):
    """Operators with lists of integers, floats, booleans, tensors and optional tensors."""

    def forward(self, x: Tensor, which: Tensor) -> tuple[Tensor, ...]:
        """Return results of operators with list arguments."""
        picked = x[:, which]
        larger = torch.nn.functional.interpolate(x[None], scale_factor=(2.0, 1.5), mode="nearest")
        return torch.cat([x, x.permute(0, 2, 1).reshape(x.shape), x]), picked, larger, torch.split(x, [1, 2], dim=1)[1]


class Rounded(nn.Module):
    """An operator with a string argument, the rounding mode."""

    def forward(self, x: Tensor) -> Tensor:
        """Divide with rounding, and add the sum."""
        return torch.div(x, 2.0, rounding_mode="floor") + x.sum()


_PROGRAMS: dict[str, tuple[nn.Module, tuple[Tensor, ...], Any]] = {
    "lists": (Lists(), (torch.randn(2, 3, 4), torch.tensor([2, 0])), None),
    "text": (Rounded(), (torch.randn(3, 5),), None),
    "dynamic": (Rounded(), (torch.randn(3, 5),), ({0: Dim("rows", min=1, max=7)},)),
}


@pytest.mark.parametrize("name", _PROGRAMS)
def test_computed_size_is_the_measured_size(name: str) -> None:
    """Measured in ExecuTorch's runtime, without delegates."""
    model, inputs, shapes = _PROGRAMS[name]
    captured = torch.export.export(model, inputs, dynamic_shapes=shapes)
    edge = to_edge(captured, compile_config=EdgeCompileConfig(_check_ir_validity=False))
    content = bytes(edge.to_executorch().buffer)
    inspection = inspect_program(content)
    (method,) = inspection.methods
    if name == "dynamic":
        inputs = (torch.randn(7, 5),)
    case = FirmwareTestCase("forward", tuple(tensor.numpy().tobytes() for tensor in inputs), len(method.outputs))
    pools = measure_pools(content, inspection, [case])
    assert pools.exact
    (plan,) = deserialize_pte_binary(content).program.execution_plan
    assert method_allocator_bytes(plan, 64) == pools.methods[0].method_allocator_64
    kinds = {type(value.val).__name__ for value in plan.values}
    expected = {
        "lists": {"IntList", "TensorList", "OptionalTensorList", "DoubleList"},
        "text": {"String"},
        "dynamic": set(),
    }
    assert expected[name] <= kinds, kinds
