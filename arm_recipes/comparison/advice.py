"""What could be done about a layer that loses much, from what was measured of it."""

from __future__ import annotations

from dataclasses import dataclass

from arm_backend_core.quantization.diagnostics.error_metrics import Grid, Losses, decibels

#: A range that is this many times as wide as what 99.9 % of the values need is too wide.
_STRETCHED = 4.0
#: Values this far beyond what calibration saw, as a part of that, are others than those that it saw.
_BEYOND = 0.1
#: SQNR of weights of int8 that have no outliers, for a normal distribution about 42 dB.
_GOOD = 38.0
#: Integers of a type, less one. int16 has 256 steps for each of int8: errors of 2**-8, squares of 2**-16.
_INT8, _INT16, _FINER = 2**8 - 1, 2**16 - 1, 2.0**16
#: Modules that are named in an advice.
_FEW = 4
_BOUND = "bound them in the model (clamp, ReLU6)"


@dataclass(frozen=True)
class QuantizedConstant:
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
class LayerAdvice:
    """The main cause of a layer's loss, and what helps.

    Attributes:
        cause: "clipping", "outliers", "range" (wider than the samples need), "rounding" or "weights".
        share: of the loss that is the cause's.
        text: the facts, and what to do.
        sqnr: of the layer by itself, if the cause were gone; computed from what was measured.
    """

    cause: str
    share: float
    text: str
    sqnr: float


@dataclass(frozen=True)
class LayerDiagnosis:
    """What is known of a quantized layer.

    Attributes:
        losses: what it loses by itself, on samples.
        grid: of its result; ``is_fixed``: it is that of the operator, whatever calibration saw.
        calibrated_range: the least and the largest value that calibration saw, if that is known.
        weights: constants that it reads.
        readers: submodules that compute with it: it is as fine as they take it.
    """

    losses: Losses
    grid: Grid
    is_fixed: bool
    calibrated_range: tuple[float, float] | None
    weights: tuple[QuantizedConstant, ...]
    readers: tuple[str, ...]

    @property
    def advice(self) -> LayerAdvice:
        """The main cause of the loss, and what helps."""
        losses = self.losses
        parts = {"clipping": losses.clipping, "rounding": losses.rounding, "weights": losses.weights}
        total = sum(parts.values()) or 1.0
        cause = max(parts, key=lambda name: parts[name])
        share = parts[cause] / total
        rest = losses.noise * (1 - share)
        if cause == "clipping":
            return LayerAdvice(cause, share, self._clipping_advice(), decibels(losses.signal, rest))
        if cause == "weights":
            return LayerAdvice(cause, share, self._weights_advice(), decibels(losses.signal, rest))
        kind, text = self._rounding_advice()
        finer = _FINER if kind != "range" else (self._range_width / self._used_width) ** 2
        return LayerAdvice(kind, share, text, decibels(losses.signal, rest + losses.rounding / finer))

    @property
    def _range_width(self) -> float:
        low, high = self.grid.bounds
        return high - low

    @property
    def _used_width(self) -> float:
        """The part of the range that the samples' values are in, 0 included."""
        low, high = self.grid.bounds
        used = min(max(self.losses.high, 0.0), high) - max(min(self.losses.low, 0.0), low)
        return max(used, self.grid.scale)

    def _clipping_advice(self) -> str:
        losses, (low, high) = self.losses, self.grid.bounds
        text = (
            f"{100 * losses.clipped / max(losses.count, 1):.2g} % of the values are clipped: they reach from "
            f"{losses.low:.4g} to {losses.high:.4g}, the program has a range from {low:.4g} to {high:.4g}"
        )
        seen = self.calibrated_range or (low, high)
        margin = _BEYOND * (seen[1] - seen[0])
        if losses.low < seen[0] - margin or losses.high > seen[1] + margin:
            known = "" if self.calibrated_range is None else f" (calibration saw {seen[0]:.4g} to {seen[1]:.4g})"
            return f"{text}{known}: calibrate with samples like these, get_recipe(..., calibration_samples=samples)"
        return (
            f"{text}; 99.9 % are within {losses.usual:.4g}, and calibration leaves such outliers out, as it errs least "
            f"so: {_BOUND}, or {self._int16_advice()}"
        )

    def _rounding_advice(self) -> tuple[str, str]:
        """The cause, and the advice."""
        losses, grid, (low, high) = self.losses, self.grid, self.grid.bounds
        if grid.steps > _INT8:
            return "rounding", f"steps of {grid.scale:.3g} are too coarse, and it has int16 already"
        usual = min(high, losses.usual) + min(-low, losses.usual)
        if not losses.usual or self._range_width / max(usual, grid.scale) <= _STRETCHED:
            return "rounding", f"its values fill the range, and {grid.steps + 1} steps give no more: {self._int16_advice()}"
        steps = f"so that they have about {max(round(usual / grid.scale), 1)} of {grid.steps + 1} steps"
        most = f"99.9 % of the values are within {losses.usual:.4g}"
        if self.is_fixed:
            return "rounding", f"{most}, and the operator's range is {low:.4g} to {high:.4g}, {steps}: {self._int16_advice()}"
        if self._range_width / self._used_width > _STRETCHED:
            return "range", (
                f"{most}, and calibration made the range {low:.4g} to {high:.4g}, {steps}: calibrate with samples like "
                "these, get_recipe(..., calibration_samples=samples)"
            )
        return "outliers", (
            f"outliers stretch the range: {most}, and it is {low:.4g} to {high:.4g}, {steps}: {_BOUND}, or "
            f"{self._int16_advice()}"
        )

    def _weights_advice(self) -> str:
        narrow = [weight for weight in self.weights if weight.levels - 1 <= _INT16]  # biases are int32
        if not narrow:
            return "its constants are rounded"
        worst = min(narrow, key=lambda weight: weight.sqnr)
        text = f"'{worst.name}' has {worst.sqnr:.1f} dB"
        if worst.levels < _INT8:
            return f"{text} with {worst.levels} levels: a recipe with weights of int8 in place of A8W4"
        if not worst.per_channel:
            return f"{text} with one scale for all channels: get_recipe(..., per_channel=True)"
        if worst.sqnr > _GOOD:
            return f"{text}, as int8 has for weights that fill it; if that is too little, train with quantization"
        return f"{text} with a scale for each channel, which a few large weights stretch: bound them in training"

    def _int16_advice(self) -> str:
        named = " and ".join(f"'{module}'" for module in self.readers)
        where = f" for what reads it, {named}, or" if 0 < len(self.readers) <= _FEW else ""
        return f"int16{where} by a recipe A16W8"
