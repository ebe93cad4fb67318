"""Types and shapes of decompositions' results, also for scalar tensors and operands of different types."""

from __future__ import annotations

import inspect
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
#: ``dim``, ``size`` and similar arguments of these operators do not fit the other arguments.
_OTHER_ARGUMENTS_NEEDED = {torch.ops.aten._reshape_alias.default}
_DECOMPOSITIONS = {
    overload: record
    for overload, record in aten_entries().items()
    if isinstance(record, Composite) and not record.emits_nodes and overload not in _OTHER_ARGUMENTS_NEEDED
}


def _calls(overload: OpOverload) -> Iterator[list[Any]]:
    """Required arguments with the first tensor of one shape and type, and the other tensors of another."""
    kinds = [
        str(argument.type)
        for argument in overload._schema.arguments
        if not argument.has_default_value() and not argument.kwarg_only
    ]
    if any(kind != "Tensor" and kind not in _ARGUMENTS for kind in kinds):
        return
    for shapes, dtypes in itertools.product(_SHAPES, itertools.product(_DTYPES, repeat=2)):
        tensors = itertools.chain([(shapes[0], dtypes[0])], itertools.repeat((shapes[1], dtypes[1])))
        yield [
            torch.full(shape, 1.5).to(dtype) if kind == "Tensor" else _ARGUMENTS[kind]
            for kind, (shape, dtype) in zip(kinds, _one_for_each_tensor(kinds, tensors), strict=True)
        ]


def _one_for_each_tensor(kinds: list[str], tensors: Iterator[Any]) -> Iterator[Any]:
    for kind in kinds:
        yield next(tensors) if kind == "Tensor" else ((), torch.float32)


def _describe(results: Any) -> list[Any]:
    """(dtype, shape) of each result; None for a result that is not computed."""
    results = results if isinstance(results, (tuple, list)) else (results,)
    return [(x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else None for x in results]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("overload", _DECOMPOSITIONS, ids=str)
def test_types_and_shapes_are_those_of_pytorch(overload: OpOverload) -> None:
    record = _DECOMPOSITIONS[overload]
    options = {"quantized": False} if "quantized" in inspect.signature(record.decompose).parameters else {}
    for arguments in _calls(overload):
        try:
            expected = _describe(overload(*arguments))
        except (RuntimeError, IndexError, TypeError, ValueError):  # PyTorch does not support this combination
            continue
        try:
            results = _describe(record.decompose(*arguments, **options))
        except Unsupported:
            continue
        operands = [(x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else x for x in arguments]
        assert [ours or theirs for ours, theirs in zip(results, expected, strict=True)] == expected, operands
