"""Patch-based inference: the first layers of an image network compute one patch of the image after the other.

The largest tensors of such a network are those of its first layers. The rewrite computes these layers (the *stage*) for
one patch from the input to a small tensor, then for the next patch, and concatenates the small results. No large tensor
is in memory as a whole. Where windows are larger than their stride, neighbouring patches need some of the same pixels
(the halo), which are computed once for each patch. The method is that of MCUNetV2 (Lin et al., 2021).

Vela's cascades have the same purpose and recompute nothing. But a cascade ends where a tensor has several readers, as
at a residual connection, and its buffers are as wide as the image. A stage may include residual connections.

Bit-exact: each element of an operator's result depends on a window of its operands (``_receptive_field``), and every
patch reads this window. Where a window crosses the border of a tensor, the patch has the padding of the operator. Where
a window crosses only the border of the patch, it reads the neighbouring pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value, constant
from arm_backend_core.tosa.operators import ELEMENTWISE
from arm_backend_core.tosa.passes.rewrite import producer

#: Operators whose results depend on windows of pixels.
_WINDOWS = ("CONV2D", "DEPTHWISE_CONV2D", "MAX_POOL2D", "AVG_POOL2D")
#: Axes of rows and columns of an image [N, H, W, C].
_ROWS, _COLUMNS = 1, 2


class IndexRange(NamedTuple):
    """The indices ``start`` to ``stop`` (exclusive) of an axis."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of indices."""
        return self.stop - self.start


