"""What a worker process of a comparison does: one sample after the other, by the model and by programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from arm_backend_core.kinds import ScalarKind, kind_of
from arm_backend_core.quantization.diagnostics.error_metrics import Losses, Sums
from arm_recipes.comparison.intermediate_outputs import DelegateTaps, match_executions
from arm_recipes.comparison.interpreter_plan import ComparedTensor, InterpreterPlan, PlanInterpreter
from arm_recipes.runtime import plugin
from arm_recipes.runtime.load import load
from arm_recipes.runtime.signature import Value
from arm_recipes.runtime.tensor_info import TensorInfo


@dataclass(frozen=True)
class ProgramSpec:
    """A program that is executed.

    Attributes:
        data: the ``.pte``.
        inputs, outputs: of the method, with scales where they are quantized.
        plan: of what was lowered, if that is known; ``taps``: of the delegates.
    """

    data: bytes
    method: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    plan: InterpreterPlan | None
    taps: tuple[DelegateTaps, ...]

    @property
    def tapped_tensors(self) -> frozenset[str]:
        """Rows whose values delegates tell."""
        return frozenset().union(*(tap.tapped_nodes for tap in self.taps))


@dataclass(frozen=True)
class ComparisonJob:
    """A comparison of ``program`` with ``reference``, a program too, or else with its own plan in floating point."""

    program: ProgramSpec
    reference: ProgramSpec | None

    @property
    def has_state(self) -> bool:
        """Whether samples must be taken one after the other."""
        sides = [self.program] + ([] if self.reference is None else [self.reference])
        return any(side.plan is None or side.plan.has_state for side in sides)


@dataclass(frozen=True)
class WorkItem:
    """A sample.

    Attributes:
        index: its number.
        inputs: the tensors that the model takes.
        layers: look inside of the program.
        expected: outputs of the model, where the program has no plan that could give them.
    """

    index: int
    inputs: list[Tensor]
    layers: bool
    expected: list[Any] | None = None


@dataclass
class SampleResult:
    """What one sample gave.

    Attributes:
        reference, program: outputs, as real numbers.
        sums: of each output that is a tensor, by its place.
        layers, losses: by the name of the row.
        mismatched: delegates whose results are not those of their TOSA graphs.
    """

    reference: list[Any]
    program: list[Any]
    sums: dict[int, Sums] = field(default_factory=dict)
    layers: dict[str, Sums] = field(default_factory=dict)
    losses: dict[str, Losses] = field(default_factory=dict)
    mismatched: tuple[str, ...] = ()


class SampleRunner:
    """A job under way; buffers go on from sample to sample."""

    def __init__(self, job: ComparisonJob) -> None:
        self._program = _Running(job.program)
        self._reference = None if job.reference is None else _Running(job.reference)

    def __call__(self, item: WorkItem) -> SampleResult:
        """One sample."""
        with _one_thread(), torch.no_grad():
            given = self._program.outputs(item.inputs)
            beside = self._compare_with_model if self._reference is None else self._compare_with_program
            found = beside(item, given)
        for index, (right, other) in enumerate(zip(found.reference, found.program, strict=True)):
            if isinstance(right, Tensor) and isinstance(other, Tensor) and right.shape == other.shape:
                found.sums[index] = Sums.of(right, other)
        return found

    def _compare_with_model(self, item: WorkItem, given: list[Any]) -> SampleResult:
        running, found = self._program, SampleResult([], given)
        if running.evaluation is None:
            assert item.expected is not None
            found.reference = item.expected
            return found
        known = running.known() if item.layers else None
        for row, values in running.evaluation.run(item.inputs, known, own=item.layers):
            if not item.layers or values.program is None:
                continue
            found.layers[row.name] = Sums.of(values.reference, values.program)
            if row.grid is not None and not row.is_data_movement:
                found.losses[row.name] = Losses.of(values.reference, values.layer_output, row.grid)
        found.reference, found.mismatched = running.evaluation.outputs, running.different
        return found

    def _compare_with_program(self, item: WorkItem, given: list[Any]) -> SampleResult:
        assert self._reference is not None
        found = SampleResult(self._reference.outputs(item.inputs), given)
        if item.layers:
            right, other = (running.rows(item.inputs) for running in (self._reference, self._program))
            for name in right.keys() & other.keys():
                if right[name].shape == other[name].shape:
                    found.layers[name] = Sums.of(right[name], other[name])
        found.mismatched = tuple(dict.fromkeys(self._reference.different + self._program.different))
        return found


class _Running:
    """A program that runs."""

    def __init__(self, side: ProgramSpec) -> None:
        self._side, self._program = side, load(side.data)
        self._executions: list[plugin.Execution] = []
        self.different: tuple[str, ...] = ()
        self.evaluation: PlanInterpreter | None = None
        if side.plan is not None:
            self.evaluation = PlanInterpreter(side.plan, side.tapped_tensors)

    def outputs(self, inputs: Sequence[Tensor]) -> list[Any]:
        """What the program returns for inputs of the model, as real numbers."""
        side = self._side
        tensors = [
            info.to_program(tensor) if isinstance(info, TensorInfo) else tensor
            for info, tensor in zip(side.inputs, inputs, strict=True)
        ]
        with plugin.observed() as executions:
            made = self._program.run(*tensors, method=side.method)
        self._executions = executions
        return [
            info.to_model(value) if isinstance(info, TensorInfo) else value
            for info, value in zip(side.outputs, made, strict=True)
        ]

    def known(self) -> dict[str, Tensor]:
        """Values of the last run that delegates have inside."""
        plan = self._side.plan
        assert plan is not None
        grids = {row.name: row.grid for row in plan.tensors if row.grid is not None}
        found: dict[str, Tensor] = {}
        different = []
        for execution, tap in match_executions(self._executions, self._side.taps):
            values, equal = tap.read(execution, grids)
            found |= values
            if not equal:
                different.append(tap.name)
        self.different = tuple(different)
        return found

    def rows(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """Values of the last run by the name that the row has in floating point."""
        if self.evaluation is None:
            return {}
        rows = self.evaluation.run(inputs, self.known())
        return {row.node: values.program for row, values in rows if values.program is not None}


def measure_layer_effects(
    plan: InterpreterPlan, rows: Sequence[ComparedTensor], inputs: Sequence[Tensor]
) -> dict[str, Sums]:
    """What a sample's first output is where one row alone is what the program's grid and weights make of right inputs.

    Returns:
        by the name of the row; none if there is no real output.
    """
    with _one_thread(), torch.no_grad():
        evaluation, names = PlanInterpreter(plan), {row.name for row in rows}
        rounded = {}
        for row, values in evaluation.run(inputs, own=True):
            if row.name in names and row.grid is not None:
                rounded[row.name] = row.grid.rounded(values.reference if values.layer_output is None else values.layer_output)
        right = evaluation.outputs
        place = next((i for i, x in enumerate(right) if _is_float(x)), None)
        found: dict[str, Sums] = {}
        if place is None:
            return found
        for name, value in rounded.items():
            for _ in evaluation.run(inputs, replaced={name: value}):
                pass
            found[name] = Sums.of(right[place], evaluation.outputs[place])
    return found


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums of floating-point numbers depend on how threads share them: figures must not on the number of workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and kind_of(value.dtype) is ScalarKind.FLOAT
