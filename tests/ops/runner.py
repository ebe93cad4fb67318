"""Runner of operator tests: quantizes, delegates, executes, compares, validates and compiles a row of ``cases``."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.export import ExportedProgram
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

from arm_backend_core import compilation_log
from arm_backend_core.delegate import delegate
from arm_backend_core.nodes import is_dequantize, is_quantize, overload_of
from arm_backend_core.quantization import (
    TOSAQuantizer,
    get_symmetric_a16w8_quantization_config,
    get_symmetric_quantization_config,
)
from arm_backend_core.quantization.torchao_convert import convert
from arm_backend_core.targets.compile_spec import ArmCompileSpec, EthosUCompileSpec, TosaCompileSpec

_LIBRARY = torch.ops.quantized_decomposed
_INT8, _INT16 = (-128, 127, torch.int8), (-32768, 32767, torch.int16)
_BOUNDARY = ("quantize_per_tensor", "_to_copy", "_to_dim_order_copy", "executorch_call_delegate", "getitem")


@dataclass(frozen=True)
class Input:
    """A random tensor: uniform in [low, high], or integers in [low, high) for an integer ``dtype``.

    Attributes:
        special: values that replace about every fourth element.
    """

    shape: tuple[int, ...]
    low: float = -2.0
    high: float = 2.0
    dtype: torch.dtype = torch.float32
    special: tuple[float, ...] = ()

    def sample(self, generator: torch.Generator) -> torch.Tensor:
        if self.dtype is torch.bool:
            return torch.rand(self.shape, generator=generator) > 0.5
        if not self.dtype.is_floating_point:
            return torch.randint(int(self.low), int(self.high), self.shape, generator=generator, dtype=self.dtype)
        span = torch.rand(self.shape, generator=generator, dtype=torch.float64)
        if span.numel() > 1:  # both ends occur
            span.flatten()[:2] = torch.tensor([0.0, 1.0])
        values = self.low + span * (self.high - self.low)
        if self.special:
            picked = torch.randint(len(self.special), self.shape, generator=generator)
            taken = torch.rand(self.shape, generator=generator) < 0.25
            values = torch.where(taken, torch.tensor(self.special, dtype=torch.float64)[picked], values)
        return values.to(self.dtype)


@dataclass(frozen=True)
class Case:
    """A test row: an operator with its inputs and tolerances.

    Attributes:
        name: the test's name.
        model: a module or a function of the inputs.
        inputs: inputs of the call.
        rtol: allowed relative error in floating point.
        atol: allowed error in floating point, relative to the largest value of the result.
        steps: allowed difference to PyTorch's quantized graph in int8, in steps of the output.
        int16_steps: the same in A16W8 (int16 activations).
        tabulated: whether it is a function of one tensor; in int16 the interpolation error of its TABLE is allowed too.
        profiles: profiles that the row runs for.
        refused: target ("fp", "int8", "a16w8", "u55", "u85") -> pattern that the reason contains.
    """

    name: str
    model: Callable[..., Any]
    inputs: Sequence[Input]
    rtol: float = 1e-4
    atol: float = 1e-6
    steps: int = 1
    int16_steps: int = 1
    tabulated: bool = False
    profiles: tuple[str, ...] = ("fp", "int8", "a16w8")
    refused: Mapping[str, str] = field(default_factory=dict)

    def module(self) -> torch.nn.Module:
        torch.manual_seed(0)
        if isinstance(self.model, torch.nn.Module):
            return copy.deepcopy(self.model).eval()
        return FunctionModule(self.model).eval()

    def sample(self, seed: int = 0) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(x.sample(generator) for x in self.inputs)


class FunctionModule(torch.nn.Module):
    """Wraps a function in a module, so that it can be exported."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


@cache
def make_compile_spec(target: str) -> ArmCompileSpec:
    """Return the compile spec of a target's short name."""
    return {
        "fp": lambda: TosaCompileSpec("TOSA-1.0+FP"),
        "int": lambda: TosaCompileSpec("TOSA-1.0+INT+int16"),
        "fp+cf": lambda: TosaCompileSpec("TOSA-1.0+FP+cf"),
        "int+cf": lambda: TosaCompileSpec("TOSA-1.0+INT+int16+cf"),
        "mixed": lambda: TosaCompileSpec("TOSA-1.0+INT+FP+int16"),
        "u55": lambda: EthosUCompileSpec("ethos-u55-128"),
        "u85": lambda: EthosUCompileSpec("ethos-u85-256"),
    }[target]()


