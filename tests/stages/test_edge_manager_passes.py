"""Passes at the boundary, on programs with operators that no delegate took."""

from __future__ import annotations

from collections.abc import Callable

import executorch.kernels.quantized  # noqa: F401  (as the partitioner does)
import pytest
import torch
from executorch.exir import EdgeCompileConfig, EdgeProgramManager, to_edge_transform_and_lower
from executorch.extension.pybindings import portable_lib
from torch import Tensor, nn

from arm_recipes import ArmRecipesWarning
from arm_recipes.stages.edge import edge_manager_passes

Q = torch.ops.quantized_decomposed.quantize_per_tensor.default
DQ = torch.ops.quantized_decomposed.dequantize_per_tensor.default
PARAMETERS = (0.5, 3, -128, 127, torch.int8)


class Both(nn.Module):
    """Input 0 is quantized twice, input 1 is quantized and read as it is, input 2 is an index."""

    def forward(self, x: Tensor, y: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A quantized, a float and an integer result."""
        first, second = DQ(Q(x, *PARAMETERS), *PARAMETERS), DQ(Q(x, *PARAMETERS), *PARAMETERS)
        mixed = DQ(Q(y, *PARAMETERS), *PARAMETERS) + y
        return DQ(Q(first + second, *PARAMETERS), *PARAMETERS), mixed * 2, index


def _edge() -> EdgeProgramManager:
    program = torch.export.export(Both(), (torch.ones(2, 2), torch.ones(2, 2), torch.ones(2).int()))
    return to_edge_transform_and_lower(program, compile_config=EdgeCompileConfig(_check_ir_validity=False))


def test_quantized_io_warns_about_inputs_and_outputs_that_stay_float() -> None:
    manager = _edge()
    with pytest.warns(ArmRecipesWarning) as caught:
        assert edge_manager_passes.quantize_io(manager) == []
    texts = [str(warning.message) for warning in caught if warning.category is ArmRecipesWarning]
    assert len(texts) == 2
    assert "input 1 ('y') of 'forward' stays float; it is used by" in texts[0]
    assert "output 1 of 'forward' stays float; it comes from" in texts[1]
    program = manager.exported_program()
    nodes = {node.name: node for node in program.graph.nodes}
    inputs = [nodes[name].meta["val"].dtype for name in program.graph_signature.user_inputs]
    outputs = [nodes[name].meta["val"].dtype for name in program.graph_signature.user_outputs]
    assert inputs == [torch.int8, torch.float32, torch.int32]
    assert outputs == [torch.int8, torch.float32, torch.int32]
    published = manager._config_methods
    assert published is not None
    assert published["forward_input0_scale"] == published["forward_output0_scale"] == 0.5
    assert published["forward_input0_zp"] == 3
    assert "forward_input1_scale" not in published
    assert manager.to_executorch().buffer


def test_use_cortex_m_quantize_replaces_all_quantize_operators() -> None:
    manager = _edge()
    assert edge_manager_passes.use_cortex_m_quantize(manager) == []
    targets = [str(node.target) for node in manager.exported_program().graph.nodes]
    assert not any("quantized_decomposed" in target for target in targets)
    assert sum("cortex_m.quantize_per_tensor" in target for target in targets) == 4
    assert sum("cortex_m.dequantize_per_tensor" in target for target in targets) == 4


class Remainders(nn.Module):
    """Remainders by scalars and tensors, of integers and floats."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """PyTorch gives the divisor's sign."""
        return x % 3, x % -2, x.long() % 5, x % y, torch.remainder(x * 0.5, 2)


def test_remainders_on_the_cpu_have_the_sign_of_the_divisor() -> None:
    inputs = (torch.arange(-4, 4, dtype=torch.int32), torch.tensor([3, -3] * 4, dtype=torch.int32))
    program = torch.export.export(Remainders(), inputs)
    manager = to_edge_transform_and_lower(program, compile_config=EdgeCompileConfig(_check_ir_validity=False))
    assert edge_manager_passes.lower_integer_remainder(manager) == []
    buffer = manager.to_executorch().buffer  # which the program reads as long as it runs
    run = portable_lib._load_for_executorch_from_buffer(buffer)
    for got, expected in zip(run.forward(inputs), Remainders()(*inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


class ScaledAddition(nn.Module):
    """One element plus scaled tensors, and the other way round."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """x has one element, y has several."""
        return torch.add(x, y, alpha=2), torch.add(y, x, alpha=2), torch.add(x[0], y, alpha=0.5), x + y


@pytest.mark.parametrize(
    ("dtype", "other"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float64),
        (torch.float32, torch.int64),  # alpha is no integer
        (torch.float32, torch.float16),
    ],
)
def test_a_scaled_addition_on_the_cpu_scales_the_second_operand(dtype: torch.dtype, other: torch.dtype) -> None:
    inputs = (torch.tensor([3.0], dtype=dtype), torch.arange(8, dtype=other).reshape(2, 4))
    program = torch.export.export(ScaledAddition(), inputs)
    manager = to_edge_transform_and_lower(program, compile_config=EdgeCompileConfig(_check_ir_validity=False))
    assert edge_manager_passes.lower_scaled_addition(manager) == []
    buffer = manager.to_executorch().buffer
    run = portable_lib._load_for_executorch_from_buffer(buffer)
    for got, expected in zip(run.forward(inputs), ScaledAddition()(*inputs), strict=True):
        assert torch.equal(got, expected)


class Shifts(nn.Module):
    """Shifts of tensors by numbers and tensors, and of numbers by tensors."""

    def forward(self, x: Tensor, bits: Tensor) -> tuple[Tensor, ...]:
        """ExecuTorch has no kernels of the operators of ``<<`` and ``>>``."""
        return x << 2, x >> 2, x << bits, x >> bits, 1 << bits, 100 >> bits


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_shifts_on_the_cpu(dtype: torch.dtype) -> None:
    inputs = (torch.tensor([0, 3, 25, 127], dtype=dtype), torch.tensor([6, 1, 2, 0], dtype=dtype))
    program = torch.export.export(Shifts(), inputs)
    manager = to_edge_transform_and_lower(program, compile_config=EdgeCompileConfig(_check_ir_validity=False))
    assert edge_manager_passes.lower_shifts(manager) == []
    run = portable_lib._load_for_executorch_from_buffer(manager.to_executorch().buffer)
    for got, expected in zip(run.forward(inputs), Shifts()(*inputs), strict=True):
        assert torch.equal(got, expected)


class Lookup(nn.Module):
    """Elements of a quantized table: quantized as the table, with another scale, and as floats."""

    def __init__(self, lookup: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.lookup = lookup
        self.register_buffer("table", torch.arange(-20, 20, dtype=torch.int8).reshape(10, 4))

    def forward(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Elements with the table's scale, elements with another scale, elements times two."""
        rows = self.lookup(DQ(self.table, *PARAMETERS), index)
        return Q(rows, *PARAMETERS), Q(rows, 0.25, *PARAMETERS[1:]), rows * 2


@pytest.mark.parametrize(
    ("name", "lookup"),
    [
        ("embedding", lambda table, index: torch.nn.functional.embedding(index, table)),
        ("index", lambda table, index: table[index]),
        ("index_select", lambda table, index: table.index_select(0, index)),
        ("gather", lambda table, index: table.gather(0, index.unsqueeze(1).expand(3, 4))),
    ],
)
def test_lookups_read_quantized_tables(name: str, lookup: Callable[[Tensor, Tensor], Tensor]) -> None:
    index = torch.tensor([1, 7, 3])
    program = torch.export.export(Lookup(lookup), (index,))
    manager = to_edge_transform_and_lower(program, compile_config=EdgeCompileConfig(_check_ir_validity=False))
    assert edge_manager_passes.dequantize_after_gather(manager) == []
    nodes = list(manager.exported_program().graph.nodes)
    (lookup_node,) = (node for node in nodes if f"aten_{name}_" in node.name)
    (dequantize,) = (node for node in nodes if "dequantize" in str(node.target))
    assert dequantize.args[0] is lookup_node
    assert lookup_node.meta["val"].dtype is torch.int8
    method = portable_lib._load_for_executorch_from_buffer(manager.to_executorch().buffer)
    for result, expected in zip(method.run_method("forward", (index,)), Lookup(lookup)(index), strict=True):
        assert torch.equal(result, expected)
