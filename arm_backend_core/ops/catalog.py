"""Look-up of operator records. Importing this module registers every operator family."""

from collections.abc import Mapping

import torch
from torch._ops import OpOverload

from arm_backend_core.nodes import overload_of
from arm_backend_core.ops import (  # noqa: F401
    block_scaled,
    casting,
    convolution,
    division,
    elementwise,
    indexing,
    linear,
    logical,
    loops,
    movement,
    normalization,
    pooling,
    recurrent,
    reduction,
    resize,
    topk,
    unary,
)
from arm_backend_core.ops.composites import algebra, arithmetic, attention, fake_quantize, order, products  # noqa: F401
from arm_backend_core.ops.composites import block_scaled as blocks  # noqa: F401
from arm_backend_core.ops.composites import movement as moved  # noqa: F401
from arm_backend_core.ops.composites import resize as resized  # noqa: F401
from arm_backend_core.ops.composites import spectra as spectral  # noqa: F401
from arm_backend_core.ops.composites import windows as windowed  # noqa: F401
from arm_backend_core.ops.registry import _FOREIGN, _MARKS, _RECORDS, Composite, Kind, Record


def find(node: torch.fx.Node) -> Record | None:
    """The record by which a node's operator is lowered, None if it has none."""
    record = _record(node)
    return record if isinstance(record, Record) else None


def is_data_movement(node: torch.fx.Node) -> bool:
    """Whether a node's operator moves elements and computes none."""
    record = find(node)
    return record is not None and record.kind is Kind.SHARED


def composite(node: torch.fx.Node) -> Composite | None:
    """The record of what a node's operator is made of, None if it has none."""
    record = _record(node)
    return record if isinstance(record, Composite) else None


def _record(node: torch.fx.Node) -> Record | Composite | None:
    overload = overload_of(node.target) if node.op == "call_function" else None
    if overload is None:
        return None
    return records().get(overload) or _MARKS.get(overload) or _FOREIGN.get(overload.name())


def every_record() -> Mapping[OpOverload | str, Record | Composite]:
    """Also of our own operators, and by name of those whose library may not be loaded."""
    return dict([*records().items(), *_MARKS.items(), *_FOREIGN.items()])


def records() -> Mapping[OpOverload, Record | Composite]:
    """Every record by overload."""
    return _RECORDS
