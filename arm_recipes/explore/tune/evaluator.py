"""Tries plans: quantizes, measures the error, compiles. What was tried is kept in a folder, by content."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from arm_backend_core.errors import ArmBackendError
from arm_recipes._internal.messages import ExportError
from arm_recipes._internal.parallel import in_parallel
from arm_recipes.explore.sweep.compile import LoweredDelegate, cache_key, compile_delegates
from arm_recipes.explore.sweep.lowered import LoweredProgram, QuantizedProgram
from arm_recipes.explore.sweep.rows import Figures
from arm_recipes.explore.tune.accuracy import Evaluator, Rating
from arm_recipes.explore.tune.cost import ProgramCost, estimate_cost
from arm_recipes.explore.tune.regions import PrecisionPlan, minimal_settings

if TYPE_CHECKING:
    from executorch.export import ExportRecipe

    from arm_recipes.explore.sweep.result_store import ResultStore
    from arm_recipes.explore.tune.data_split import DataSplit
    from arm_recipes.recipe.recipe import ArmRecipe
    from arm_recipes.samples.sample import Inputs


class PlanEvaluator:
    """Everything that plans of one model and recipe are tried with.

    Args:
        program: the model, captured.
        recipe: whose precisions are replaced.
        default_precision: the precision that it gives.
        split: samples that calibrate, that choose and that judge.
        kept: where ratings and figures are kept.
    """

    def __init__(
        self, program: ExportedProgram, recipe: ArmRecipe, everywhere: str, division: DataSplit, kept: ResultStore
    ) -> None:
        self.program, self.recipe, self.default_precision, self.split = program, recipe, everywhere, division
        self._store = kept
        self._content = _digest(program, recipe, division.calibration)
        panels = (division.search, division.test)
        self._samples_digests = {panel: _samples_digest(panel.samples) for panel in panels}
        self._ratings: dict[str, Rating] = {}
        self._costs: dict[str, ProgramCost | str] = {}
        self._last: tuple[PrecisionPlan, QuantizedProgram] | None = None

    def with_plan(self, plan: Mapping[str, str]) -> ArmRecipe:
        """The recipe with a plan."""
        return self.recipe.with_options(precisions=minimal_settings(plan, self.default_precision))

    def rate_on_search(self, plan: PrecisionPlan) -> Rating:
        """How right the quantized program is by the samples that choose.

        Raises:
            ExportError, ArmBackendError: it cannot be quantized so.
        """
        return self._rate(plan, self.split.search)

    def rate_on_test(self, plan: PrecisionPlan) -> Rating:
        """How right it is by the samples that judge; raises as ``rate_on_search``."""
        return self._rate(plan, self.split.test)

    def _rate(self, plan: PrecisionPlan, panel: Evaluator) -> Rating:
        name = self._key(plan, self._samples_digests[panel])
        if name not in self._ratings:
            found = Rating.from_record(self._store.load_record(name)) if panel.is_cacheable else None
            if found is None:
                found = panel.rate(self._quantized(plan).program)
                self._store.save_record(name, vars(found))
            self._ratings[name] = found
        return self._ratings[name]

    def estimate_costs(self, plans: Iterable[PrecisionPlan]) -> list[ProgramCost | str]:
        """What each plan's program costs, or why there is none; Vela compiles several at once."""
        given = list(plans)
        names = [self._key(plan) for plan in given]
        wanted = dict(zip(names, given, strict=True))
        waiting: dict[str, LoweredProgram] = {}
        tasks = []
        for name in wanted:
            if name in self._costs:
                continue
            with _quietly():
                below = self._lowered(wanted[name])
            if isinstance(below, str):
                self._costs[name] = below
            elif self._spec is None:
                self._costs[name] = estimate_cost(None, below.flatbuffers, below.cpu_operators)
            else:
                waiting[name] = below
                kept = self._store.load_figures(cache_key(self._spec, below.delegates))
                if kept is None:
                    tasks.append((len(waiting) - 1, self._spec, below.delegates, *below.arrays(self._spec)))
                else:
                    self._costs[name] = estimate_cost(kept, below.flatbuffers, below.cpu_operators)
        order = list(waiting)
        for index, made in _compiled(tasks):
            below = waiting[order[index]]
            if isinstance(made, Figures):
                self._store.save_record(cache_key(self._spec, below.delegates), {"figures": vars(made)})
                self._costs[order[index]] = estimate_cost(made, below.flatbuffers, below.cpu_operators)
            else:
                self._costs[order[index]] = made
        return [self._costs[name] for name in names]

    @property
    def _spec(self) -> Any:
        """What Vela compiles for; None for other targets."""
        from arm_backend_core.targets.compile_spec import EthosUCompileSpec

        spec = self._any_spec
        return spec if isinstance(spec, EthosUCompileSpec) else None

    @property
    def _any_spec(self) -> Any:
        lowering = self.recipe.lowering_recipe
        assert lowering is not None
        partitioners: Any = lowering.partitioners
        return partitioners[0].compile_spec

    def _lowered(self, plan: PrecisionPlan) -> LoweredProgram | str:
        try:
            return self._quantized(plan).lower(self._any_spec.target)
        except (ArmBackendError, ExportError) as error:
            return str(error)

    def _quantized(self, plan: PrecisionPlan) -> QuantizedProgram:
        """What is asked for twice in a row, to be compiled and to be run, is made once."""
        if self._last is None or self._last[0] != plan:
            with _quietly():
                recipe: ExportRecipe = self.recipe.with_options(
                    precisions=minimal_settings(plan, self.default_precision),
                    calibration_samples=None,
                    require_runnable=False,
                )
                self._last = dict(plan), QuantizedProgram(self.program, self.split.calibration, recipe)
        return self._last[1]

    def _key(self, plan: Mapping[str, str], samples: str = "") -> str:
        text = json.dumps([self._content, samples, sorted(plan.items())])
        return hashlib.sha256(text.encode()).hexdigest()


def _compiled(tasks: Sequence[tuple[int, Any, Sequence[LoweredDelegate], Any]]) -> Iterator[tuple[int, Figures | str]]:
    """One by one in this process, as joblib's processes are dearer than a graph, or all in parallel."""
    if len(tasks) > 1:
        yield from in_parallel(compile_delegates, tasks)
        return
    for task in tasks:
        yield compile_delegates(*task)


@contextmanager
def _quietly() -> Iterator[None]:
    """Warnings about programs that nobody gets are dropped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _digest(program: ExportedProgram, recipe: ArmRecipe, calibration: Sequence[Inputs]) -> str:
    """By what ratings are kept: the model, the recipe, the samples, and what makes programs of them."""
    digest = hashlib.sha256(json.dumps(recipe.to_dict()).encode())
    for package in ("arm-recipes", "torch", "ethos-u-vela"):
        digest.update(version(package).encode())
    digest.update(str(program.graph).encode())
    _add(digest, [*program.state_dict.values(), *program.constants.values()])
    digest.update(_samples_digest(calibration).encode())
    return digest.hexdigest()


def _samples_digest(samples: Sequence[Inputs]) -> str:
    digest = hashlib.sha256()
    _add(digest, [(tuple(sample), sample.keywords) for sample in samples])
    return digest.hexdigest()


def _add(digest: Any, values: Any) -> None:
    for leaf in pytree.tree_leaves(values):
        digest.update(repr((leaf.dtype, leaf.shape) if isinstance(leaf, torch.Tensor) else leaf).encode())
        if isinstance(leaf, torch.Tensor):
            digest.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
