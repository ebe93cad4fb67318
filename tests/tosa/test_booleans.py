"""Lowering of booleans to int8, for hardware without booleans: the results are bit-equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from arm_backend_core.backends.ethosu import compile_ethosu
from arm_backend_core.dtype import DType
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value
from arm_backend_core.tosa.passes.booleans import RULES
from arm_backend_core.tosa.passes.pipeline import run
from arm_backend_core.tosa.serialize import serialize
from arm_recipes import ArmRecipeType, ExportRecipe, export, load
from tests.ops.runner import FunctionModule
from tests.runtime.ethosu_emulator import Emulator, read_payload
from tests.tosa.test_hardware_passes import U55, Net

Array = np.ndarray[Any, Any]
#: Values that are compared in all pairs: the limits of int32, their neighbours, and values around 0.
EDGES = np.array([-(2**31), 1 - 2**31, -2, -1, 0, 1, 2, 2**31 - 2, 2**31 - 1], dtype=np.int32)
DTYPES = (DType.INT8, DType.INT16, DType.INT32)


def test_every_operator_of_bool_as_int8_has_a_rule() -> None:
    assert RULES.keys() == U55.hardware.bool_as_int8


def _assert_results_unchanged(net: Net, outputs: list[Value], arrays: list[Array], emulator: Emulator) -> None:
    """Check that results after all passes, and of the compiled program, are those before the passes."""
    net.graph.outputs = outputs
    before = reference_model.run(serialize(net.graph), arrays)
    run(net.graph, net.target)
    assert all(value.dtype is not DType.BOOL for op in net.graph.ops for value in (*op.inputs, op.output))
    flatbuffer = serialize(net.graph)
    payload = compile_ethosu(flatbuffer, EthosUCompileSpec("ethos-u55-128"), delegate="", find_operator=lambda _: None)
    kinds = [(array.dtype.name, array.shape) for array in before]
    for results in (reference_model.run(flatbuffer, arrays), emulator.run(read_payload(payload.data), arrays, kinds)):
        for actual, expected in zip(results, before, strict=True):
            np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("kind", ["EQUAL", "GREATER", "GREATER_EQUAL"])
@pytest.mark.parametrize("constant_operand", ["", "x", "y"])
def test_comparisons_at_the_limits_of_int32(kind: str, constant_operand: str, emulator: Emulator) -> None:
    net, (x, y) = Net(U55), (EDGES.reshape(-1, 1).repeat(len(EDGES), 1), EDGES.reshape(1, -1))
    left, right = (
        net.b.const(data, DType.INT32) if name == constant_operand else net.input(*data.shape, dtype=DType.INT32)
        for name, data in (("x", x), ("y", y))
    )
    result = net.b.cast(net.b.compare(kind, left, right), DType.INT32)
    _assert_results_unchanged(
        net, [result], [data for name, data in (("x", x), ("y", y)) if name != constant_operand], emulator
    )


@pytest.mark.parametrize("kind", ["EQUAL", "GREATER", "GREATER_EQUAL"])
@pytest.mark.parametrize("dtype", [DType.INT8, DType.INT16])
@pytest.mark.parametrize("is_constant", [False, True])
def test_narrow_tensors_are_compared_by_their_saturated_difference(
    kind: str, dtype: DType, is_constant: bool, emulator: Emulator
) -> None:
    """All pairs of edges, at two scales whose ratio makes some of them equal."""
    net, (low, high) = Net(U55), dtype.range
    edges = np.array([low, low + 1, -3, -2, -1, 0, 1, 2, 3, high - 1, high], dtype.numpy)
    x, y = edges.reshape(-1, 1).repeat(len(edges), 1), edges.reshape(1, -1)
    bits = 19 if dtype is DType.INT8 else 14
    left = net.b.rescale(net.input(*x.shape, dtype=dtype), DType.INT32, 0.75 * 2.0**bits)
    other = net.b.const(y, dtype) if is_constant else net.input(*y.shape, dtype=dtype)
    right = net.b.rescale(other, DType.INT32, 2.0**bits)
    result = net.b.cast(net.b.compare(kind, left, right), DType.INT32)
    _assert_results_unchanged(net, [result], [x] if is_constant else [x, y], emulator)
    assert "MINIMUM" not in net.kinds()


_MASKS: dict[str, Callable[[Builder, Value, Value], Value]] = {
    "LOGICAL_AND": lambda b, p, q: b.binary("LOGICAL_AND", p, q),
    "LOGICAL_OR": lambda b, p, q: b.binary("LOGICAL_OR", p, q),
    "LOGICAL_XOR": lambda b, p, q: b.binary("LOGICAL_XOR", p, q),
    "LOGICAL_NOT": lambda b, p, q: b.unary("LOGICAL_NOT", b.binary("LOGICAL_AND", p, q)),
    "REDUCE_ALL": lambda b, p, q: b.binary("LOGICAL_OR", b.reduce("REDUCE_ALL", p, 1), q),
    "REDUCE_ANY": lambda b, p, q: b.binary("LOGICAL_AND", b.reduce("REDUCE_ANY", p, 1), q),
    "SELECT": lambda b, p, q: b.select(p, q, b.unary("LOGICAL_NOT", q)),
    "data movement": lambda b, p, q: b.concat(
        [b.reverse(p, 1), b.pad(b.narrow(q, 1, 1, 3), [(0, 0), (2, 3), (0, 0)], True)], 2
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", _MASKS)
def test_select_by_computed_masks(mask: str, dtype: DType, emulator: Emulator) -> None:
    """SELECT of tensors, of a broadcast tensor and of constants, and CAST of the mask."""
    net = Net(U55)
    (low, high), b = dtype.range, net.b
    p, q = (b.compare("GREATER", net.input(2, 8, 3, dtype=DType.INT32), b.const([[[n]]], DType.INT32)) for n in (0, 40))
    computed = _MASKS[mask](b, p, q)
    shape = (2, 8, computed.shape[2])
    x, y = net.input(*shape, dtype=dtype), net.input(2, 1, shape[2], dtype=dtype)
    numbers = [b.const(np.full((1, 1, 1), number), dtype) for number in (0, 1, high)]
    chosen = [b.select(computed, x, y), b.select(computed, y, x), b.cast(computed, dtype)]
    chosen += [b.select(computed, x, number) for number in numbers] + [b.select(computed, *numbers[::2])]
    arrays = [net.rng.integers(-99, 100, (2, 8, 3)).astype(np.int32) for _ in range(2)]
    arrays += [net.rng.choice([low, -1, 0, 1, high], value.shape).astype(dtype.numpy) for value in (x, y)]
    _assert_results_unchanged(net, chosen, arrays, emulator)


def test_select_by_a_constant_mask_needs_no_table(emulator: Emulator) -> None:
    net = Net(U55)
    constant_mask = net.b.const(np.arange(24).reshape(2, 4, 3) % 3 > 0, DType.BOOL)
    x = net.input(2, 4, 3)
    chosen = net.b.select(constant_mask, x, net.b.const(np.full((1, 1, 1), -7), DType.INT8))
    _assert_results_unchanged(net, [chosen], [net.rng.integers(-128, 128, (2, 4, 3)).astype(np.int8)], emulator)
    assert "TABLE" not in net.kinds()


def test_select_between_functions_of_one_input_becomes_one_table(emulator: Emulator) -> None:
    """where(x > 3, x, |x| - 1), without other readers of the operands."""
    net = Net(U55)
    b, x = net.b, net.input(4, 40)
    wide = b.cast(x, DType.INT32)
    above = b.compare("GREATER", wide, b.const([[3]], DType.INT32))
    other = b.rescale(b.sub(b.unary("ABS", wide), b.const([[1]], DType.INT32)), DType.INT8, 1.0)
    _assert_results_unchanged(
        net, [b.select(above, x, other)], [net.rng.integers(-128, 128, (4, 40)).astype(np.int8)], emulator
    )
    assert net.kinds() == ["TABLE"]


def _masked(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    return torch.where(mask, x, x * 0.3), mask & (x > 0).any(1, keepdim=True), ~mask, mask.sum(), mask


@pytest.mark.parametrize("recipe", [ArmRecipeType.ETHOSU_U55_INT8, ArmRecipeType.ETHOSU_U65_A16W8])
def test_masks_are_inputs_and_outputs_of_a_program(recipe: ArmRecipeType, tmp_path: Path) -> None:
    """Also of its reference program, in which they are booleans too."""
    torch.manual_seed(0)
    samples = [(torch.randn(1, 3, 4, 4), torch.rand(1, 1, 4, 4) > 0.5) for _ in range(2)]
    result = export(FunctionModule(_masked), ExportRecipe.get_recipe(recipe), samples, verify=True)
    assert not result.report.cpu_operators
    assert len(result.report.delegates) == 1
    chosen, *masks = result.run(*samples[0])
    expected, *right = _masked(*samples[0])
    torch.testing.assert_close(chosen, expected, atol=0.03, rtol=0)
    torch.testing.assert_close(masks, right, atol=0, rtol=0)
    saved = load(result.save(tmp_path / "masks.pte", reference=True))
    for found in (result.run(*samples[0], backend="tosa"), saved.execute(*samples[0], backend="tosa")):
        assert all(map(torch.equal, found, (chosen, *masks)))
