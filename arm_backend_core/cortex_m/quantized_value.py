"""Values of the Cortex-M lowering: quantized tensors with their parameters and memory layout.

The kernels take int8 only, see ``QuantizedValue.require_int8``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch.fx import Node

from arm_backend_core.cortex_m.kernels.registry import Array
from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.permutation import Layout, identity
from arm_backend_core.qparams import QParams


@dataclass(frozen=True)
class QuantizedValue:
    """A quantized tensor of the program.

    Attributes:
        q: its quantization parameters, per tensor.
        shape: its shape in the program.
        layout: order of the dimensions in memory: dimension i of ``node``'s tensor is dimension ``layout[i]`` of the
            program's tensor.
        node: the node that computes it; None for a constant.
        data: the integers of a constant, in the program's layout; None for a computed tensor.
    """

    q: QParams
    shape: tuple[int, ...]
    layout: Layout
    node: Node | None = None
    data: Array | None = None

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def normalize_dim(self, dim: int) -> int:
        """Index of the dimension that an operator's argument ``dim`` names; a negative ``dim`` counts from the end.

        Raises:
            Unsupported: the tensor is a scalar. PyTorch accepts 0 and -1 for it, but it has no dimension.
        """
        if not self.shape:
            raise Unsupported("its operand is a tensor without dimensions")
        return dim % self.rank

    @property
    def scale(self) -> float:
        """Scale of the quantization."""
        return float(self.q.scale)

    @property
    def zero_point(self) -> int:
        """Zero point of the quantization."""
        return self.q.zero_point

    @staticmethod
    def from_node(node: Node, q: QParams, layout: Layout | None = None) -> QuantizedValue:
        """Describe the result of ``node``, which is stored in ``layout`` (default: the program's)."""
        stored = tuple(node.meta["val"].shape)
        layout = identity(len(stored)) if layout is None else layout
        shape = tuple(size for _, size in sorted(zip(layout, stored, strict=True)))
        return QuantizedValue(q, shape, layout, node=node)

    @staticmethod
    def from_constant(data: Array, q: QParams) -> QuantizedValue:
        """Describe a constant tensor of integers."""
        return QuantizedValue(q, data.shape, identity(data.ndim), data=np.asarray(data))

    def require_int8(self) -> None:
        """Check the element type.

        Raises:
            Unsupported: the tensor is not int8.
        """
        if self.q.dtype is not DType.INT8:
            raise Unsupported(f"the kernels take int8, and an operand is {self.q.dtype.value.lower()}")
