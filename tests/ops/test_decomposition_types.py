"""Types and shapes of decompositions' results, also for scalar tensors and operands of different types."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload

from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.catalog import aten_entries
from arm_backend_core.ops.registry import Composite

_DTYPES = (torch.float16, torch.float32, torch.int32)
_SHAPES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (((3, 4), ()), ((), (3, 4)), ((3, 4), (1,)), ((), ()))
#: Arguments other than tensors, by the type of the ATen schema.
_ARGUMENTS = {"number": 1.5, "float": 1.5, "int": 0, "bool": False}
_REFUSALS = (RuntimeError, IndexError, TypeError, ValueError)  #: of PyTorch, for unsupported operands


def _required_kinds(overload: OpOverload) -> list[str]:
    """Types of the required arguments in the ATen schema."""
    arguments = overload._schema.arguments
    return [str(x.type) for x in arguments if not x.has_default_value() and not x.kwarg_only]


def _list_calls(overload: OpOverload) -> Iterator[list[Any]]:
    """Yield arguments: the first tensor has one shape and type, and the other tensors have another."""
    kinds = _required_kinds(overload)
    first = kinds.index("Tensor")
    for shapes, dtypes in itertools.product(_SHAPES, itertools.product(_DTYPES, repeat=2)):
        yield [
            torch.full(shapes[i != first], 1.5).to(dtypes[i != first]) if kind == "Tensor" else _ARGUMENTS[kind]
            for i, kind in enumerate(kinds)
        ]


def _describe(results: Any) -> list[Any]:
    """(dtype, shape) of each result; None for a result that is not computed."""
    results = results if isinstance(results, (tuple, list)) else (results,)
    return [(x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else None for x in results]


_DECOMPOSITIONS = {
    overload: record
    for overload, record in aten_entries().items()
    if isinstance(record, Composite)
    and not record.emits_nodes
    and "Tensor" in (kinds := _required_kinds(overload))
    and {*kinds} <= {"Tensor", *_ARGUMENTS}
}


def _count_calls(overload: OpOverload) -> int:
    """Compare the results of all calls that PyTorch and the decomposition support. Returns their number."""
    record, count = _DECOMPOSITIONS[overload], 0
    options = {"quantized": False} if record.takes_quantized else {}
    for arguments in _list_calls(overload):
        try:
            expected = _describe(overload(*arguments))
        except _REFUSALS:
            continue
        try:
            results = _describe(record.decompose(*arguments, **options))
        except Unsupported:
            continue
        operands = [(x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else x for x in arguments]
        assert [ours or theirs for ours, theirs in zip(results, expected, strict=True)] == expected, (
            overload,
            operands,
        )
        count += 1
    return count


@pytest.mark.filterwarnings("ignore")
def test_types_and_shapes_are_those_of_pytorch() -> None:
    """PyTorch accepts these calls for every second decomposition. The others need, for example, square matrices."""
    counts = [_count_calls(overload) for overload in _DECOMPOSITIONS]
    assert sum(count > 0 for count in counts) >= 67
