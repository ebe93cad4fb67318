"""Quantize and dequantize kernels of the host plugin (cortex_m): bit-equal to PyTorch, and errors for bad arguments."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge
from executorch.exir._serialize._program import deserialize_pte_binary, serialize_pte_binary
from executorch.exir.schema import Buffer
from torch import Tensor, nn

from arm_backend_core.cortex_m.custom_ops import edge_operator
from arm_recipes import RunError
from arm_recipes.runtime.program import Program
from arm_recipes.stages.edge.edge_manager_passes import use_cortex_m_quantize

#: The tests run in one xdist worker, so that they share worker processes and exported programs.
pytestmark = pytest.mark.xdist_group("host_programs")

Q = torch.ops.quantized_decomposed.quantize_per_tensor.default
DQ = torch.ops.quantized_decomposed.dequantize_per_tensor.default
#: scale, zero point, quant_min, quant_max, dtype
Parameters = tuple[float, int, int, int, torch.dtype]

PARAMETERS: list[Parameters] = [
    *((scale, zero, -128, 127, torch.int8) for scale in (0.5, 0.1, 3.0) for zero in (-128, -1, 0, 7, 127)),
    *((scale, zero, -32768, 32767, torch.int16) for scale in (2.0**-10, 0.1) for zero in (-32768, 0, 1, 32767)),
    (0.1, 0, -127, 127, torch.int8),
    (0.1, 0, -32767, 32767, torch.int16),
    (0.25, 3, 3, 3, torch.int8),
    (1e-38, 5, -128, 127, torch.int8),
    (3e38, 5, -128, 127, torch.int8),
]


class Boundary(nn.Module):
    """Quantizes ``x`` and dequantizes the integer inputs, with each of ``parameters``."""

    def __init__(self, parameters: list[Parameters]) -> None:
        super().__init__()
        self.parameters_ = parameters

    def forward(self, x: Tensor, int8_values: Tensor, int16_values: Tensor) -> tuple[Tensor, ...]:
        """Return the quantized tensors, then the dequantized ones."""
        quantized = [Q(x, *these) for these in self.parameters_]
        integers = [int8_values if these[-1] is torch.int8 else int16_values for these in self.parameters_]
        return (*quantized, *(DQ(values, *these) for values, these in zip(integers, self.parameters_, strict=True)))


def _float_values() -> Tensor:
    ties = torch.arange(-300, 301) * 0.25
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 3.4e38, -3.4e38, 2.0**31, -(2.0**31), 2.0**63]
    denormal = [1e-45, -1e-45, 1.17e-38, -1.17e-38, 1e-38, 5e-39]
    noise = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 6, 2000)
    return torch.cat([ties, ties * 0.1, torch.tensor(special + denormal), noise])


def _program(model: nn.Module, inputs: tuple[Tensor, ...]) -> bytes:
    edge = to_edge(torch.export.export(model, inputs), compile_config=EdgeCompileConfig(_check_ir_validity=False))
    use_cortex_m_quantize(edge)
    return bytes(edge.to_executorch().buffer)


def test_same_as_pytorch() -> None:
    inputs = (
        _float_values(),
        torch.arange(-128, 128, dtype=torch.int8),
        torch.arange(-32768, 32768, dtype=torch.int16),
    )
    program = Program(_program(Boundary(PARAMETERS), inputs))
    assert set(program.content.methods["forward"].operators) == {
        "cortex_m::quantize_per_tensor.out",
        "cortex_m::dequantize_per_tensor.out",
    }
    outputs = program.execute(*inputs)
    expected = Boundary(PARAMETERS)(*inputs)
    for index, (ours, theirs) in enumerate(zip(outputs, expected, strict=True)):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), PARAMETERS[index % len(PARAMETERS)]
    assert all(output.unique().numel() > 1 for output in outputs[: len(PARAMETERS) - 3])


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 2, 3, 4)])
def test_shapes(shape: tuple[int, ...]) -> None:
    inputs = (torch.ones(shape), torch.ones(shape, dtype=torch.int8), torch.ones(shape, dtype=torch.int16))
    model = Boundary([(0.5, 1, -128, 127, torch.int8), (0.5, 1, -32768, 32767, torch.int16)])
    for ours, theirs in zip(Program(_program(model, inputs)).execute(*inputs), model(*inputs), strict=True):
        assert ours.shape == shape
        assert torch.equal(ours, theirs)


def test_memory_format() -> None:
    x = torch.randn(1, 3, 4, 5).to(memory_format=torch.channels_last)
    integers = (x * 10).char(), (x * 10).short()
    model = Boundary([(0.5, 1, -128, 127, torch.int8)])
    outputs = Program(_program(model, (x, *integers))).execute(x, *integers)
    for ours, theirs in zip(outputs, model(x, *integers), strict=True):
        assert torch.equal(ours, theirs)


# Programs with invalid arguments, which no export emits: a number of a valid program is replaced.


class _Quantize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Quantize with parameters that are unique among the program's numbers."""
        return Q(x, 0.375, 7, -120, 119, torch.int8)


