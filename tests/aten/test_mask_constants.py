"""Bounds of masks before exponentials."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from arm_backend_core.aten.mask_constants import bound_masks


class _StableSoftmax(nn.Module):
    """Subtracts the maximum of masked scores, whose rows an index selects that is computed after the maximum."""

    def forward(self, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        """Subtract the maximum of other rows, and compute the exponential."""
        masked = x.masked_fill(mask, float("-inf"))
        peak = masked.amax(-1, keepdim=True)
        return torch.exp(masked - peak.index_select(0, rows + 1 - 1))


def test_a_bounded_maximum_is_computed_after_its_other_operands() -> None:
    model, inputs = _StableSoftmax(), (torch.randn(4, 8), torch.rand(4, 8) > 0.5, torch.arange(4))
    module = torch.export.export(model, inputs).module()
    bound_masks(module)
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(*inputs), model(*inputs))
