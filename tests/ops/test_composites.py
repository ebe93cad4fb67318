"""Operators without a record: PyTorch's decomposition, spliced in whole, brings them to operators that have one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arm_backend_core import TosaCompileSpec, events
from arm_backend_core.delegate import delegate

Shapes = Sequence[tuple[int, ...]]
PAIR: Shapes = [(2, 8), (2, 8)]

#: Function and the shapes of its inputs, by name.
COMPOSITES: dict[str, tuple[Callable[..., Tensor], Shapes]] = {
    "absolute": (torch.absolute, [(2, 8)]),
    "addcdiv": (lambda x, y, z: torch.addcdiv(x, y, z.abs() + 1), [*PAIR, (2, 8)]),
    "addcmul": (lambda x, y, z: torch.addcmul(x, y, z, value=0.5), [*PAIR, (2, 8)]),
    "arcsinh": (torch.arcsinh, [(2, 8)]),
    "arctan": (torch.arctan, [(2, 8)]),
    "broadcast_to": (lambda x: torch.broadcast_to(x, (3, 2, 8)), [(2, 8)]),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), [(1, 4, 3, 4)]),
    "clip": (lambda x: torch.clip(x, -0.5, 0.5), [(2, 8)]),
    "column_stack": (lambda x, y: torch.column_stack((x, y)), PAIR),
    "cosine_similarity": (lambda x, y: F.cosine_similarity(x, y, -1), PAIR),
    "diff": (torch.diff, [(2, 8)]),
    "divide": (lambda x, y: torch.divide(x, y.abs() + 1), PAIR),
    "dot": (torch.dot, [(8,), (8,)]),
    "dstack": (lambda x, y: torch.dstack((x, y)), PAIR),
    "fix": (torch.fix, [(2, 8)]),
    "glu": (F.glu, [(2, 8)]),
    "hsplit": (lambda x: torch.hsplit(x, 2)[1], [(2, 8)]),
    "hstack": (lambda x, y: torch.hstack((x, y)), PAIR),
    "huber_loss": (F.huber_loss, PAIR),
    "kron": (torch.kron, [(2, 2), (2, 3)]),
    "l1_loss": (F.l1_loss, PAIR),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), [(2, 8)]),
    "moveaxis": (lambda x: torch.moveaxis(x, 0, 1), [(2, 8)]),
    "mse_loss": (F.mse_loss, PAIR),
    "mT": (lambda x: x.mT, [(2, 8)]),
    "multiply": (torch.multiply, PAIR),
    "mv": (torch.mv, [(4, 8), (8,)]),
    "nansum": (torch.nansum, [(2, 8)]),
    "narrow": (lambda x: torch.narrow(x, 1, 2, 3), [(2, 8)]),
    "negative": (torch.negative, [(2, 8)]),
    "normalize": (lambda x: F.normalize(x, dim=-1), [(2, 8)]),
    "outer": (torch.outer, [(4,), (5,)]),
    "pairwise_distance": (F.pairwise_distance, PAIR),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), [(1, 8, 3, 4)]),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), [(1, 2, 4, 6)]),
    "ravel": (torch.ravel, [(2, 8)]),
    "repeat_interleave": (lambda x: torch.repeat_interleave(x, 2, 1), [(2, 8)]),
    "rms_norm": (lambda x: F.rms_norm(x, (8,)), [(2, 3, 8)]),
    "smooth_l1_loss": (F.smooth_l1_loss, PAIR),
    "softmin": (lambda x: F.softmin(x, -1), [(2, 8)]),
    "subtract": (torch.subtract, PAIR),
    "swapaxes": (lambda x: torch.swapaxes(x, 0, 1), [(2, 8)]),
    "tensor_split": (lambda x: torch.tensor_split(x, 2, 1)[1], [(2, 8)]),
    "tensordot": (lambda x, y: torch.tensordot(x, y, 1), [(4, 8), (8, 3)]),
    "tile": (lambda x: torch.tile(x, (2, 1)), [(2, 8)]),
    "tril": (torch.tril, [(4, 4)]),
    "triu": (torch.triu, [(4, 4)]),
    "true_divide": (lambda x, y: torch.true_divide(x, y.abs() + 1), PAIR),
    "unsafe_chunk": (lambda x: torch.unsafe_chunk(x, 2, 1)[0], [(2, 8)]),
    "vector_norm": (lambda x: torch.linalg.vector_norm(x, 2, -1), [(2, 8)]),
    "vstack": (lambda x, y: torch.vstack((x, y)), PAIR),
    "xlogy": (lambda x, y: torch.xlogy(x, y.abs() + 1), PAIR),
}


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


@pytest.mark.parametrize("name", COMPOSITES)
def test_runs_whole_in_float(name: str) -> None:
    function, shapes = COMPOSITES[name]
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(torch.rand(shape, generator=generator) * 4 - 2 for shape in shapes)
    program = torch.export.export(Calls(function), inputs, strict=False)
    with events.record() as log:
        lowered = delegate(program, TosaCompileSpec("TOSA-1.0+FP"))
    assert not log.rejected
    assert len(log.delegates) == 1
    torch.testing.assert_close(lowered.module()(*inputs), function(*inputs), rtol=1e-4, atol=1e-5)
