"""What could be done about a layer that loses much, from what was measured of it."""

from __future__ import annotations

from dataclasses import dataclass

from arm_recipes.comparing.figures import Grid, Losses, decibels

#: A range that is this many times as wide as what 99.9 % of the values need is that of a few outliers.
_STRETCHED = 4.0
#: SQNR of weights of int8 that have no outliers, for a normal distribution about 42 dB.
_USUAL = 38.0
#: int16 has 256 steps for each of int8: errors of 2**-8, squares of 2**-16.
_INT16, _FINER = 2**16, 2.0**16


@dataclass(frozen=True)
class Weights:
    """A quantized constant.

    Attributes:
        name: as the program has it.
        levels: how many integers it may have.
        per_channel: each channel has a scale of its own.
        sqnr: of the constant itself.
    """

    name: str
    levels: int
    per_channel: bool
    sqnr: float


@dataclass(frozen=True)
class Advice:
    """The main cause of a layer's loss, and what helps.

    Attributes:
        cause: "clipping", "outliers", "rounding" or "weights".
        share: of the loss that is the cause's.
        text: the facts, and what to do.
        sqnr: of the layer by itself, if the cause were gone; computed from what was measured.
    """

    cause: str
    share: float
    text: str
    sqnr: float


def advice(
    losses: Losses, grid: Grid, seen: tuple[float, float] | None, weights: tuple[Weights, ...], module: str
) -> Advice:
    """For one layer.

    Args:
        seen: the least and the largest value that calibration saw.
    """
    parts = {"clipping": losses.clipping, "rounding": losses.rounding, "weights": losses.weights}
    total = sum(parts.values())
    cause = max(parts, key=lambda name: parts[name])
    rest = losses.noise * (1 - parts[cause] / total) if total else 0.0
    share = parts[cause] / total if total else 0.0
    if cause == "clipping":
        return Advice(cause, share, _clipping(losses, grid, seen, module), decibels(losses.signal, rest))
    if cause == "weights":
        return Advice(cause, share, _weights(weights, module), decibels(losses.signal, rest))
    sqnr = decibels(losses.signal, rest + losses.rounding / _FINER)
    text, stretched = _rounding(losses, grid, module)
    return Advice("outliers" if stretched else cause, share, text, sqnr)


def _clipping(losses: Losses, grid: Grid, seen: tuple[float, float] | None, module: str) -> str:
    low, high = grid.bounds
    text = (
        f"{_percent(losses.clipped, losses.count)} of the values are clipped: they reach from {losses.low:.4g} to "
        f"{losses.high:.4g}, the program has a range from {low:.4g} to {high:.4g}"
    )
    beyond = seen is None or losses.low < seen[0] or losses.high > seen[1]
    if beyond:
        known = "" if seen is None else f" (calibration saw {seen[0]:.4g} to {seen[1]:.4g})"
        return f"{text}{known}: calibrate with samples like these, get_recipe(..., calibration=samples)"
    return (
        f"{text}; 99.9 % are within {losses.usual:.4g}, and calibration leaves such outliers out, as it errs least so: "
        f"bound them in the model (clamp, ReLU6), or {_wider(module)}"
    )


def _rounding(losses: Losses, grid: Grid, module: str) -> tuple[str, bool]:
    """The advice, and whether outliers are the reason."""
    low, high = grid.bounds
    reach = max(-low, high)
    if grid.steps > 255:
        return f"steps of {grid.scale:.3g} are too coarse, and it has int16 already: scale the model's values", False
    if losses.usual and reach / losses.usual > _STRETCHED:
        used = max(round(2 * losses.usual / grid.scale), 1)
        return (
            f"outliers stretch the range: 99.9 % of the values are within {losses.usual:.4g}, and the range reaches to "
            f"{reach:.4g}, so that they have about {used} of {grid.steps + 1} steps: bound them in the model (clamp, "
            f"ReLU6), or {_wider(module)}"
        ), True
    return f"its values fill the range, and {grid.steps + 1} steps give no more: {_wider(module)}", False


def _weights(weights: tuple[Weights, ...], module: str) -> str:
    narrow = [weight for weight in weights if weight.levels <= _INT16]  # biases are int32
    if not narrow:
        return "its constants are rounded"
    worst = min(narrow, key=lambda weight: weight.sqnr)
    text = f"'{worst.name}' has {worst.sqnr:.1f} dB"
    if worst.levels < 255:
        return f"{text} with {worst.levels} levels: a recipe with weights of int8 in place of A8W4"
    if not worst.per_channel:
        return f"{text} with one scale for all channels: get_recipe(..., per_channel=True)"
    if worst.sqnr > _USUAL:
        return f"{text}, as int8 has for weights that fill it: train the model with quantization, if that is too little"
    return f"{text} with a scale for each channel, which a few large weights stretch: bound them in training"


def _wider(module: str) -> str:
    where = f" for '{module}' alone, or" if module else ""
    return f"int16{where} by a recipe A16W8"


def _percent(part: int, of: int) -> str:
    return f"{100 * part / max(of, 1):.2g} %"
