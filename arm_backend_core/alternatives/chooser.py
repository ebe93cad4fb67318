"""The forms that are known, and the pass that chooses among them for a compile spec."""

from __future__ import annotations

from arm_backend_core import events
from arm_backend_core.alternatives import (
    attention_heads,
    attention_matmul,
    cascaded_pools,
    channels,
    dilation,
    pad_channels,
    patches,
    pixel_shuffle,
    pixels_as_channels,
    strided_slices,
    transpose_split,
    transposed_convolution,
)
from arm_backend_core.alternatives.always import take_always
from arm_backend_core.alternatives.choose import Choice, choose_alternatives
from arm_backend_core.alternatives.cost_model import VelaCostModel
from arm_backend_core.alternatives.deferred import DeferredTuningSpec, pickle_graph, unpickle_graph
from arm_backend_core.targets.compile_spec import ArmCompileSpec, EthosUCompileSpec
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph
from arm_backend_core.tosa.passes import Pass, check, finish
from arm_backend_core.tosa.serialize import serialize

#: In this order: what a form writes, those behind it may write otherwise.
ALTERNATIVES = (
    *(
        cascaded_pools.CASCADE,
        transposed_convolution.UPSAMPLING,
        strided_slices.PHASES,
        channels.CHANNELS,
        dilation.DILATION,
    ),
    *(
        attention_heads.JOIN,
        attention_heads.SEPARATE,
        attention_matmul.PRODUCTS,
        attention_matmul.TURNED,
        transpose_split.MERGED,
        transpose_split.STEPS,
    ),
    *(pixel_shuffle.SHUFFLES, pixel_shuffle.MOVED, patches.PATCHES, pixels_as_channels.PIXELS, pad_channels.FILLING),
)


def chooser(spec: ArmCompileSpec) -> Pass:
    """The pass that chooses forms for ``spec``: by price where its compiler tells one, else those always taken."""

    def choose(graph: Graph, target: Target) -> None:
        if isinstance(spec, DeferredTuningSpec):
            spec.graphs.append(pickle_graph(graph))
        if not target.hardware.npu:
            return
        transpose_split.drop_ones(graph, target)
        made: list[Choice] = []
        if isinstance(spec, EthosUCompileSpec) and spec.search_alternatives:
            made = choose_alternatives(graph, target, ALTERNATIVES, VelaCostModel(spec.configuration).of)
        if made:
            events.current().notes.append(describe_choices(made))
        take_always(graph, target)

    return choose


def chosen(data: bytes, spec: EthosUCompileSpec) -> bytes:
    """The flatbuffer with the forms that ``spec`` gets, of a graph that ``DeferredTuningSpec`` has."""
    graph = unpickle_graph(data)
    for step in (chooser(spec), finish, check):
        step(graph, spec.target)
    return serialize(graph)


def describe_choices(made: list[Choice]) -> str:
    """What was chosen, in a sentence for the user."""
    which = ", ".join(f"{choice.times} {choice.name}" for choice in made)
    cycles = sum(choice.cycles for choice in made)
    return f"equal forms that Vela estimates at {cycles:,} cycles fewer: {which}"
