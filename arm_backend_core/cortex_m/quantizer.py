"""Quantizer for the kernels of a Cortex-M: int8 where there is a kernel, floating point elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from arm_backend_core.cortex_m.lower import has_kernel
from arm_backend_core.nodes import TIMESTEP_SLOT, is_float, overload_of
from arm_backend_core.ops.registry import AnnotationKind
from arm_backend_core.quantization.annotator import Annotator
from arm_backend_core.quantization.config import QuantizationConfig
from arm_backend_core.quantization.quantizer import ArmQuantizer
from arm_backend_core.targets.compile_spec import CortexMCompileSpec

aten = torch.ops.aten
#: Matrix products whose kernel takes and returns int8.
_PRODUCTS = (aten.matmul.default, aten.bmm.default, aten.mm.default)


class CortexMQuantizer(ArmQuantizer):
    """Quantizes for a ``CortexMCompileSpec``.

    The kernels have no int16 tensors. Other targets keep some results in int16, for example residual additions before
    layer normalization and states that accumulate. This quantizer chooses:

    - floating point for an operator without a kernel,
    - floating point for arithmetic whose result is int16 on other targets, if an operator in floating point reads it,
    - int8 for all other operators. Convolutions, matrix products and recurrent layers with a kernel are always int8.
    """

    spec_class = CortexMCompileSpec

    def _configs_of(
        self, graph: Graph, stacks: Mapping[Node, dict[str, Any]]
    ) -> Callable[[Node], QuantizationConfig | None]:
        config_of = super()._configs_of(graph, stacks)
        in_float = _find_float_nodes(Annotator(graph, config_of))

        def int8_config_of(node: Node) -> QuantizationConfig | None:
            config = config_of(node)
            is_int8 = config is not None and node not in in_float and has_kernel(node)
            return replace(config, int16_activation=None) if is_int8 and config is not None else None

        return int8_config_of


def _find_float_nodes(annotator: Annotator) -> set[Node]:
    """Find arithmetic whose result other targets keep in int16, and which an operator in floating point reads."""
    int16_nodes, in_float = annotator.make_plan().int16_nodes, set[Node]()
    for node, record in reversed(annotator.records.items()):
        is_product = record.kind is AnnotationKind.CONV or overload_of(node.target) in _PRODUCTS
        if node not in int16_nodes or is_product or TIMESTEP_SLOT in node.meta:
            continue
        if any(user in in_float or (is_float(user) and not has_kernel(user)) for user in node.users):
            in_float.add(node)
    return in_float
