"""Goal of a precision search: cost limits and a minimum accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arm_recipes._internal.rendering import format_bytes
from arm_recipes.explore.tune.cost import COST_KINDS, ProgramCost
from arm_recipes.recipe import options

#: Default budget, as a factor of the cycles of the recipe's own program (of its traffic if cycles are unknown).
_DEFAULT_LIMIT_FACTOR = 1.1


@dataclass(frozen=True)
class Limit:
    """An upper limit for one kind of cost.

    Attributes:
        kind: kind of cost, one of ``COST_KINDS``.
        maximum: limit in cycles or bytes.
    """

    kind: str
    maximum: float

    def __str__(self) -> str:
        maximum = f"{self.maximum:,.0f}" if self.kind == "cycles" else format_bytes(int(self.maximum))
        return f"{self.kind} at most {maximum}"


@dataclass(frozen=True)
class Goal:
    """Goal of a search: the most accurate program within limits; with ``min_accuracy``, the cheapest that reaches it.

    Attributes:
        limits: cost limits; empty if only accuracy is required.
        min_accuracy: required value of the metric; None if there is no requirement.
        metric: name of the metric.
    """

    limits: tuple[Limit, ...]
    min_accuracy: float | None
    metric: str

    def is_within_limits(self, cost: ProgramCost) -> bool:
        """Whether a cost exceeds no limit."""
        return all(cost.value(limit.kind) <= limit.maximum for limit in self.limits)

    def is_accurate_enough(self, accuracy: float) -> bool:
        """Whether an accuracy reaches ``min_accuracy``; true if no accuracy is required."""
        return self.min_accuracy is None or accuracy >= self.min_accuracy

    def __str__(self) -> str:
        wanted = [] if self.min_accuracy is None else [f"{self.metric} at least {self.min_accuracy:.4g}"]
        return ", ".join([*wanted, *map(str, self.limits)])


def check_goal(budget: Any, min_metric: Any, max_drop: Any) -> None:
    """Validate the arguments of ``tune`` that describe the goal.

    Raises:
        ValueError: an argument is invalid.
    """
    if budget is not None:
        if not isinstance(budget, Mapping) or not budget:
            raise ValueError(f"budget: {budget!r} is not a dict of limits such as {{'cycles': 1.1}}")
        for name, value in budget.items():
            if name not in COST_KINDS:
                raise ValueError(f"budget: unknown kind of cost {name!r} (allowed: {', '.join(COST_KINDS)})")
            _absolute_limit(name, value, None)
    for argument, value in (("min_metric", min_metric), ("max_drop", max_drop)):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if value is not None and not is_number:
            raise ValueError(f"{argument}: {value!r} is not a finite number")
    if min_metric is not None and max_drop is not None:
        raise ValueError("min_metric and max_drop: give only one of them")


def make_goal(
    budget: Mapping[str, Any] | None,
    min_metric: float | None,
    max_drop: float | None,
    *,
    base: ProgramCost,
    float_metric: float | None,
    metric: str,
) -> Goal:
    """Create the goal from validated arguments.

    Args:
        budget, min_metric, max_drop: as for ``tune``.
        base: cost of the recipe's own program.
        float_metric: value of the metric for the floating-point model; None if the metric is the SQNR.
        metric: name of the metric.

    Raises:
        ValueError: ``budget`` limits a cost that is not estimated for the target, or ``max_drop`` is set although the
            metric is the SQNR.
    """
    limits_by_kind = budget
    if limits_by_kind is None:
        limits_by_kind = (
            {} if min_metric is not None or max_drop is not None else {base.time_kind: _DEFAULT_LIMIT_FACTOR}
        )
    for name in limits_by_kind:
        if base.get(name) is None:
            raise ValueError(
                f"budget: {name!r} is estimated for Ethos-U and Cortex-M only; this target has: "
                f"{', '.join(base.available)}"
            )
    if max_drop is not None:
        if float_metric is None:
            raise ValueError("max_drop: the SQNR of the floating-point model is infinite; use min_metric")
        min_metric = float_metric - max_drop
    limits = tuple(
        Limit(name, _absolute_limit(name, value, base.value(name))) for name, value in limits_by_kind.items()
    )
    return Goal(limits, min_metric, metric)


def _absolute_limit(name: str, value: Any, base: float | None) -> float:
    """Convert a limit to cycles or bytes. A float is a factor of the cost ``base``; an int or a text is absolute."""
    if isinstance(value, float):
        if not 0 < value < math.inf:
            raise ValueError(f"budget: {name} must be positive and finite, not {value!r}")
        return value * (base or 0)
    if name == "cycles":
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ValueError(f"budget: cycles must be an int, or a float factor such as 1.1; got {value!r}")
        return value
    try:
        return options.parse_bytes(value)
    except ValueError as error:
        raise ValueError(
            f"budget: {name} must be bytes (int), a text such as '512KiB', or a float factor; got {value!r}: {error}"
        ) from None
