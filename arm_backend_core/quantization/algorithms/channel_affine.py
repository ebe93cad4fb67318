"""Channel affine folding: sums and products with one constant per channel become part of a layer.

Examples: a network normalizes its input by (x / 255 - mean) / std, with mean and std [C, 1, 1]. A frozen batch norm is
x * scale + shift. Layer scale (Touvron et al. 2021) multiplies a branch by one parameter per channel. Such a chain is
one function y = gain[c] * x + offset[c]. If its operators were quantized one by one, each would round. In addition, if
one of them is a division, or a residual sum before a layer norm, its operands would be int16, which takes more cycles
(``FusionPlan.benefits_from_int16``).
The function is folded into the layer that computes x. If this is not possible, it is folded into the layer that reads
y, or becomes a depthwise 1x1 convolution (``aten/layer_affine.py``).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from arm_backend_core.aten.affine_chains import COPIES, AffineChain, find_affine_chains
from arm_backend_core.aten.constant_folding import Constants
from arm_backend_core.aten.layer_affine import (
    FOLDED_AFFINE,
    find_consumer_layer,
    fold_into_consumer,
    fold_into_producer,
    insert_depthwise,
)
from arm_backend_core.graph_edits import propagate_dropout_metadata
from arm_backend_core.nodes import FEEDS_DROPOUT, TIMESTEP_SLOT, is_state, readers_through
from arm_backend_core.ops.catalog import find_record, is_sinusoid
from arm_backend_core.ops.registry import AnnotationKind
from arm_backend_core.quantization.algorithms.coordinate_precision import find_coordinate_nodes
from arm_backend_core.quantization.config import QuantizationConfig
from arm_backend_core.targets.hardware import Hardware
from arm_backend_core.tosa.passes.rewrite_tracing import is_rewrite_traced

aten = torch.ops.aten
_PERMUTATIONS = (aten.permute.default, aten.transpose.int)
_REORDERS = (*_PERMUTATIONS, aten.view.default, aten.reshape.default)


class RewriteOutcome(NamedTuple):
    """How a chain of sums and products with constants per channel was rewritten.

    Attributes:
        last: name of the chain's last operator.
        rewrite: "producer" (folded into the layer before the chain), "consumer" (folded into the layer after it) or
            "depthwise" (replaced by a depthwise convolution); None if the chain stays.
        reasons: why the rewrites that were tried before ``rewrite`` do not apply, or why the chain stays.
    """

    last: str
    rewrite: str | None
    reasons: tuple[str, ...]

    def describe(self) -> str:
        """Describe the outcome in a line."""
        return f"{self.rewrite or 'stays'}{', because ' if self.reasons else ''}{'; '.join(self.reasons)}"


def fold_channel_affines(
    module: GraphModule, hardware: Hardware, config_of: Callable[[Node], QuantizationConfig | None]
) -> list[RewriteOutcome]:
    """Fold chains of sums and products with constants per channel into layers, before the graph is quantized.

    Args:
        module: the module to edit. Its graph is functional.
        hardware: the target's hardware.
        config_of: returns the quantization configuration of a node; None for floating point.

    Returns:
        One outcome per chain: first the chains along dimension 1, in reverse program order, then the chains along the
        last dimension, also in reverse order.
    """
    constants, outcomes = Constants(module), list[RewriteOutcome]()
    rewriter: _Rewriter | None = None
    for axis in (1, -1):  # dimension 1 first, because more rewrites apply to chains along it
        # Backwards, because the source of a chain may be the result of another one.
        for chain in reversed(find_affine_chains(module.graph, constants, axis)):
            rewriter = rewriter or _Rewriter(constants, hardware, config_of, _find_int16_paths(module))
            outcomes.append(rewriter.rewrite(chain))
    for outcome in outcomes if is_rewrite_traced() else ():
        print(f"rewrite: affine function '{outcome.last}': {outcome.describe()}", file=sys.stderr)
    return outcomes


def _find_int16_paths(module: GraphModule) -> set[Node]:
    """Find arithmetic that must not be folded, because the quantizer recognizes its operators and keeps it in int16.

    This arithmetic computes coordinates, arguments of sinusoids, and values that a buffer keeps for the next call.
    """
    nodes = find_coordinate_nodes(module.graph)
    for node in module.graph.nodes:
        if is_sinusoid(node):
            nodes |= {*_trace_back(node)}
        if is_state(node):
            nodes |= {
                reader
                for reader in readers_through(node, _is_univariate_or_movement)
                if _is_univariate_or_movement(reader)
            }
    return nodes


def _is_univariate_or_movement(node: Node) -> bool:
    record = find_record(node)
    return record is not None and (record.is_univariate or record.kind is AnnotationKind.SHARED)


def _trace_back(node: Node) -> Iterator[Node]:
    """Yield the elementwise and data movement operators upstream of ``node``, up to layers and inputs."""
    pending = list(node.all_input_nodes)
    for source in pending:  # the loop appends to pending
        if _is_univariate_or_movement(source):
            yield source
            pending += [x for x in source.all_input_nodes if x not in pending]


@dataclass(frozen=True)
class _Rewriter:
    """Folds chains into layers, or replaces them by depthwise convolutions."""

    constants: Constants
    hardware: Hardware
    config_of: Callable[[Node], QuantizationConfig | None]
    int16_paths: set[Node]

    def rewrite(self, chain: AffineChain) -> RewriteOutcome:
        """Apply the first rewrite that is possible."""
        reason, reasons = self._find_refusal(chain), list[str]()
        if reason is not None:
            return RewriteOutcome(chain.last.name, None, (reason,))
        rewrites = {
            "producer": self._fold_into_producer,
            "consumer": self._fold_into_consumer,
            "depthwise": self._insert_depthwise,
        }
        for name, rewrite in rewrites.items():
            reason = rewrite(chain)
            if reason is None:
                return RewriteOutcome(chain.last.name, name, tuple(reasons))
            reasons.append(reason)
        return RewriteOutcome(chain.last.name, None, tuple(reasons))

    def _find_refusal(self, chain: AffineChain) -> str | None:
        config = self.config_of(chain.last)
        if any(TIMESTEP_SLOT in node.meta for node in chain.nodes):
            return "it is part of a recurrent layer, whose time steps share scales"
        if not self.int16_paths.isdisjoint(chain.nodes):
            return "it computes coordinates, angles or a state in int16"
        if config is None or any(self.config_of(node) != config for node in chain.nodes):
            return "its operators are not all quantized alike"
        if config.weight is None or config.weight.ch_axis is None:
            return "weights have no scale per channel"
        if not chain.source.meta["val"].numel():
            return "it has no elements"
        is_finite = all(bool(x.isfinite().all()) for x in chain.affine.tensors)
        return None if is_finite else "a constant is 0 as a divisor, or not finite"

    def _is_quantized_alike(self, chain: AffineChain, layer: Node) -> bool:
        return self.config_of(layer) == self.config_of(chain.last)

    def _fold_into_producer(self, chain: AffineChain) -> str | None:
        path, axis = _trace_producer(chain)
        layer = path[-1]
        if len(chain.source.users) != 1:
            return "other operators read its operand"
        if not self._is_quantized_alike(chain, layer):
            return "the layer before it is quantized differently"
        if TIMESTEP_SLOT in layer.meta:
            return "the layer before it is part of a recurrent layer"
        if chain.affine.offset is not None and any(FEEDS_DROPOUT in node.meta for node in path):
            return "a dropout lies between the layer and it: folded into the layer, its offset would be dropped, too"
        reason = fold_into_producer(self.constants, layer, chain.affine, axis)
        if reason is None:
            folded = layer.meta.get(FOLDED_AFFINE)
            layer.meta[FOLDED_AFFINE] = chain.affine if folded is None else folded.followed_by(chain.affine)
            _replace(chain, chain.source)
        return reason

    def _fold_into_consumer(self, chain: AffineChain) -> str | None:
        match = find_consumer_layer(chain.last) if chain.axis == 1 else None
        if match is None:
            return "no single layer reads its result"
        layer, _ = match
        if not self._is_quantized_alike(chain, layer):
            return "the layer after it is quantized differently"
        if FEEDS_DROPOUT in chain.last.meta:
            return "a dropout reads its result"
        if not self._is_int8(chain):
            return "int16 activations or 4-bit weights: folding its gains into the weights would lose accuracy"
        if chain.has_parameter:
            return "training changes its gains, and the int8 weights of the layer after it may lose bits"
        reason = fold_into_consumer(self.constants, chain.last, layer, chain.affine)
        if reason is None:
            _replace(chain, chain.source)
        return reason

    def _is_int8(self, chain: AffineChain) -> bool:
        """Whether activations and weights have 8 bits. Only then may gains be folded into the weights of a consumer.

        Mean SQNR before and after folding, over 16 random networks with a 4x4 convolution of an image:

        - largest gain 1.02 times the smallest: INT8 44.0 and 50.3 dB, A16W8 50.6 and 50.3 dB,
        - largest gain 2 times the smallest: INT8 42.7 and 48.3 dB, A16W8 50.6 and 48.3 dB.
        """
        config = self.config_of(chain.last)
        assert config is not None
        assert config.weight is not None
        return config.activation.dtype is torch.int8 and config.weight.quant_max == 127

    def _insert_depthwise(self, chain: AffineChain) -> str | None:
        reason = self._find_cost_refusal(chain)
        if reason is None:
            with chain.last.graph.inserting_before(chain.last):
                result = insert_depthwise(self.constants, chain.last, chain.source, chain.affine)
            _replace(chain, result)
        return reason

    def _find_cost_refusal(self, chain: AffineChain) -> str | None:
        """Why a depthwise convolution is impossible or would not take fewer cycles than the chain; else None.

        The choice precedes calibration, because the two graphs have different tensors to calibrate. The cost model does
        not make this choice: it compares only alternatives with bit-equal results. Total cycles of a chain of
        [1, 32, 48, 48] between two convolutions of 32 channels in INT8:

        ===================  ==========  ==========  ===========
        NPU                  x * g       x * g + b   (x - b) / g
        ===================  ==========  ==========  ===========
        U55-128, chain       887,560     1,477,384   1,514,936
        U55-128, depthwise   335,688     335,688     335,688
        U85-256, chain       245,536     246,039     466,782
        U85-256, depthwise   264,564     264,564     264,564
        ===================  ==========  ==========  ===========
        """
        shape = chain.source.meta["val"].shape
        if chain.axis != 1 or len(shape) not in (3, 4):
            return "its channels are not dimension 1 of a tensor with 3 or 4 dimensions"
        if not self.hardware.is_ethos_u:
            return "the target has no NPU"
        if not _is_beside_convolution(chain):
            return "no convolution is next to it, so that a depthwise convolution would need TRANSPOSEs"
        if chain.divides:  # the chain would multiply by the reciprocal in INT32, which takes more cycles
            return None
        if math.prod(shape[2:]) == 1:
            return "for one pixel, decoding the weights takes more cycles"
        return (
            "the NPU fuses it with the operator before it into one chain, so that it takes few cycles"
            if self.hardware.chains
            else None
        )


def _is_beside_convolution(chain: AffineChain) -> bool:
    """Whether a convolution computes the source or reads the result, also across elementwise operators and pooling."""
    shape = chain.source.meta["val"].shape
    pending = [chain.source, *chain.last.users]
    for node in pending:  # the loop appends to pending
        record, value = find_record(node), node.meta.get("val")
        if record is not None and record.kind is AnnotationKind.CONV and node.target is not aten.linear.default:
            return True
        has_channels = isinstance(value, Tensor) and value.dim() == len(shape) and value.shape[:2] == shape[:2]
        if has_channels and _is_univariate_or_movement(node) and node.target not in _REORDERS:
            pending += [x for x in (*node.all_input_nodes, *node.users) if x not in pending]
    return False


def _trace_producer(chain: AffineChain) -> tuple[list[Node], int]:
    """Trace the source to the node that computes its elements, across permutations and copies.

    Returns:
        The nodes from the source to the producing node, and the channel dimension of the producing node's result.
    """
    node, axis = chain.source, chain.axis % chain.source.meta["val"].dim()
    path = [node]
    while len(node.users) == 1 and node.target in (*COPIES, *_PERMUTATIONS):
        arguments: Any = node.args
        rank = node.meta["val"].dim()
        if node.target is aten.permute.default:
            axis = arguments[1][axis] % rank
        elif node.target is aten.transpose.int:
            pair = [arguments[1] % rank, arguments[2] % rank]
            axis = pair[1 - pair.index(axis)] if axis in pair else axis
        node = arguments[0]
        path.append(node)
    return path, axis


def _replace(chain: AffineChain, result: Node) -> None:
    propagate_dropout_metadata(chain.last, result)
    chain.last.replace_all_uses_with(result)
    for node in reversed(chain.nodes):
        node.graph.erase_node(node)