class _Dequantize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Dequantize with parameters that are unique among the program's numbers."""
        return DQ(x, 0.375, 7, -120, 119, torch.int8)


@cache
def _export_single_operator(name: str, dtype: torch.dtype) -> bytes:
    return _program(_SINGLE_OPERATOR_MODELS[name](), (torch.ones(4, dtype=dtype),))


_SINGLE_OPERATOR_MODELS: dict[str, type[nn.Module]] = {"quantize": _Quantize, "dequantize": _Dequantize}


def _replace_number(data: bytes, old: float, new: float) -> bytes:
    """Replace the number ``old`` among the values of a program's method."""
    file = deserialize_pte_binary(data)
    # The runtime requires a constant segment. ExecuTorch's serializer writes it only for a nonempty constant buffer.
    file.program.segments, file.program.constant_buffer = [], file.program.constant_buffer or [Buffer(storage=b"")]
    values = [value.val for value in file.program.execution_plan[0].values if type(value.val).__name__ in _FIELDS]
    (found,) = [value for value in values if getattr(value, _FIELDS[type(value).__name__]) == old]
    setattr(found, _FIELDS[type(found).__name__], new)
    return bytes(serialize_pte_binary(file))


_FIELDS = {"Int": "int_val", "Double": "double_val"}


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (0.375, 0.0, "the scale must be positive and finite"),
        (0.375, -1.0, "the scale must be positive and finite"),
        (0.375, float("nan"), "the scale must be positive and finite"),
        (0.375, float("inf"), "the scale must be positive and finite"),
        (0.375, 1e-310, "the scale must be positive and finite"),
        (7, 128, "the zero point must be a value of the integer type"),
        (7, -(2**63), "the zero point must be a value of the integer type"),
        (-120, -129, "quant_min and quant_max must be an interval of the integer type"),
        (119, 2**63 - 1, "quant_min and quant_max must be an interval of the integer type"),
        (-120, 120, "quant_min and quant_max must be an interval of the integer type"),
        (1, 2, "the integers must be int8 or int16, as the argument dtype says"),
        (1, 99, "the integers must be int8 or int16, as the argument dtype says"),
    ],
)
@pytest.mark.parametrize(("name", "dtype"), [("quantize", torch.float32), ("dequantize", torch.int8)])
def test_bad_arguments(
    name: str, dtype: torch.dtype, old: float, new: float, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    x = torch.ones(4, dtype=dtype)
    program = _export_single_operator(name, dtype)
    assert torch.equal(Program(_replace_number(program, old, old)).execute(x)[0], _SINGLE_OPERATOR_MODELS[name]()(x))
    with pytest.raises(RunError, match=r"ExecuTorch's runtime cannot run 'forward': .*error 0x12"):
        Program(_replace_number(program, old, new)).execute(x)
    assert f"cortex_m::{name}_per_tensor.out: {reason} (scale " in capfd.readouterr().err


def test_half_precision_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(4, dtype=torch.float16)
    edge = to_edge(torch.export.export(_Quantize(), (x,)), compile_config=EdgeCompileConfig(_check_ir_validity=False))
    assert use_cortex_m_quantize(edge) == []  # half precision keeps ExecuTorch's own kernel
    (node,) = (node for node in edge.exported_program().graph.nodes if node.op == "call_function")
    assert Program(bytes(copy.deepcopy(edge).to_executorch().buffer)).execute(x)[0].dtype == torch.int8
    node.target = edge_operator("quantize_per_tensor")
    with pytest.raises(RunError, match="error 0x12"):
        Program(bytes(edge.to_executorch().buffer)).execute(x)
    assert "cortex_m::quantize_per_tensor.out: the real numbers must be float32" in capfd.readouterr().err


def test_uint8_keeps_executorchs_own_kernels() -> None:
    """There are no cortex_m kernels for uint8."""

    class Unsigned(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return DQ(Q(x, 0.5, 128, 0, 255, torch.uint8), 0.5, 128, 0, 255, torch.uint8)

    x = torch.randn(5)
    program = Program(_program(Unsigned(), (x,)))
    assert all(name.startswith("quantized_decomposed::") for name in program.content.methods["forward"].operators)
    assert torch.equal(program.execute(x)[0], Unsigned()(x))
