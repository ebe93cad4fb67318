"""The memory plan with the NPU's scratch: no two live tensors share memory, and a board needs less RAM."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
from executorch.exir.tensor import TensorSpec
from executorch.export import ExportRecipe
from executorch.export import export as executorch_export
from torch import Tensor, nn

from arm_backend_core.backends.payload import PlannedScratch
from arm_recipes import ArmRecipeType, ExportError, ExportResult, export
from arm_recipes.firmware.host_run import run_on_host
from arm_recipes.firmware.saving import collect_firmware_data
from arm_recipes.pipeline.shared_scratch import _Call, _Plan, _smallest_plan
from arm_recipes.runtime.ethosu_payload import CACHE_LINE
from arm_recipes.runtime.method_memory import planned_scratches
from tests.runtime.host_programs import Counting, CpuBetween, Small
from tests.small_models import images, vectors

U55, U85 = ArmRecipeType.ETHOSU_U55_INT8, ArmRecipeType.ETHOSU_U85_INT8


def _tensor(first: int, last: int, nbytes: int) -> TensorSpec:
    spec = TensorSpec(torch.int8, torch.Size([nbytes]))
    spec.lifetime = [first, last]
    return spec


def _random_method(seed: int) -> tuple[list[_Call], list[TensorSpec]]:
    """A chain of calls and CPU operators, with skips: about 20 tensors of random sizes."""
    draw = random.Random(seed)
    specs, calls, live = [_tensor(0, 0, draw.randrange(1, 400)) for _ in range(3)], [], list[TensorSpec]()
    live += specs
    for index in range(3, 12):
        inputs = draw.sample(live, min(len(live), draw.randrange(1, 3)))
        outputs = [_tensor(index, index, draw.randrange(1, 400)) for _ in range(draw.randrange(1, 3))]
        for spec in inputs:
            spec.lifetime[1] = index
        if draw.random() < 0.5:
            calls.append(_random_call(draw, index, inputs, outputs))
        live = [*(spec for spec in live if spec not in inputs or draw.random() < 0.3), *outputs]
        specs += outputs
    for at, call in enumerate(calls):  # the last use of an input, the first of an output
        kept = {i: each for i, each in call.arguments.items() if _begins_or_ends(each[0], call.index)}
        calls[at] = _Call(call.index, call.module, call.scratch_bytes, kept)
    return calls, specs


def _begins_or_ends(spec: TensorSpec, index: int) -> bool:
    """Whether a tensor begins or ends at a node."""
    return index in spec.lifetime


def _random_call(draw: random.Random, index: int, inputs: list[TensorSpec], outputs: list[TensorSpec]) -> _Call:
    """A call whose inputs have disjoint offsets in its scratch; so have its outputs. An input may overlap an output."""
    arguments: dict[int, tuple[TensorSpec, int]] = {}
    end = 0
    for side in (inputs, outputs):
        offset = 16 * draw.randrange(4)
        for spec in side:
            arguments[len(arguments)] = (spec, offset)
            offset += spec.allocated_memory + 16 * draw.randrange(3)
        end = max(end, offset)
    module: Any = object()
    return _Call(index, module, -(-end // CACHE_LINE) * CACHE_LINE + CACHE_LINE * draw.randrange(8), arguments)


def _blocks(plan: _Plan, specs: list[TensorSpec]) -> Iterator[tuple[Any, int, int, int, int]]:
    """Yield each tensor with its bytes and its nodes."""
    for spec in specs:
        start = plan.offset_of(spec)
        yield spec, start, start + spec.allocated_memory, spec.lifetime[0], spec.lifetime[1]


def test_live_tensors_and_scratches_do_not_overlap() -> None:
    """In random methods, only arguments of a call lie in its scratch, and only at the offsets of Vela's allocation."""
    in_place = 0
    for seed in range(300):
        calls, specs = _random_method(seed)
        plan = _smallest_plan(calls, specs, 16)
        blocks = list(_blocks(plan, specs))
        arguments = {call.index: [spec for spec, _ in call.arguments.values()] for call in calls}
        for (a, a_start, a_end, a_first, a_last), (b, b_start, b_end, b_first, b_last) in combinations(blocks, 2):
            if a_start >= b_end or b_start >= a_end or a_first > b_last or b_first > a_last:
                continue
            (shared,) = range(max(a_first, b_first), min(a_last, b_last) + 1)
            assert {a, b} <= set(arguments[shared]), f"seed {seed}"
        for call in calls:
            scratch = plan.scratches.get(call.index)
            if scratch is None:
                continue
            start = scratch.end - call.scratch_bytes
            assert start % CACHE_LINE == 0
            assert scratch.end <= plan.size
            spec, offset = call.arguments[scratch.argument]
            assert plan.offset_of(spec) == start + offset, f"seed {seed}"
            placed = {spec for spec, offset in call.arguments.values() if plan.offset_of(spec) == start + offset}
            in_place += len(placed)
            for spec, tensor_start, tensor_end, first, last in blocks:
                if spec not in placed and first <= call.index <= last:
                    assert tensor_start >= scratch.end or tensor_end <= start, f"seed {seed}"
    assert in_place > 700


