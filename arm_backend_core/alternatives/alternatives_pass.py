"""The pass that applies alternatives, bit-exact rewrites of TOSA operators, where a cost model estimates a gain."""

from __future__ import annotations

from arm_backend_core import compilation_log
from arm_backend_core.alternatives import (
    attention_heads,
    attention_matmul,
    broadcast_tiles,
    channel_permutation,
    channels_as_taps,
    concat_copies,
    dilation,
    factorized_pools,
    packed_channels,
    pad_channels,
    pixel_rows,
    pixel_shuffle,
    pixels_as_channels,
    short_axis_concat,
    space_to_depth_folding,
    strided_slices,
    transpose_split,
    transposed_convolution,
)
from arm_backend_core.alternatives.choose import Choice, choose_alternatives
from arm_backend_core.alternatives.cost_model import VelaCostModel
from arm_backend_core.alternatives.deferred import DeferredTuningSpec, pickle_graph, unpickle_graph
from arm_backend_core.alternatives.unconditional import apply_unconditional
from arm_backend_core.targets.compile_spec import ArmCompileSpec, EthosUCompileSpec
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph
from arm_backend_core.tosa.passes.pipeline import Pass, assert_serializable, run_last_passes
from arm_backend_core.tosa.serialize import serialize

#: The alternatives that are chosen by cost, in the order of application. An alternative may rewrite the result of an
#: earlier one.
ALTERNATIVES = (
    *(
        factorized_pools.FACTORIZED_POOLS,
        transposed_convolution.SUB_PIXEL_CONVOLUTION,
        strided_slices.STRIDED_SLICES,
        short_axis_concat.SHORT_AXIS_CONCAT,
        channel_permutation.CHANNEL_PERMUTATION,
        dilation.FOLDED_DILATION,
    ),
    *(
        attention_heads.MERGE_HEADS,
        attention_heads.SEPARATE_HEADS,
        attention_matmul.MATMUL_PER_HEAD,
        attention_matmul.TRANSPOSED_MATMUL,
        transpose_split.MERGED_TRANSPOSE,
        transpose_split.TRANSPOSE_SEQUENCE,
    ),
    *(
        pixel_shuffle.PIXEL_SHUFFLE,
        pixel_shuffle.PIXEL_SHUFFLE_BY_IDENTITY,
        space_to_depth_folding.SPACE_TO_DEPTH,
        channels_as_taps.CHANNELS_AS_TAPS,
        pixels_as_channels.PIXELS_AS_CHANNELS,
        pad_channels.PAD_CHANNELS,
        pad_channels.PAD_SLOW_CHANNELS,
        packed_channels.PACKED_CHANNELS,
        pixel_rows.PIXEL_ROWS,
        broadcast_tiles.BROADCAST_TILES,
        concat_copies.CONCAT_COPIES,
    ),
)


def make_alternatives_pass(spec: ArmCompileSpec) -> Pass:
    """Create the pass that chooses alternatives by cost, and applies the unconditional ones.

    It changes only graphs for an Ethos-U. It chooses by cost if ``spec`` is an ``EthosUCompileSpec`` that sets
    ``search_alternatives``. If ``spec`` is a ``DeferredTuningSpec``, it first appends the graph to ``spec.graphs``.
    """

    def choose(graph: Graph, target: Target) -> None:
        if isinstance(spec, DeferredTuningSpec):
            spec.graphs.append(pickle_graph(graph))
        if not target.hardware.is_ethos_u:
            return
        transpose_split.drop_unit_dimensions(graph, target)
        choices: list[Choice] = []
        if isinstance(spec, EthosUCompileSpec) and spec.search_alternatives:
            choices = choose_alternatives(graph, target, ALTERNATIVES, VelaCostModel(spec.configuration).estimate)
        if choices:
            compilation_log.current_log().notes.append(describe_choices(choices))
        apply_unconditional(graph, target)

    return choose


def choose_deferred(data: bytes, spec: EthosUCompileSpec) -> bytes:
    """Choose alternatives for a graph that ``DeferredTuningSpec`` has pickled; return the TOSA flatbuffer."""
    graph = unpickle_graph(data)
    for step in (make_alternatives_pass(spec), run_last_passes, assert_serializable):
        step(graph, spec.target)
    return serialize(graph)


def describe_choices(choices: list[Choice]) -> str:
    """Describe the chosen alternatives for the report.

    Alternatives that do not take more cycles than the original operators come first. The others take more cycles and
    save memory: ``PACKED_CHANNELS`` saves bytes of SRAM, any other alternative saves bytes of weights.
    """
    faster, smaller = ([c for c in choices if (c.saved_cycles < 0) == costs_cycles] for costs_cycles in (False, True))
    texts = []
    if faster:
        cycles = sum(choice.saved_cycles for choice in faster)
        texts.append(f"bit-equal alternatives save {cycles:,} cycles by Vela's estimate: {_list_choices(faster)}")
    if smaller:
        cycles = -sum(choice.saved_cycles for choice in smaller)
        texts.append(f"bit-equal alternatives save memory for {cycles:,} more cycles: {_list_choices(smaller)}")
    return "; ".join(texts)


def _list_choices(choices: list[Choice]) -> str:
    return ", ".join(f"{choice.occurrences} {choice.name}" for choice in choices)