class Area(NamedTuple):
    """A rectangle of pixels of an image [N, H, W, C]."""

    rows: IndexRange
    columns: IndexRange

    @property
    def pixels(self) -> int:
        """Number of pixels."""
        return self.rows.size * self.columns.size

    def bounding_box(self, other: Area | None) -> Area:
        """The smallest rectangle that contains both."""
        if other is None:
            return self
        return Area(*(IndexRange(min(a.start, b.start), max(a.stop, b.stop)) for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class PatchStage:
    """Operators that are computed in patches.

    Attributes:
        result: the small image at the end.
        ops: all operators that ``result`` depends on, in execution order, without ``layout_ops``.
        sources: {image [N, H, W, C] that the stage reads: input of the graph that holds it}. The input is this image,
            or the same image as [N, C, H, W], which ``layout_ops`` transpose.
        layout_ops: operators that transpose inputs from [N, C, H, W].
    """

    result: Value
    ops: Sequence[Op]
    sources: Mapping[Value, Value]
    layout_ops: Sequence[Op]


def match_stage(graph: Graph, result: Value) -> PatchStage | str:
    """Match the stage that ends at ``result``; return the reason if it cannot be computed in patches."""
    needed, sources, layout_ops = set[Op](), dict[Value, Value](), list[Op]()
    pending = [result]
    while pending:
        value = pending.pop()
        if value in sources or value.producer in needed:
            continue
        if (source := _match_source(value, graph)) is not None:
            sources[value] = source[0]
            layout_ops += source[1]
            continue
        if value.producer is None:
            return f"the input {value!r} is not an image"
        if reason := _find_patch_refusal(value.producer):
            return reason
        needed.add(value.producer)
        pending += (x for x in _image_operands(value.producer) if x.data is None)
    if not needed:
        return "the stage has no operators"
    users, outputs, inside = graph.users(), set(graph.outputs), {*needed, *layout_ops}
    for op in inside:
        if op.output is not result and (op.output in outputs or not inside.issuperset(users.get(op.output, ()))):
            return f"{op.output!r} is also read after the stage"
    return PatchStage(result, [op for op in graph.ops if op in needed], sources, layout_ops)


def _match_source(value: Value, graph: Graph) -> tuple[Value, list[Op]] | None:
    """Match an image that a graph input holds; return the input and its ``layout_ops`` (see ``PatchStage``)."""
    if value.rank != 4:
        return None
    if value in graph.inputs:
        return value, []
    n, height, width, channels = value.shape
    chain: list[Op] = []
    for kind in ("RESHAPE", "TRANSPOSE", "RESHAPE"):
        op = producer(chain[-1].inputs[0] if chain else value, kind)
        if op is None:
            return None
        chain.append(op)
    transpose, image = chain[1], chain[2].inputs[0]
    is_nchw = image in graph.inputs and image.shape == (n, channels, height, width)
    is_to_nhwc = list(transpose.attrs["perms"]) == [0, 2, 1] and transpose.output.shape == (n, height * width, channels)
    return (image, chain) if is_nchw and is_to_nhwc else None


def _find_patch_refusal(op: Op) -> str | None:
    """Why an operator cannot compute a patch of its result from a patch of its operands; None if it can."""
    if op.extra_outputs or op.output.rank != 4:
        return f"the result of {op!r} is not an image"
    if op.kind in _WINDOWS and any(
        pad >= extent for pad, extent in zip(op.attrs["pad"], _window_extents(op), strict=True)
    ):
        return f"a window of {op.kind} may contain padding only"
    if op.kind in _WINDOWS or (op.kind == "CONCAT" and op.attrs["axis"] not in (_ROWS, _COLUMNS)):
        return None
    if op.kind not in ELEMENTWISE:
        return f"the result of {op.kind} does not depend on windows of pixels"
    if any(x.data is None and x.shape[:3] != op.output.shape[:3] for x in op.inputs):
        return f"{op.kind} broadcasts a computed operand to all pixels"
    return None


def _image_operands(op: Op) -> Sequence[Value]:
    """The operands that are images: all but weights and biases. A patch of the result reads an area of each."""
    return op.inputs[:1] if op.kind in _WINDOWS else op.inputs


def _window_extents(op: Op) -> list[int]:
    """Extents of a dilated window as (rows, rows, columns, columns), to match ``pad``: (top, bottom, left, right)."""
    first = 1 if op.kind == "CONV2D" else 0
    kernel = op.attrs["kernel"] if "kernel" in op.attrs else op.inputs[1].shape[first : first + 2]
    rows, columns = ((size - 1) * by + 1 for size, by in zip(kernel, op.attrs.get("dilation", (1, 1)), strict=True))
    return [rows, rows, columns, columns]


def _receptive_field(op: Op, area: Area) -> tuple[Area, list[int]]:
    """The area of the operands on which ``area`` of the result depends, and its padding (top, bottom, left, right)."""
    if op.kind not in _WINDOWS:
        return area, [0, 0, 0, 0]
    spans, pad = list[IndexRange](), list[int]()
    for i, span in enumerate(area):
        stride, size, extent = op.attrs["stride"][i], op.inputs[0].shape[1 + i], _window_extents(op)[2 * i]
        start = span.start * stride - op.attrs["pad"][2 * i]
        stop = (span.stop - 1) * stride - op.attrs["pad"][2 * i] + extent
        spans.append(IndexRange(max(start, 0), min(stop, size)))
        pad += [max(-start, 0), max(stop - size, 0)]
    return Area(*spans), pad


def _areas_of_patch(stage: PatchStage, patch: Area) -> dict[Value, Area]:
    """{image in the stage: its area on which ``patch`` of the stage's result depends}."""
    needed = {stage.result: patch}
    for op in reversed(stage.ops):
        operand_area, _ = _receptive_field(op, needed[op.output])
        for value in _image_operands(op):
            if value.data is None:
                needed[value] = operand_area.bounding_box(needed.get(value))
    return needed


def split_image(image: Value, row_count: int, column_count: int) -> list[list[Area]]:
    """Split an image into a grid of patches of nearly equal size; returns the rows of the grid."""
    rows, columns = (
        [IndexRange(size * i // count, size * (i + 1) // count) for i in range(count)]
        for size, count in ((image.shape[_ROWS], row_count), (image.shape[_COLUMNS], column_count))
    )
    return [[Area(span, other) for other in columns] for span in rows]


def count_recomputed_work(stage: PatchStage, grid: Sequence[Sequence[Area]]) -> int:
    """Additional work (``Op.work``) for the pixels that several patches need (the halo), each computed repeatedly."""
    areas = [_areas_of_patch(stage, patch) for row in grid for patch in row]
    extra = 0
    for op in stage.ops:
        pixels = op.output.shape[_ROWS] * op.output.shape[_COLUMNS]
        extra += op.work * sum(needed[op.output].pixels for needed in areas) // pixels - op.work
    return extra


def rewrite_to_patches(graph: Graph, target: Target, stage: PatchStage, grid: Sequence[Sequence[Area]]) -> None:
    """Rewrite ``graph`` in place: compute ``stage`` for each patch, and concatenate the results.

    Raises:
        Unsupported: the target lacks an operator for a patch.
    """
    builder, old_ops, last = Builder(graph, target), graph.ops, stage.ops[-1]
    graph.ops, removed = [], {*stage.ops, *stage.layout_ops}
    joined = stage.result
    for op in old_ops:
        if op is last:
            strips = list[Value]()
            for row in grid:
                patches = [_emit_patch(stage, patch, builder) for patch in row]
                builder.origins = last.origins
                strips.append(builder.concat(patches, _COLUMNS))
            joined = builder.concat(strips, _ROWS)
        elif op not in removed:
            op.inputs = [joined if value is stage.result else value for value in op.inputs]
            graph.ops.append(op)
    graph.outputs = [joined if value is stage.result else value for value in graph.outputs]


def _emit_patch(stage: PatchStage, patch: Area, builder: Builder) -> Value:
    """Emit the operators of the stage for one patch; return the patch of the result."""
    needed = _areas_of_patch(stage, patch)
    computed: dict[Value, Value] = {}
    for image, source in stage.sources.items():
        builder.origins = (stage.layout_ops or stage.ops)[0].origins
        computed[image] = _read_source(image, source, needed[image], builder)
    for op in stage.ops:
        builder.origins = op.origins
        area, pad = _receptive_field(op, needed[op.output])
        images = _image_operands(op)
        operands = [_read_area(x, area, needed, computed, builder) if x in images else x for x in op.inputs]
        attrs = op.attrs | ({"pad": pad} if op.kind in _WINDOWS else {})
        computed[op.output] = builder.emit(op.kind, operands, op.output.dtype, **attrs)
    return computed[stage.result]


def _read_source(image: Value, source: Value, area: Area, builder: Builder) -> Value:
    """Read an area of an input of the graph, with channels last."""
    if image is source:
        return _crop(
            source, area, Area(IndexRange(0, image.shape[1]), IndexRange(0, image.shape[2])), (_ROWS, _COLUMNS), builder
        )
    whole = Area(IndexRange(0, image.shape[1]), IndexRange(0, image.shape[2]))
    part = _crop(source, area, whole, (2, 3), builder)
    n, channels = part.shape[:2]
    pixels = builder.transpose(builder.reshape(part, (n, channels, area.pixels)), (0, 2, 1))
    return builder.reshape(pixels, (n, area.rows.size, area.columns.size, channels))


def _read_area(
    value: Value, area: Area, needed: Mapping[Value, Area], computed: Mapping[Value, Value], builder: Builder
) -> Value:
    """Read an area of an operand: of its patch that was computed before, or of a constant."""
    if value.data is None:
        return _crop(computed[value], area, needed[value], (_ROWS, _COLUMNS), builder)
    data = value.data
    for axis, span in zip((_ROWS, _COLUMNS), area, strict=True):
        if value.rank == 4 and value.shape[axis] > 1:
            data = data.take(np.arange(*span), axis)
    return value if data is value.data else constant(data, value.dtype, value.name)


def _crop(value: Value, area: Area, held: Area, axes: tuple[int, int], builder: Builder) -> Value:
    """Cut ``area`` out of ``value``, which holds the area ``held`` of an image. ``axes``: axes of rows and columns."""
    starts, sizes = [0] * value.rank, list(value.shape)
    for axis, span, outer in zip(axes, area, held, strict=True):
        starts[axis], sizes[axis] = span.start - outer.start, span.size
    return builder.slice(value, starts, sizes)