def test_planned_scratch_is_read_from_its_compile_specs() -> None:
    scratch = PlannedScratch(3, 4096)
    specs = {spec.key: bytes(spec.value) for spec in scratch.to_compile_specs()}
    assert PlannedScratch.from_compile_specs(specs) == scratch
    assert PlannedScratch.from_compile_specs({}) is None


def _export(model: nn.Module, samples: Any, recipe: ArmRecipeType = U55, **options: Any) -> ExportResult:
    return export(model.eval(), ExportRecipe.get_recipe(recipe, **options), samples, progress=False)


def _ram(result: ExportResult) -> int:
    assert result.report.ram is not None
    return result.report.ram.total_bytes


@pytest.mark.parametrize("options", [{}, {"quantized_io": True}], ids=["float", "int8"])
def test_a_program_of_one_delegate_needs_its_scratch_alone(options: dict[str, Any]) -> None:
    """Float inputs and outputs are in the memory of the scratch, while the NPU does not run."""
    shared, separate = (_export(Small(), images(), shared_scratch=value, **options) for value in (True, False))
    (delegate,) = shared.report.delegates
    assert delegate.vela is not None
    assert shared.report.ram is not None
    planned = next(part.bytes for part in shared.report.ram.parts if part.name.startswith("NPU scratch with"))
    if options:
        assert planned - delegate.vela.scratch_bytes < CACHE_LINE
    assert _ram(shared) < _ram(separate)


class Skip(nn.Module):
    """An operator on the CPU between two parts for the NPU, and an input that is used again after the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return two images, the first sorted by columns."""
        y = self.first(x).sort(-1).values
        return y, self.second(y) + x


@pytest.mark.parametrize("recipe", [U55, U85])
def test_shared_scratch_gives_the_results_of_separate_memories(recipe: ArmRecipeType) -> None:
    """In ExecuTorch's runtime, whose delegate copies from and to a scratch of its own."""
    torch.manual_seed(1)
    samples = [(torch.randn(1, 4, 10, 12),) for _ in range(2)]
    shared, separate = (_export(Skip(), samples, recipe, shared_scratch=value) for value in (True, False))
    assert len(shared.report.delegates) == (2 if recipe is U55 else 1)  # U85 has sort
    assert _ram(shared) < _ram(separate)
    for sample in samples:
        for a, b in zip(shared.run(*sample), separate.run(*sample), strict=True):
            assert torch.equal(a, b)


class Between(Skip):
    """The layers of ``Skip`` with a CPU operator of one result: a manager can lower the program twice."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return two images, of which the second does not depend on the CPU's operator."""
        return self.second(torch.erfinv(self.first(x) * 0.1)), x * 0.5


@pytest.mark.parametrize("options", [{}, {"memory": {"dtcm": 2000, "sram": None}}], ids=["scratch", "memories"])
def test_a_second_lowering_forgets_the_first_plan(options: dict[str, Any]) -> None:
    """ExecuTorch's own plan has no scratch, so no delegate may look for it there; the recipe's plan is the first."""
    recipe = ExportRecipe.get_recipe(U55, **options)
    session = executorch_export(Between().eval(), [(torch.randn(1, 4, 10, 12),)], recipe)
    first, manager = session.get_executorch_program_manager(), session.get_edge_program_manager()
    default, again = manager.to_executorch(), manager.to_executorch(recipe.executorch_backend_config)
    (first_plan,), (default_plan,), (second_plan,) = (
        program.executorch_program.execution_plan for program in (first, default, again)
    )
    assert any(planned_scratches(first_plan)) != bool(options)
    assert not any(planned_scratches(default_plan))
    assert list(planned_scratches(second_plan)) == list(planned_scratches(first_plan))
    assert second_plan.non_const_buffer_sizes == first_plan.non_const_buffer_sizes