def export(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> ExportedProgram:
    """Export a module as an ATen program."""
    with torch.no_grad():
        return torch.export.export(module, inputs, strict=False)


def quantize_case(case: Case, *, int16: bool) -> torch.nn.Module:
    """Quantize a case by PyTorch's PT2E flow, to A16W8 if ``int16``, else INT8.

    Three samples calibrate; tests run the first one.
    """
    config = get_symmetric_a16w8_quantization_config() if int16 else get_symmetric_quantization_config()
    module = export(case.module(), case.sample()).module(check_guards=False)
    prepared = prepare_pt2e(module, TOSAQuantizer(make_compile_spec("int")).set_global(config))
    with torch.no_grad():
        for seed in range(3):
            prepared(*case.sample(seed))
    return convert(prepared)


@dataclass(frozen=True)
class DelegatedProgram:
    """A delegated program, and the events that its compilation recorded."""

    program: ExportedProgram
    log: compilation_log.Log

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the program, with delegates on the TOSA reference model, and return its outputs."""
        with torch.no_grad():
            return flatten_tensors(self.program.module(check_guards=False)(*inputs))

    def check_delegated(self) -> None:
        """Assert that there is one delegate, and only boundary operators on the CPU."""
        assert not self.log.refused_operators, self.log.refused_operators
        assert len(self.log.delegates) == 1, [d.operators for d in self.log.delegates]
        for node in self.program.graph_module.graph.nodes:
            name = str(getattr(node.target, "__name__", node.target))
            assert node.op != "call_function" or any(part in name for part in _BOUNDARY), f"{name} on the CPU"

    def check_refused(self, pattern: str) -> None:
        """Assert that an operator was refused with a matching reason."""
        reasons = [f"{r.operator}: {r.reason}" for r in self.log.refused_operators]
        assert any(re.search(pattern, reason) for reason in reasons), f"'{pattern}' not in {reasons}"


def lower(program: ExportedProgram, target: str | ArmCompileSpec) -> DelegatedProgram:
    """Delegate a copy of ``program``."""
    with compilation_log.open_log() as log:
        return DelegatedProgram(
            delegate(program, make_compile_spec(target) if isinstance(target, str) else target), log
        )


def flatten_tensors(result: Any) -> list[torch.Tensor]:
    """Flatten a nested result into its tensors."""
    return [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]


def qdq(x: torch.Tensor, scale: float = 0.1, *, int16: bool = False) -> torch.Tensor:
    """Quantize and dequantize ``x`` by operators (a QDQ pair), as a quantized graph does."""
    parameters = (scale, 0, *(_INT16 if int16 else _INT8))
    result: torch.Tensor = _LIBRARY.dequantize_per_tensor(_LIBRARY.quantize_per_tensor(x, *parameters), *parameters)
    return result


def dequantize_rows(x: torch.Tensor, zero_point: int = 0) -> torch.Tensor:
    """Dequantize int8 ``x`` with one scale per row."""
    count = len(x)
    zero_points = torch.full((count,), zero_point)
    result: torch.Tensor = _LIBRARY.dequantize_per_channel(x, torch.full((count,), 0.1), zero_points, 0, *_INT8)
    return result


def output_scales(program: ExportedProgram) -> list[float | None]:
    """Return the scale of every output; None if it is not quantized."""
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    return [_scale(node) for node in torch.utils._pytree.tree_leaves(output.args[0])]


def _scale(node: torch.fx.Node) -> float | None:
    """Return the scale of an output; data movement may follow the dequantize node."""
    while node.op == "call_function" and not is_dequantize(node):
        if overload_of(node.target) is None:
            return None
        node = node.all_input_nodes[0]
    return float(node.args[1]) if node.op == "call_function" else None  # type: ignore[arg-type]


def check_close(case: Case, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Compare floating-point results with tolerances, and integers and booleans exactly."""
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape == theirs.shape
        if not theirs.is_floating_point():
            assert torch.equal(ours, theirs)
            continue
        finite = theirs[theirs.isfinite()]
        atol = case.atol * float(finite.abs().max()) if finite.numel() else 0.0
        torch.testing.assert_close(ours, theirs, rtol=case.rtol, atol=atol, equal_nan=True)


def check_steps(
    got: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    scales: Sequence[float | None],
    steps: int,
    error: torch.Tensor | float = 0.0,
) -> None:
    """Check that results differ by at most ``steps`` steps plus ``error``; integers and booleans must be equal."""
    assert len(got) == len(expected) == len(scales)
    for ours, theirs, scale in zip(got, expected, scales, strict=True):
        assert ours.shape == theirs.shape
        if not theirs.is_floating_point():
            assert torch.equal(ours, theirs)
            continue
        assert scale is not None, "the result is not quantized"
        worst = float((((ours - theirs).abs() - error) / scale).max()) if ours.numel() else 0.0
        assert worst < steps + 0.01, f"{worst:.2f} steps apart"


def interpolation_error(case: Case, program: ExportedProgram, x: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute the interpolation error of a 513-entry int16 TABLE at each element of ``x``.

    It is the largest error of exact entries at ``x`` and in the middle of the cell of ``x`` and of its neighbours:
    fitted entries have an error too. The rounding of the entries adds half a step of the output.
    """
    first = next(node for node in program.graph.nodes if is_quantize(node))
    step = float(first.args[1])
    index = (x / step).round()
    below = torch.floor(index / 128) * 128

    def value(integers: torch.Tensor) -> torch.Tensor:
        real = case.module()((integers * step).float()).double()
        return real.nan_to_num(0.0, float("inf"), -float("inf")).clamp(-32768 * scale, 32767 * scale)

    def error(below: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        left, right = value(below), value(below + 128)
        line = left + (right - left) * (index - below) / 128
        return (line - value(index)).abs()

    largest = error(below, index)
    for first in (below - 128, below, below + 128):
        largest = torch.maximum(largest, error(first, first + 64))
    return largest + 0.5 * scale
