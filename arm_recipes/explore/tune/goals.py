"""What a search is to reach: prices that may not be exceeded, and accuracy that has to be there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arm_recipes._internal.rendering import format_bytes
from arm_recipes.explore.tune.cost import PRICES, Price
from arm_recipes.recipe import options

#: What a program may cost, relative to the recipe's own, where nothing is said.
_USUAL = 1.1


@dataclass(frozen=True)
class Limit:
    """The most that a program may cost.

    Attributes:
        price: which, of ``PRICES``.
        most: cycles or bytes.
    """

    price: str
    most: float

    def __str__(self) -> str:
        most = f"{self.most:,.0f}" if self.price == "cycles" else format_bytes(int(self.most))
        return f"{self.price} at most {most}"


@dataclass(frozen=True)
class Goal:
    """What is looked for: the most exact program within the limits; with ``least``, the cheapest that is so exact.

    Attributes:
        limits: none where accuracy alone is asked for.
        least: accuracy that is asked for, by the metric.
        metric: its name.
    """

    limits: tuple[Limit, ...]
    least: float | None
    metric: str

    def affordable(self, price: Price) -> bool:
        """Whether no limit is exceeded."""
        return all(price.of(limit.price) <= limit.most for limit in self.limits)

    def exact(self, accuracy: float) -> bool:
        """Whether the accuracy is what was asked for."""
        return self.least is None or accuracy >= self.least

    def __str__(self) -> str:
        wanted = [] if self.least is None else [f"{self.metric} at least {self.least:.4g}"]
        return ", ".join([*wanted, *map(str, self.limits)])


def check(budget: Any, at_least: Any, within: Any) -> None:
    """Find arguments that are no goal, before anything is compiled.

    Raises:
        ValueError: one is not what ``tune`` takes.
    """
    if budget is not None:
        if not isinstance(budget, Mapping) or not budget:
            raise ValueError(f"budget: {budget!r} is no dict with limits, such as {{'cycles': 1.1}}")
        for name, value in budget.items():
            if name not in PRICES:
                raise ValueError(f"budget: there is no price {name!r} (allowed: {', '.join(PRICES)})")
            _most(name, value, None)
    for argument, value in (("min_metric", at_least), ("max_drop", within)):
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if value is not None and not number:
            raise ValueError(f"{argument}: {value!r} is no number")
    if at_least is not None and within is not None:
        raise ValueError("min_metric and max_drop: give one of them")


def goal(
    budget: Mapping[str, Any] | None,
    at_least: float | None,
    within: float | None,
    *,
    base: Price,
    floating: float | None,
    metric: str,
) -> Goal:
    """The goal that checked arguments stand for.

    Args:
        base: what the recipe's own program costs.
        floating: the metric of the model in floating point.

    Raises:
        ValueError: the target has no such price, or the metric has no value in floating point.
    """
    given = budget
    if given is None:
        given = {} if at_least is not None or within is not None else {base.main: _USUAL}
    for name in given:
        if base.get(name) is None:
            raise ValueError(
                f"budget: {name!r} is estimated for Ethos-U alone; this target has: {', '.join(base.known)}"
            )
    if within is not None:
        if floating is None:
            raise ValueError("max_drop: the SQNR of the model in floating point is infinite; give min_metric")
        at_least = floating - within
    limits = tuple(Limit(name, _most(name, value, base.of(name))) for name, value in given.items())
    return Goal(limits, at_least, metric)


def _most(name: str, value: Any, base: float | None) -> float:
    """A real number is relative to the recipe's own program, an int or a text is absolute."""
    if isinstance(value, float):
        if not value > 0:
            raise ValueError(f"budget: {name} must be positive, not {value!r}")
        return value * (base or 0)
    if name == "cycles":
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ValueError(f"budget: cycles must be a number of them (int), or a factor such as 1.1; got {value!r}")
        return value
    try:
        return options.parse_bytes(value)
    except ValueError as error:
        raise ValueError(
            f"budget: {name} must be bytes, a text such as '512KiB', or a factor; got {value!r}: {error}"
        ) from None