@pytest.mark.parametrize("options", [{"memory": {"dtcm": 800, "sram": None}}, {"shared_scratch": False}])
def test_option_memory_and_shared_scratch_false_leave_a_separate_scratch(options: dict[str, Any]) -> None:
    result = _export(Small(), images(), U85, **options)
    assert result.report.ram is not None
    assert any(part.name == "NPU scratch" for part in result.report.ram.parts)


def test_methods_share_the_scratch_of_the_runtime() -> None:
    models = {"first": Counting().eval(), "between": CpuBetween().eval()}
    result = export(models, ExportRecipe.get_recipe(U55), dict.fromkeys(models, vectors(2)), progress=False)
    assert result.report.ram is not None
    assert any(part.name == "NPU scratch" for part in result.report.ram.parts)


@pytest.mark.parametrize("options", [{"plan_inputs": False}, {"plan_outputs": False}], ids=["inputs", "outputs"])
def test_the_application_has_inputs_or_outputs_in_its_own_memory(options: dict[str, Any]) -> None:
    planned, own = _export(Small(), images()), _export(Small(), images(), **options)
    assert planned.report.ram is not None
    assert own.report.ram is not None
    parts = {part.name: part.bytes for part in own.report.ram.parts}
    assert parts["inputs and outputs of the application"] > 0
    sample = images()[0]
    assert torch.equal(planned.run(*sample), own.run(*sample))


class Repeated(nn.Module):
    """Outputs that are an input, a constant, and one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Conv2d(3, 4, 3, padding=1)
        self.register_buffer("constant", torch.arange(4.0))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return x first, as its memory is set before the layer reads it."""
        y = self.layer(x)
        return x, y, y, self.get_buffer("constant"), x


@pytest.mark.parametrize("recipe", [U55, ArmRecipeType.TOSA_INT8, ArmRecipeType.CORTEX_M_INT8])
@pytest.mark.parametrize("options", [{"plan_outputs": False}, {"plan_inputs": False, "plan_outputs": False}], ids=str)
def test_each_output_of_the_application_has_its_own_tensor(recipe: ArmRecipeType, options: dict[str, Any]) -> None:
    planned, own = _export(Repeated(), images(), recipe), _export(Repeated(), images(), recipe, **options)
    sample = images()[0]
    for a, b in zip(planned.run(*sample), own.run(*sample), strict=True):
        assert torch.equal(a, b)
    if recipe is ArmRecipeType.TOSA_INT8:
        return  # has no firmware
    firmware = collect_firmware_data(own, [sample], "repeated")
    seen = run_on_host(firmware.program, firmware.pools.host_sizes(), firmware.test_vectors.cases)
    assert seen.outputs == firmware.test_vectors.outputs


class InPlace(nn.Module):
    """Writes to its input ``x``, not to ``y``."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return a product of the new value."""
        return x.add_(1) * y


@pytest.mark.parametrize("recipe", [U55, ArmRecipeType.TOSA_FP, ArmRecipeType.CORTEX_M_INT8])
def test_an_input_of_the_application_is_not_written(recipe: ArmRecipeType) -> None:
    samples = [(torch.linspace(-1, 1, 6), torch.ones(6))]
    with pytest.raises(ExportError, match=r"plan_inputs=False: .*'forward' writes to its input 'x'.*Omit plan_inputs"):
        _export(InPlace(), samples, recipe, plan_inputs=False)
    result = _export(InPlace(), samples, recipe)
    for got in result.program().execute(*samples[0]):  # the new value of x, and the product
        torch.testing.assert_close(got, samples[0][0] + 1, atol=0.02, rtol=0)


@pytest.mark.parametrize("recipe", [ArmRecipeType.TOSA_FP, ArmRecipeType.CORTEX_M_INT8])
def test_an_input_of_the_application_may_be_an_output(recipe: ArmRecipeType) -> None:
    samples = images()
    planned, own = _export(Repeated(), samples, recipe), _export(Repeated(), samples, recipe, plan_inputs=False)
    assert torch.equal(own.run(*samples[0])[0], samples[0][0])
    for a, b in zip(planned.run(*samples[0]), own.run(*samples[0]), strict=True):
        assert torch.equal(a, b)
