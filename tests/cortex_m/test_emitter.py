"""The emitter writes a transpose as kernel calls within the limits of the kernels."""

from __future__ import annotations

import pytest
import torch

from arm_backend_core.cortex_m.emitter import Emitter
from arm_backend_core.permutation import Layout
from arm_backend_core.targets.cortex_m import Isa


def _program(shape: tuple[int, ...]) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(shape, dtype=torch.int8)
    graph.output(x)
    return torch.fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("isa", Isa)
@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((1, 3, 224, 224), (0, 2, 3, 1)),  # more pixels than MVE code for rank 2 can address
        ((1, 70_000, 2), (0, 2, 1)),
        ((5, 7), (1, 0)),
        ((2, 3, 4, 5), (3, 1, 0, 2)),
    ],
)
def test_transpose_within_the_limits_of_its_kernel(isa: Isa, shape: tuple[int, ...], order: Layout) -> None:
    module = _program(shape)
    x, output = module.graph.nodes
    emitter = Emitter(module, isa)
    emitter.set_insertion_point(output, x)
    output.args = (emitter.transpose(x, order),)
    module.recompile()
    targets = [str(node.target) for node in module.graph.nodes]
    assert "arm_cortex_m.transpose.default" in targets
    assert not any("permute" in target for target in targets)
    data = torch.randint(-128, 128, shape, dtype=torch.int8)
    assert torch.equal(module(data), data.permute(order))
