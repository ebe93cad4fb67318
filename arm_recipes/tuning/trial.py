"""Tries plans: quantizes, measures the error, compiles. What was tried is kept in a folder, by content."""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from arm_backend_core.errors import ArmBackendError
from arm_recipes.comparing.figures import Sums, added
from arm_recipes.messages import ExportError
from arm_recipes.sweeping.compiling import Unit, compile_units, key
from arm_recipes.sweeping.lowered import Lowered, Precision
from arm_recipes.sweeping.parallel import in_parallel
from arm_recipes.sweeping.result import Figures
from arm_recipes.tuning.price import Price, price
from arm_recipes.tuning.regions import Plan, told

if TYPE_CHECKING:
    from executorch.export import ExportRecipe

    from arm_recipes.recipe import ArmRecipe
    from arm_recipes.sample import Inputs
    from arm_recipes.sweeping.kept import Kept

Metric = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Rating:
    """How right a program is on the samples that did not calibrate it.

    Attributes:
        sqnr: against the model in floating point, dB.
        noise: power of the error over power of the signal.
        metric: mean of the user's metric; the SQNR where there is none.
    """

    sqnr: float
    noise: float
    metric: float

    @classmethod
    def read(cls, record: Mapping[str, Any] | None) -> Rating | None:
        """What was kept; None if that is nothing, or of another form."""
        names = ("sqnr", "noise", "metric")
        found = [value for name in names if isinstance(value := (record or {}).get(name), float)]
        return cls(*found) if len(found) == len(names) else None


