"""Evaluator of precision plans: quantizes the model by a plan, measures its accuracy and estimates its cost.

With ``cache_dir``, a content-addressed store on disk caches Vela's estimates, and evaluation results if the metric is
the SQNR. Results of a user's metric are kept in memory only.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram

from arm_backend_core.errors import ArmBackendError
from arm_recipes._internal.errors import ExportError
from arm_recipes._internal.parallel import starmap_unordered
from arm_recipes.comparison.accuracy import EvaluationResult, Evaluator
from arm_recipes.explore.sweep.compile_worker import LoweredDelegate, cache_key, compile_delegates
from arm_recipes.explore.sweep.quantize_and_lower import LoweredProgram, QuantizedProgram
from arm_recipes.explore.sweep.rows import ProgramEstimates
from arm_recipes.explore.tune.cost import ProgramCost, cortex_m_cost, estimate_cost
from arm_recipes.explore.tune.regions import PrecisionPlan, minimal_settings
from arm_recipes.pipeline.cache.digest import Digest
from arm_recipes.pipeline.cache.key import toolchain

if TYPE_CHECKING:
    from executorch.export import ExportRecipe

    from arm_recipes.explore.sweep.result_store import ResultStore
    from arm_recipes.explore.tune.data_split import DataSplit
    from arm_recipes.recipe.recipe import ArmRecipe
    from arm_recipes.samples.call_inputs import Inputs


class PlanEvaluator:
    """Evaluates precision plans of one model and recipe. A plan maps each module to a precision.

    Args:
        program: captured model.
        recipe: recipe whose precisions the plans replace.
        default_precision: precision of the recipe itself.
        split: calibration, search and test samples.
        store: disk cache of Vela's estimates, and of evaluation results if the metric is the SQNR.
    """

    def __init__(
        self, program: ExportedProgram, recipe: ArmRecipe, default_precision: str, split: DataSplit, store: ResultStore
    ) -> None:
        self.program, self.recipe, self.default_precision, self.split = program, recipe, default_precision, split
        self._store = store
        self._content_hash = _content_digest(program, recipe, split.calibration)
        evaluators = (split.search_evaluator, split.test_evaluator)
        self._samples_digests = {evaluator: _samples_digest(evaluator.samples) for evaluator in evaluators}
        self._results: dict[str, EvaluationResult] = {}
        self._costs: dict[str, ProgramCost | str] = {}
        self._last_quantized: tuple[PrecisionPlan, QuantizedProgram] | None = None

    def recipe_for_plan(self, plan: Mapping[str, str]) -> ArmRecipe:
        """Return the recipe with its precisions replaced by those of the plan."""
        return self.recipe.with_options(precisions=minimal_settings(plan, self.default_precision))

    def evaluate_on_search_samples(self, plan: PrecisionPlan) -> EvaluationResult:
        """Evaluate the plan's quantized program on the search samples.

        Raises:
            ExportError, ArmBackendError: the program cannot be quantized with this plan.
        """
        return self._evaluate(plan, self.split.search_evaluator)

    def evaluate_on_test_samples(self, plan: PrecisionPlan) -> EvaluationResult:
        """Evaluate the plan's quantized program on the test samples.

        Raises:
            ExportError, ArmBackendError: as for ``evaluate_on_search_samples``.
        """
        return self._evaluate(plan, self.split.test_evaluator)

    def _evaluate(self, plan: PrecisionPlan, evaluator: Evaluator) -> EvaluationResult:
        key = self._store_key(plan, self._samples_digests[evaluator])
        if key not in self._results:
            result = EvaluationResult.from_record(self._store.load_record(key)) if evaluator.is_cacheable else None
            if result is None:
                result = evaluator.evaluate(self._quantize(plan).program)
                if evaluator.is_cacheable:
                    self._store.save_record(key, vars(result))
            self._results[key] = result
        return self._results[key]

    def estimate_costs(self, plans: Iterable[PrecisionPlan]) -> list[ProgramCost | str]:
        """Estimate the cost of each plan. The result of a plan is an error message if its program cannot be compiled.

        Vela compiles several plans in parallel. The store caches Vela's estimates.
        """
        requested, spec = list(plans), self._vela_spec
        keys = [self._store_key(plan) for plan in requested]
        plan_of_key = dict(zip(keys, requested, strict=True))
        lowered_programs: dict[str, LoweredProgram] = {}
        tasks = []
        for key in plan_of_key:
            if key in self._costs:
                continue
            if self._is_for_cortex_m:
                self._costs[key] = self._estimate_cortex_m_cost(plan_of_key[key])
                continue
            with _without_warnings():
                lowered = self._lower(plan_of_key[key])
            if isinstance(lowered, str):
                self._costs[key] = lowered
            elif spec is None:
                self._costs[key] = estimate_cost(None, lowered.flatbuffers, lowered.cpu_operators)
            else:
                lowered_programs[key] = lowered
                estimates = self._store.load_estimates(cache_key(spec, lowered.delegates))
                if estimates is None:
                    tasks.append((len(lowered_programs) - 1, spec, lowered.delegates, *lowered.arrays(spec)))
                else:
                    self._costs[key] = estimate_cost(estimates, lowered.flatbuffers, lowered.cpu_operators)
        order = list(lowered_programs)
        for index, outcome in _iter_compiled(tasks):
            lowered = lowered_programs[order[index]]
            if isinstance(outcome, ProgramEstimates):
                self._store.save_record(cache_key(spec, lowered.delegates), {"figures": vars(outcome)})
                self._costs[order[index]] = estimate_cost(outcome, lowered.flatbuffers, lowered.cpu_operators)
            else:
                self._costs[order[index]] = outcome
        return [self._costs[key] for key in keys]

    @property
    def _is_for_cortex_m(self) -> bool:
        """Whether the recipe is for a Cortex-M without an NPU."""
        from arm_backend_core.targets.compile_spec import CortexMCompileSpec

        return isinstance(self._compile_spec, CortexMCompileSpec)

    def _estimate_cortex_m_cost(self, plan: PrecisionPlan) -> ProgramCost | str:
        """Export a plan for a Cortex-M; the result is an error message if this fails."""
        from arm_recipes.pipeline.export import export_unlowered

        try:
            with _without_warnings():
                unlowered = self._quantize(plan).unlowered
                return cortex_m_cost(export_unlowered(unlowered, self._evaluation_recipe(plan), progress=False))
        except (ArmBackendError, ExportError) as error:
            return str(error)

    @property
    def _vela_spec(self) -> Any:
        """Compile spec of the recipe for Ethos-U; None for other targets."""
        from arm_backend_core.targets.compile_spec import EthosUCompileSpec

        spec = self._compile_spec
        return spec if isinstance(spec, EthosUCompileSpec) else None

    @property
    def _compile_spec(self) -> Any:
        """Compile spec of the recipe."""
        lowering = self.recipe.lowering_recipe
        assert lowering is not None
        partitioners: Any = lowering.partitioners
        return partitioners[0].compile_spec

    def _lower(self, plan: PrecisionPlan) -> LoweredProgram | str:
        """Quantize and lower a plan; the result is an error message if this fails."""
        try:
            return self._quantize(plan).lower(self._compile_spec.target)
        except (ArmBackendError, ExportError) as error:
            return str(error)

    def _quantize(self, plan: PrecisionPlan) -> QuantizedProgram:
        """Quantize a plan. The last result is kept, because the same plan is often lowered and then evaluated."""
        if self._last_quantized is None or self._last_quantized[0] != plan:
            with _without_warnings():
                quantized = QuantizedProgram(self.program, self.split.calibration, self._evaluation_recipe(plan))
                self._last_quantized = dict(plan), quantized
        return self._last_quantized[1]

    def _evaluation_recipe(self, plan: PrecisionPlan) -> ExportRecipe:
        """Return the recipe of a plan, without calibration samples.

        ``QuantizedProgram`` gets the calibration samples of ``split`` as an argument.
        """
        recipe: ExportRecipe = self.recipe.with_options(
            precisions=minimal_settings(plan, self.default_precision),
            calibration_samples=None,
            require_runnable=False,
        )
        return recipe

    def _store_key(self, plan: Mapping[str, str], samples_digest: str = "") -> str:
        """Return the key of a plan's evaluation result on the samples with this digest.

        Without a digest, return the key of the plan in ``_costs``. The store has Vela's estimates under other keys
        (``cache_key``), so that ``sweep`` finds them, too.
        """
        text = json.dumps([self._content_hash, samples_digest, sorted(plan.items())])
        return hashlib.sha256(text.encode()).hexdigest()


def _iter_compiled(
    tasks: Sequence[tuple[int, Any, Sequence[LoweredDelegate], Any]],
) -> Iterator[tuple[int, ProgramEstimates | str]]:
    """Compile tasks, and yield the index and the result of each.

    Several tasks run in parallel. A single task runs in this process, because the start of a worker process takes
    longer than the compilation of a graph.
    """
    if len(tasks) > 1:
        yield from starmap_unordered(compile_delegates, tasks)
        return
    for task in tasks:
        yield compile_delegates(*task)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress warnings about intermediate programs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _content_digest(program: ExportedProgram, recipe: ArmRecipe, calibration: Sequence[Inputs]) -> str:
    """Hash of model, recipe, calibration samples and ``toolchain``. All evaluation results and costs depend on them."""
    digest = Digest()
    digest.add((recipe.to_dict(), toolchain()))
    digest.add(str(program.graph))
    for constant in (*program.state_dict.values(), *program.constants.values()):
        digest.add(constant.cpu() if isinstance(constant, torch.Tensor) else repr(constant))
    digest.add(_samples_digest(calibration))
    return digest.hexdigest()


def _samples_digest(samples: Iterable[Inputs]) -> str:
    digest = Digest()
    for sample in samples:
        digest.add_sample(sample)
    return digest.hexdigest()
