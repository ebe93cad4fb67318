"""Operator catalog: look up the record or decomposition of an operator. The import registers all operator families."""

from collections.abc import Mapping

import torch
from torch._ops import OpOverload

from arm_backend_core.nodes import overload_of
from arm_backend_core.ops import (  # noqa: F401
    binary_arithmetic,
    block_scaled,
    casting,
    comparison_and_logic,
    convolution,
    floor_division,
    indexing,
    linear,
    loop_markers,
    movement,
    normalization,
    pooling,
    recurrent,
    reduction,
    resize,
    topk,
    unary,
)
from arm_backend_core.ops.composites import (  # noqa: F401
    arithmetic,
    attention,
    fake_quantize,
    histograms,
    linear_algebra,
    matmul_variants,
    prefix_scans,
    scatter,
    sorting,
    svd,
    windows,
)
from arm_backend_core.ops.composites import block_scaled as composite_block_scaled  # noqa: F401
from arm_backend_core.ops.composites import movement as composite_movement  # noqa: F401
from arm_backend_core.ops.composites import resize as composite_resize  # noqa: F401
from arm_backend_core.ops.registry import (
    _CUSTOM_RECORDS,
    _DECOMPOSITIONS_BY_NAME,
    _RECORDS,
    AnnotationKind,
    Composite,
    Record,
)


def find_record(node: torch.fx.Node) -> Record | None:
    """Return the record with the lowering rules of a node's operator; None if there is no record."""
    entry = find_entry(node)
    return entry if isinstance(entry, Record) else None


def has_shared_qparams(node: torch.fx.Node) -> bool:
    """Whether the result keeps the operand's quantization parameters (AnnotationKind.SHARED).

    This holds for data movement, gathers, casts, max and average pooling (adaptive pooling excepted), resizing, topk,
    and extrema along dimensions.
    """
    record = find_record(node)
    return record is not None and record.kind is AnnotationKind.SHARED


def is_cast(node: torch.fx.Node) -> bool:
    """Whether a node's operator only changes the element type."""
    record = find_record(node)
    return record is not None and record.is_cast


def is_average(node: torch.fx.Node) -> bool:
    """Whether a node's operator averages elements. If an average keeps the operand's scale, it is rounded."""
    record = find_record(node)
    return record is not None and record.is_average


def is_sinusoid(node: torch.fx.Node) -> bool:
    """Whether a node's operator is the sine or cosine of its operand."""
    record = find_record(node)
    return record is not None and record.is_sinusoid


def find_composite(node: torch.fx.Node) -> Composite | None:
    """Return the decomposition of a node's operator, or None."""
    entry = find_entry(node)
    return entry if isinstance(entry, Composite) else None


def find_entry(node: torch.fx.Node) -> Record | Composite | None:
    """Return the record or decomposition of a node's operator, or None.

    ATen operators are looked up first, then custom operators, then operators registered by name.
    """
    overload = overload_of(node.target) if node.op == "call_function" else None
    if overload is None:
        return None
    return aten_entries().get(overload) or _CUSTOM_RECORDS.get(overload) or _DECOMPOSITIONS_BY_NAME.get(overload.name())


def all_entries() -> Mapping[OpOverload | str, Record | Composite]:
    """All records and decompositions by overload, or by name if the operator's library may not be loaded."""
    return dict([*aten_entries().items(), *_CUSTOM_RECORDS.items(), *_DECOMPOSITIONS_BY_NAME.items()])


def aten_entries() -> Mapping[OpOverload, Record | Composite]:
    """Records and decompositions of ATen operators, by overload."""
    return _RECORDS