class Trial:
    """Everything that plans of one model and recipe are tried with.

    Args:
        program: the model, captured.
        recipe: whose precisions are replaced.
        everywhere: the precision that it gives.
        calibration, held: samples, as the model takes them. ``given``: ``held`` as the user gave them.
        metric: ``metric(outputs, sample)``, the higher the better; None for the SQNR.
        kept: where ratings and figures are kept.
    """

    def __init__(
        self,
        program: ExportedProgram,
        recipe: ArmRecipe,
        everywhere: str,
        calibration: Sequence[Inputs],
        held: Sequence[Inputs],
        given: Sequence[Any],
        metric: Metric | None,
        kept: Kept,
    ) -> None:
        self.program, self.recipe, self.everywhere = program, recipe, everywhere
        self.calibration, self.held, self._given = list(calibration), list(held), list(given)
        self._metric, self._kept = metric, kept
        self._expected = self._outputs(program)
        self._content = _digest(program, recipe, [*self.calibration, *self.held])
        self._ratings: dict[str, Rating] = {}
        self._prices: dict[str, Price | str] = {}
        self._last: tuple[Plan, Precision] | None = None

    @property
    def metric(self) -> str:
        """What accuracy is."""
        return "SQNR in dB" if self._metric is None else str(getattr(self._metric, "__name__", "metric"))

    def floating(self) -> float | None:
        """The metric of the model in floating point; None for the SQNR, which is infinite."""
        return None if self._metric is None else self._mean(self._expected)

    def planned(self, plan: Mapping[str, str]) -> ArmRecipe:
        """The recipe with a plan."""
        return self.recipe.with_options(precisions=told(plan, self.everywhere))

    def rate(self, plan: Plan) -> Rating:
        """How right the quantized program is, in PyTorch: the program on the target differs by roundings.

        Raises:
            ExportError, ArmBackendError: it cannot be quantized so.
        """
        name = self._key(plan)
        if name not in self._ratings:
            found = Rating.read(self._kept.record(name)) if self._metric is None else None
            if found is None:
                found = self.rated(self._outputs(self._quantized(plan).program))
                self._kept.keep_record(name, vars(found))
            self._ratings[name] = found
        return self._ratings[name]

    def rated(self, outputs: list[Any]) -> Rating:
        """Outputs for the held-out samples, compared with the model's."""
        pairs = zip(pytree.tree_leaves(self._expected), pytree.tree_leaves(outputs), strict=True)
        sums = added(Sums.of(one.double(), other.double()) for one, other in pairs if isinstance(one, torch.Tensor))
        sqnr = sums.gap.sqnr
        noise = sums.noise / sums.signal if sums.signal else 0.0
        return Rating(sqnr, noise, sqnr if self._metric is None else self._mean(outputs))

    def price(self, plans: Iterable[Plan]) -> list[Price | str]:
        """What each plan's program costs, or why there is none; Vela compiles several at once."""
        given = list(plans)
        names = [self._key(plan) for plan in given]
        wanted = dict(zip(names, given, strict=True))
        waiting: dict[str, Lowered] = {}
        tasks = []
        for name in wanted:
            if name in self._prices:
                continue
            with _quietly():
                below = self._lowered(wanted[name])
            if isinstance(below, str):
                self._prices[name] = below
            elif self._spec is None:
                self._prices[name] = price(None, below.flatbuffers, below.cpu_operators)
            else:
                waiting[name] = below
                kept = self._kept.figures(key(self._spec, below.units))
                if kept is None:
                    tasks.append((len(waiting) - 1, self._spec, below.units, *below.flatbuffers))
                else:
                    self._prices[name] = price(kept, below.flatbuffers, below.cpu_operators)
        order = list(waiting)
        for index, made in _compiled(tasks):
            below = waiting[order[index]]
            if isinstance(made, Figures):
                self._kept.keep_record(key(self._spec, below.units), {"figures": vars(made)})
                self._prices[order[index]] = price(made, below.flatbuffers, below.cpu_operators)
            else:
                self._prices[order[index]] = made
        return [self._prices[name] for name in names]

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

    def _lowered(self, plan: Plan) -> Lowered | str:
        try:
            return self._quantized(plan).lowered(self._any_spec.target)
        except (ArmBackendError, ExportError) as error:
            return str(error)

    def _quantized(self, plan: Plan) -> Precision:
        """What is asked for twice in a row, to be compiled and to be run, is made once."""
        if self._last is None or self._last[0] != plan:
            with _quietly():
                recipe: ExportRecipe = self.recipe.with_options(
                    precisions=told(plan, self.everywhere), calibration=None, require_runnable=False
                )
                self._last = dict(plan), Precision(self.program, self.calibration, recipe)
        return self._last[1]

    def _outputs(self, program: ExportedProgram) -> list[Any]:
        model = copy.deepcopy(program).module(check_guards=False)  # of its own: it may write buffers
        with torch.no_grad():
            samples = map(copy.deepcopy, self.held)  # into which it may write too
            outputs = (model(*sample, **sample.keywords) for sample in samples)
            return [pytree.tree_map_only(torch.Tensor, torch.clone, output) for output in outputs]

    def _mean(self, outputs: Sequence[Any]) -> float:
        from arm_recipes.comparing.accuracy import by_metric

        assert self._metric is not None
        return by_metric(self._metric, outputs, outputs, self._given).program

    def _key(self, plan: Mapping[str, str]) -> str:
        text = json.dumps([self._content, sorted(plan.items())])
        return hashlib.sha256(text.encode()).hexdigest()


def _compiled(tasks: Sequence[tuple[int, Any, Sequence[Unit], Any]]) -> Iterator[tuple[int, Figures | str]]:
    """One by one in this process, as joblib's processes are dearer than a graph, or all in parallel."""
    if len(tasks) > 1:
        yield from in_parallel(compile_units, tasks)
        return
    for task in tasks:
        yield compile_units(*task)


@contextmanager
def _quietly() -> Iterator[None]:
    """Warnings about programs that nobody gets are dropped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _digest(program: ExportedProgram, recipe: ArmRecipe, samples: Sequence[Inputs]) -> str:
    """By what ratings are kept: the model, the recipe, the samples, and what makes programs of them."""
    digest = hashlib.sha256(json.dumps(recipe.to_dict()).encode())
    for package in ("arm-recipes", "torch", "ethos-u-vela"):
        digest.update(version(package).encode())
    digest.update(str(program.graph).encode())
    tensors: list[Any] = [*program.state_dict.values(), *program.constants.values()]
    for leaf in pytree.tree_leaves([tensors, [(tuple(sample), sample.keywords) for sample in samples]]):
        digest.update(repr((leaf.dtype, leaf.shape) if isinstance(leaf, torch.Tensor) else leaf).encode())
        if isinstance(leaf, torch.Tensor):
            digest.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
