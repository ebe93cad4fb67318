"""Plan interpreter: compute each tensor in floating point, in the quantized program, and in its isolated layer."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from arm_backend_core.scalar_kind import ScalarKind, kind_of
from arm_recipes.comparison.compared_tensors import ComparedTensor
from arm_recipes.comparison.interpreter_plan import InterpreterPlan, Ref, Step, resolve_operator


@dataclass
class TensorValues:
    """Values of one compared tensor for one sample.

    Attributes:
        reference: value in floating point.
        layer_output: result of the isolated layer, which has floating-point inputs and quantized weights. The result
            itself is not quantized. None for a layer without quantized weights, and if ``run`` did not isolate layers.
        program: value in the quantized program; None if it was not requested.
    """

    reference: Tensor
    layer_output: Tensor | None
    program: Tensor | None


class PlanInterpreter:
    """Executes a plan. Buffers keep their values from sample to sample.

    Args:
        plan: the plan.
        provided: names of the tensors whose values the executed program provides to ``run``.
    """

    def __init__(self, plan: InterpreterPlan, provided: frozenset[str] = frozenset()) -> None:
        self._plan, self._simulated = plan, _find_simulated_steps(plan, provided)
        self._tensors = {row.name: row for row in plan.tensors}
        self._released_after_step = _find_releases(plan)
        self._reference_state: dict[str, Tensor] = {}
        self._program_state: dict[str, Tensor] = {}
        #: Outputs of the floating-point model for the last sample.
        self.outputs: list[Any] = []

    def run(
        self,
        inputs: Sequence[Tensor],
        program_values: Mapping[str, Tensor] | None = None,
        *,
        isolate_layers: bool = False,
        overrides: Mapping[str, Tensor] | None = None,
    ) -> Iterator[tuple[ComparedTensor, TensorValues]]:
        """Execute all steps for a sample, and yield each compared tensor with its values.

        Args:
            program_values: values that the program provides, by name. None: do not compute values of the program.
            isolate_layers: also compute each layer with quantized weights on floating-point inputs.
            overrides: ``{tensor name: value that replaces its floating-point value}``.
        """
        plan, simulated = self._plan, frozenset() if program_values is None else self._simulated
        sample = _SampleState(program_values or {}, simulated, isolate_layers, overrides or {})
        sample.reference.update(zip(plan.inputs, (x.clone() for x in inputs), strict=True))
        sample.program.update(sample.reference)
        for step in plan.steps:
            if step.kind == "constant":
                constant = plan.constants[step.name]
                sample.reference[step.name] = self._reference_state.get(
                    step.name, plan.float_constants.get(step.name, constant)
                )
                sample.program[step.name] = self._program_state.get(step.name, constant)
                if isolate_layers and step.name in plan.float_constants:
                    sample.isolated[step.name] = constant
            elif step.kind != "input":
                sample.execute(step)
            tensor = self._tensors.get(step.name)
            if tensor is not None:
                yield (
                    tensor,
                    TensorValues(
                        sample.reference[tensor.float_step],
                        sample.isolated.get(tensor.float_step),
                        sample.program.get(tensor.name),
                    ),
                )
            for name in self._released_after_step.get(step.name, ()):
                for environment in (sample.reference, sample.isolated, sample.program):
                    environment.pop(name, None)
        self.outputs = [sample.reference[x.name] if isinstance(x, Ref) else x for x in plan.outputs]
        self._reference_state = {buffer: sample.reference[value] for buffer, value in plan.writes.items()}
        self._program_state = {
            buffer: sample.program[value] for buffer, value in plan.writes.items() if value in sample.program
        }


@dataclass
class _SampleState:
    """State of one sample's execution.

    Attributes:
        program_values, isolates_layers, overrides: see ``PlanInterpreter.run``.
        simulated: names of the steps that PyTorch computes on the values of the program, because the executed program
            does not provide their results.
        reference, isolated, program: ``{step name: value}``, with the values that ``TensorValues`` calls ``reference``,
            ``layer_output`` and ``program``.
    """

    program_values: Mapping[str, Tensor]
    simulated: frozenset[str]
    isolates_layers: bool
    overrides: Mapping[str, Tensor]
    reference: dict[str, Any] = field(default_factory=dict)
    isolated: dict[str, Any] = field(default_factory=dict)
    program: dict[str, Any] = field(default_factory=dict)

    def execute(self, step: Step) -> None:
        """Compute a step. Quantized tensors are stored dequantized, as their consumers read them."""
        name, first = step.name, step.sources[0] if step.sources else ""
        compute: Callable[[Mapping[str, Any]], Any] = {
            "quantize": lambda values: _fake_quantize(step, values),
            "dequantize": lambda values: _dequantize(step, values),
            "call": lambda values: step(values.__getitem__),
        }[step.kind]
        if name in self.overrides:
            self.reference[name] = self.overrides[name]
        else:
            self.reference[name] = self.reference[first] if step.kind == "quantize" else compute(self.reference)
        if self.isolates_layers and step.kind != "quantize" and not self.isolated.keys().isdisjoint(step.sources):
            self.isolated[name] = compute(ChainMap(self.isolated, self.reference))
        if name in self.program_values:
            self.program[name] = self.program_values[name]
        elif name in self.simulated:
            self.program[name] = compute(self.program)


def _find_releases(plan: InterpreterPlan) -> dict[str, list[str]]:
    """Return ``{name of a step: names of the values for which this step is the last reader}``."""
    position = {step.name: index for index, step in enumerate(plan.steps)}
    last_use = {source: step.name for step in plan.steps for source in step.sources}
    for tensor in plan.tensors:  # ``run`` yields the floating-point value at the step of the quantized tensor
        last_use[tensor.float_step] = max(
            last_use.get(tensor.float_step, tensor.name), tensor.name, key=position.__getitem__
        )
    live = {ref.name for ref in plan.outputs if isinstance(ref, Ref)} | set(plan.writes.values())
    releases: dict[str, list[str]] = {}
    for source, step in last_use.items():
        if source not in live:
            releases.setdefault(step, []).append(source)
    return releases


def _find_simulated_steps(plan: InterpreterPlan, provided: frozenset[str]) -> frozenset[str]:
    """Return the steps whose program values PyTorch must compute, because the program does not provide them."""
    simulated = {row.name for row in plan.tensors} - provided
    if simulated:
        simulated |= set(plan.writes.values()) - provided
    for step in reversed(plan.steps):
        if step.name in simulated:
            simulated.update(source for source in step.sources if source not in provided)
    return frozenset(simulated)


def _fake_quantize(step: Step, values: Mapping[str, Any]) -> Any:
    """Quantize and dequantize a tensor."""
    integers = step(values.__getitem__)
    args = [values[x.name] if isinstance(x, Ref) else x for x in step.args[1:]]
    name = str(step.target).replace(".quantize_", ".dequantize_")
    return resolve_operator(name)(integers, *args)


def _dequantize(step: Step, values: Mapping[str, Any]) -> Any:
    source = values[step.sources[0]]
    return source if kind_of(source.dtype) is ScalarKind.FLOAT else step(values.__getitem__)
