"""Small modules that are quantized for a Cortex-M, lowered to kernels, and compared with their quantized graph."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, to_edge
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

from arm_backend_core import compilation_log
from arm_backend_core.cortex_m.kernels.registry import NAMESPACE
from arm_backend_core.cortex_m.quantizer import CortexMQuantizer
from arm_backend_core.delegate import delegate
from arm_backend_core.nodes import is_dequantize, is_float, is_quantize, overload_of
from arm_backend_core.quantization import get_symmetric_quantization_config
from arm_backend_core.quantization.torchao_convert import convert
from arm_backend_core.targets.compile_spec import CortexMCompileSpec
from arm_backend_core.targets.cortex_m import Isa
from arm_recipes.runtime.program import Program
from arm_recipes.stages.edge.edge_manager_passes import use_cortex_m_kernels, use_cortex_m_quantize
from tests.ops.runner import FunctionModule, check_steps, export, flatten_tensors, output_scales

#: A processor of each instruction set.
CPUS = {"mve": "cortex-m55", "dsp": "cortex-m4", "scalar": "cortex-m0plus"}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A module or function, and the shapes of its inputs.

    Attributes:
        name: name of the test.
        model: a module, or a function of the inputs.
        shapes: shapes of the inputs.
        steps: allowed difference to the quantized graph, in steps of the output.
        kernels: names of kernels that the program must call, with the number of calls in front where it matters.
        isa: instruction set.
        low: smallest element of the inputs.
        high: largest element of the inputs.
        channels_last: the inputs of rank 4 have channels_last memory format.
        per_channel: weights have a scale per output channel.
    """

    name: str
    model: Callable[..., Any]
    shapes: Sequence[Shape]
    steps: int = 1
    kernels: str = ""
    isa: str = "mve"
    low: float = -2.0
    high: float = 2.0
    channels_last: bool = False
    per_channel: bool = True

    def module(self) -> nn.Module:
        """The module, with its own weights for each name."""
        torch.manual_seed(len(self.name))
        return (
            copy.deepcopy(self.model).eval() if isinstance(self.model, nn.Module) else FunctionModule(self.model).eval()
        )

    def sample(self, seed: int = 0) -> tuple[Tensor, ...]:
        """Inputs, uniform in [low, high]."""
        generator = torch.Generator().manual_seed(seed)
        inputs = (torch.rand(shape, generator=generator) * (self.high - self.low) + self.low for shape in self.shapes)
        form = torch.channels_last if self.channels_last else torch.contiguous_format
        return tuple(x.contiguous(memory_format=form) if x.dim() == 4 else x for x in inputs)


@dataclass(frozen=True)
class LoweredCortexMProgram:
    """A quantized program, the same one with kernels, and the operators that stayed in floating point."""

    quantized: ExportedProgram
    program: ExportedProgram
    log: compilation_log.Log
    isa: Isa

    @cached_property
    def calls(self) -> Counter[str]:
        """Number of calls of each kernel."""
        overloads = (overload_of(node.target) for node in self._nodes())
        return Counter(x._schema.name.partition("::")[2] for x in overloads if x and x.namespace == NAMESPACE)

    @property
    def reasons(self) -> list[str]:
        """Operators that stayed in floating point, with the reason."""
        return [f"{refused.operator}: {refused.reason}" for refused in self.log.refused_operators]

    def float_operators(self) -> list[str]:
        """Operators that compute with floating-point numbers; casts of the program's inputs and outputs are none."""
        return [str(node.target) for node in self._nodes() if is_float(node) and not is_dequantize(node)] + [
            f"{node.target} of {source}"
            for node in self._nodes()
            for source in node.all_input_nodes
            if is_quantize(node) and source.op != "placeholder"
        ]

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Results of the kernels, which compute with NumPy."""
        return _run(self.program, inputs)

    def run_in_executorch(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Results of ExecuTorch's runtime with the kernels of this machine."""
        manager = to_edge(copy.deepcopy(self.program), compile_config=EdgeCompileConfig(_check_ir_validity=False))
        use_cortex_m_quantize(manager)
        use_cortex_m_kernels(self.isa, manager)
        return list(Program(bytes(manager.to_executorch().buffer)).execute(*inputs))

    def check_executorch_run(self, inputs: Sequence[Tensor]) -> None:
        """Assert that ExecuTorch's runtime computes the same bits."""
        for ours, theirs in zip(self.run_in_executorch(inputs), self.run(inputs), strict=True):
            assert torch.equal(ours, theirs)

    def check(self, inputs: Sequence[Tensor], steps: int) -> None:
        """Assert that all operators are kernels or data movement, and that the results are those of the graph.

        Args:
            inputs: inputs of the program.
            steps: allowed difference, in steps of the output.
        """
        assert not self.log.refused_operators, self.reasons
        assert not self.float_operators()
        check_steps(self.run(inputs), _run(self.quantized, inputs), output_scales(self.quantized), steps)

    def check_calls(self, kernels: str) -> None:
        """Assert that the program calls ``kernels``: names, with the number of calls in front where it matters."""
        for text in filter(None, kernels.split(", ")):
            count, _, name = text.rpartition(" ")
            assert self.calls[name] == int(count) if count else self.calls[name], f"{text} not in {self.calls}"

    def check_refused(self, pattern: str) -> None:
        """Assert that an operator was refused with a matching reason."""
        assert any(re.search(pattern, reason) for reason in self.reasons), f"'{pattern}' not in {self.reasons}"

    def check_close(self, inputs: Sequence[Tensor], steps: int = 1) -> None:
        """Assert that the results are those of the quantized graph, wherever operators stayed."""
        ours, theirs, scales = self.run(inputs), _run(self.quantized, inputs), output_scales(self.quantized)
        if None in scales:
            torch.testing.assert_close(ours, theirs)
        else:
            check_steps(ours, theirs, scales, steps)

    def _nodes(self) -> list[Node]:
        return [node for node in self.program.graph_module.graph.nodes if node.op == "call_function"]


def _run(program: ExportedProgram, inputs: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return flatten_tensors(program.module(check_guards=False)(*inputs))


def quantize(case: Case) -> ExportedProgram:
    """Quantize a case, calibrated on three samples."""
    config = get_symmetric_quantization_config(is_per_channel=case.per_channel)
    spec = CortexMCompileSpec(CPUS[case.isa], case.isa)
    module = export(case.module(), case.sample()).module(check_guards=False)
    prepared = prepare_pt2e(module, CortexMQuantizer(spec).set_global(config))
    with torch.no_grad():
        for seed in range(3):
            prepared(*case.sample(seed))
    return export(convert(prepared), case.sample())


def lower(program: ExportedProgram, isa: str = "mve") -> LoweredCortexMProgram:
    """Lower a quantized program to kernels."""
    with compilation_log.open_log() as log:
        return LoweredCortexMProgram(program, delegate(program, CortexMCompileSpec(CPUS[isa], isa)), log, Isa(isa))


def check(case: Case) -> LoweredCortexMProgram:
    """Quantize and lower a case, compare both programs, and check which kernels are called."""
    lowered = lower(quantize(case), case.isa)
    lowered.check(case.sample(), case.steps)
    lowered.check_calls(case.kernels)
    return lowered


def check_refused(case: Case, pattern: str) -> None:
    """Check that an operator of a case stays in floating point, with a reason, and that the result is right."""
    lowered = lower(quantize(case), case.isa)
    lowered.check_refused(pattern)
    lowered.check_close(case.sample())
