"""Affine functions of channels in layers: batch norms are folded only along the channels of the layer before them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from arm_backend_core.aten.batch_norm import fold_batch_norms
from arm_backend_core.aten.constant_folding import Constants
from arm_backend_core.aten.layer_affine import ChannelAffine, fold_into_producer

aten = torch.ops.aten


class _Transposed(nn.Module):
    """A batch norm of dimension 1, behind a linear layer whose 4 outputs are the last dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x))
        return y


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {
    "linear": (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), (5, 3), 1),
    "linear, another dimension": (_Transposed(), (2, 4, 3), 2),
    "convolution": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (2, 3, 5, 5), 1),
    "transposed": (nn.Sequential(nn.ConvTranspose1d(3, 4, 3), nn.BatchNorm1d(4)), (2, 3, 5), 1),
    "transposed, groups": (nn.Sequential(nn.ConvTranspose1d(4, 4, 3, groups=2), nn.BatchNorm1d(4)), (2, 4, 5), 2),
    "no layer": (nn.Sequential(nn.ReLU(), nn.BatchNorm3d(4)), (2, 4, 2, 3, 3), 1),
}


@pytest.mark.parametrize("name", LAYERS)
def test_batch_norm_is_folded_into_the_layer_of_its_channels(name: str) -> None:
    """The number of layers after folding: a batch norm is part of the layer before it, or a separate layer."""
    model, shape, count = LAYERS[name]
    torch.manual_seed(0)
    for norm in (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)):
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            nn.init.uniform_(tensor, 0.5, 2.0)  # type: ignore[arg-type]
    x = torch.randn(shape)
    module = torch.export.export(model.eval(), (x,)).module()
    fold_batch_norms(module)
    module.graph.eliminate_dead_code()
    module.recompile()
    layers = [node for node in module.graph.nodes if "conv" in str(node.target) or "linear" in str(node.target)]
    calls = [node for node in layers if node.op == "call_function"]
    assert len(calls) == count
    torch.testing.assert_close(module(x), model(x), atol=1e-5, rtol=1e-5)


def test_unbatched_convolutions_have_their_channels_first() -> None:
    x, gain = torch.randn(3, 4, 4), torch.rand(2) + 0.5
    conv = nn.Conv2d(3, 2, 3)
    module = torch.export.export(conv, (x,)).module()
    (node,) = module.graph.find_nodes(op="call_function", target=aten.conv2d.default)
    constants, affine = Constants(module), ChannelAffine(gain, None)
    reason = fold_into_producer(constants, node, affine, 1)
    assert reason is not None
    assert "channels" in reason
    assert fold_into_producer(constants, node, affine, 0) is None
    module.recompile()
    torch.testing.assert_close(module(x), conv(x) * gain[:, None, None], atol=1e-5, rtol=1e-5)
