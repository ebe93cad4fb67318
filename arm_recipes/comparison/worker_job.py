"""Comparison job: run samples through programs and their reference, and sum up the errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from arm_backend_core.quantization.diagnostics.error_metrics import ErrorSums, IsolatedErrorSums
from arm_backend_core.scalar_kind import is_float_tensor
from arm_recipes.comparison.compared_tensors import ComparedTensor
from arm_recipes.comparison.intermediate_outputs import InstrumentedDelegate, match_executions
from arm_recipes.comparison.interpreter_plan import InterpreterPlan
from arm_recipes.comparison.plan_interpreter import PlanInterpreter
from arm_recipes.runtime import host_backends
from arm_recipes.runtime.load import load
from arm_recipes.runtime.signature import IOValue
from arm_recipes.runtime.tensor_info import TensorInfo


@dataclass(frozen=True)
class ProgramSpec:
    """A program to execute.

    Attributes:
        data: the ``.pte``.
        method: method to run.
        inputs, outputs: descriptions of the inputs and outputs of the method, with their scales if quantized.
        plan: interpreter plan of the program before lowering; None for a saved program, and if a plan cannot represent
            the program.
        instrumented_delegates: TOSA graphs of delegates, with the results of layers as additional outputs.
        data_file: the ``.ptd`` of the program, or None.
    """

    data: bytes
    method: str
    inputs: tuple[IOValue, ...]
    outputs: tuple[IOValue, ...]
    plan: InterpreterPlan | None
    instrumented_delegates: tuple[InstrumentedDelegate, ...]
    data_file: bytes | None = None

    @property
    def provided_tensors(self) -> frozenset[str]:
        """Names of the tensors whose values the delegates provide."""
        return frozenset().union(*(delegate.provided_nodes for delegate in self.instrumented_delegates))


@dataclass(frozen=True)
class ComparisonJob:
    """A comparison of ``program`` with ``reference``, or with the floating-point model if ``reference`` is None.

    The plan of ``program`` computes the floating-point model. Without a plan, ``WorkItem.expected`` has the outputs of
    the model.
    """

    program: ProgramSpec
    reference: ProgramSpec | None

    @property
    def is_sequential(self) -> bool:
        """Whether samples must run in order in one process: a program has state, or its state is unknown (no plan)."""
        specs = [self.program] + ([] if self.reference is None else [self.reference])
        return any(spec.plan is None or spec.plan.has_state for spec in specs)


@dataclass(frozen=True)
class WorkItem:
    """A sample.

    Attributes:
        index: index of the sample.
        inputs: input tensors of the model.
        compare_layers: whether to compare layers as well as outputs.
        expected: outputs of the model; None if the program's plan computes them, or if the reference is a program.
    """

    index: int
    inputs: list[Tensor]
    compare_layers: bool
    expected: list[Any] | None = None


@dataclass
class SampleResult:
    """Outputs and errors of one sample.

    Attributes:
        reference, program: outputs, dequantized.
        sums: error sums of each output tensor, by output index.
        layers: error sums of the compared tensors, by ``ComparedTensor.name``; in a comparison of two programs, by
            ``ComparedTensor.node``.
        isolated: error sums of isolated layers, by ``ComparedTensor.name``.
        mismatched: delegates whose results differed from those of their TOSA graphs; empty if the layers of this sample
            were not compared.
    """

    reference: list[Any]
    program: list[Any]
    sums: dict[int, ErrorSums] = field(default_factory=dict)
    layers: dict[str, ErrorSums] = field(default_factory=dict)
    isolated: dict[str, IsolatedErrorSums] = field(default_factory=dict)
    mismatched: tuple[str, ...] = ()


class SampleRunner:
    """Runs the samples of a job. Buffers keep their values from sample to sample."""

    def __init__(self, job: ComparisonJob) -> None:
        self._program = _LoadedProgram(job.program)
        self._reference = None if job.reference is None else _LoadedProgram(job.reference)

    def __call__(self, item: WorkItem) -> SampleResult:
        """Run one sample."""
        with _single_thread(), torch.no_grad():
            outputs = self._program.run(item.inputs)
            compare = self._compare_with_model if self._reference is None else self._compare_with_program
            result = compare(item, outputs)
        for index, (reference, program) in enumerate(zip(result.reference, result.program, strict=True)):
            if isinstance(reference, Tensor) and isinstance(program, Tensor) and reference.shape == program.shape:
                result.sums[index] = ErrorSums.of(reference, program)
        return result

    def _compare_with_model(self, item: WorkItem, outputs: list[Any]) -> SampleResult:
        program, result = self._program, SampleResult([], outputs)
        if program.interpreter is None:
            assert item.expected is not None
            result.reference = item.expected
            return result
        program_values = program.intermediate_values() if item.compare_layers else None
        for tensor, values in program.interpreter.run(item.inputs, program_values, isolate_layers=item.compare_layers):
            if not item.compare_layers or values.program is None:
                continue
            result.layers[tensor.name] = ErrorSums.of(values.reference, values.program)
            if tensor.qparams is not None and not tensor.is_lossless:
                result.isolated[tensor.name] = IsolatedErrorSums.of(
                    values.reference, values.layer_output, tensor.qparams
                )
        result.reference, result.mismatched = program.interpreter.outputs, program.mismatched
        return result

    def _compare_with_program(self, item: WorkItem, outputs: list[Any]) -> SampleResult:
        assert self._reference is not None
        result = SampleResult(self._reference.run(item.inputs), outputs)
        if item.compare_layers:
            reference_values, program_values = (
                program.tensor_values(item.inputs) for program in (self._reference, self._program)
            )
            for name in reference_values.keys() & program_values.keys():
                if reference_values[name].shape == program_values[name].shape:
                    result.layers[name] = ErrorSums.of(reference_values[name], program_values[name])
        result.mismatched = tuple(dict.fromkeys(self._reference.mismatched + self._program.mismatched))
        return result


class _LoadedProgram:
    """A loaded program with its interpreter."""

    def __init__(self, spec: ProgramSpec) -> None:
        self._spec, self._program = spec, load(spec.data, spec.data_file)
        self._executions: list[host_backends.DelegateExecution] = []
        self.mismatched: tuple[str, ...] = ()
        self.interpreter: PlanInterpreter | None = None
        if spec.plan is not None:
            self.interpreter = PlanInterpreter(spec.plan, spec.provided_tensors)

    def run(self, inputs: Sequence[Tensor]) -> list[Any]:
        """Run the program on the model's inputs and return its outputs, dequantized."""
        spec = self._spec
        tensors = [
            info.to_program(tensor) if isinstance(info, TensorInfo) else tensor
            for info, tensor in zip(spec.inputs, inputs, strict=True)
        ]
        with host_backends.record_executions() as executions:
            results = self._program.execute(*tensors, method=spec.method)
        self._executions, self.mismatched = executions, ()
        return [
            info.to_model(value) if isinstance(info, TensorInfo) else value
            for info, value in zip(spec.outputs, results, strict=True)
        ]

    def intermediate_values(self) -> dict[str, Tensor]:
        """Compute the intermediate values of the last run's delegates, dequantized, by node name."""
        plan = self._spec.plan
        assert plan is not None
        qparams_by_node = {tensor.name: tensor.qparams for tensor in plan.tensors if tensor.qparams is not None}
        values_by_node: dict[str, Tensor] = {}
        mismatched = []
        for execution, delegate in match_executions(self._executions, self._spec.instrumented_delegates):
            values, is_equal = delegate.compute_values(execution, qparams_by_node)
            values_by_node |= values
            if not is_equal:
                mismatched.append(delegate.name)
        self.mismatched = tuple(mismatched)
        return values_by_node

    def tensor_values(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """Compute the program's values of the compared tensors for the last run, by ``ComparedTensor.node``."""
        if self.interpreter is None:
            return {}
        compared = self.interpreter.run(inputs, self.intermediate_values())
        return {tensor.node: values.program for tensor, values in compared if values.program is not None}


def measure_layer_sensitivity(
    plan: InterpreterPlan, tensors: Sequence[ComparedTensor], inputs: Sequence[Tensor]
) -> dict[str, ErrorSums]:
    """Measure layer sensitivity: the error of the first floating-point output with one layer quantized at a time.

    Each run replaces one tensor by the quantized result of its isolated layer, which has floating-point inputs and
    quantized weights.

    Returns:
        Error sums of the output by tensor name; empty without a floating-point output.
    """
    with _single_thread(), torch.no_grad():
        interpreter, names = PlanInterpreter(plan), {tensor.name for tensor in tensors}
        rounded = {}
        for tensor, values in interpreter.run(inputs, isolate_layers=True):
            if tensor.name in names and tensor.qparams is not None:
                rounded[tensor.name] = tensor.qparams.round_values(
                    values.reference if values.layer_output is None else values.layer_output
                )
        reference = interpreter.outputs
        index = next((i for i, x in enumerate(reference) if is_float_tensor(x)), None)
        sums: dict[str, ErrorSums] = {}
        if index is None:
            return sums
        for name, rounded_value in rounded.items():
            for _ in interpreter.run(inputs, overrides={name: rounded_value}):
                pass
            sums[name] = ErrorSums.of(reference[index], interpreter.outputs[index])
    return sums


@contextmanager
def _single_thread() -> Iterator[None]:
    """Use one PyTorch thread.

    Floating-point sums depend on the number of threads, and results must not depend on the number of workers.
    """
    previous = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(previous)
