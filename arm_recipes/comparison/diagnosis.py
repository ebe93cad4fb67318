"""Diagnosis of a quantized layer's error: the main cause, the remedy, and the SQNR expected without this cause.

The noise has three causes, which are measured separately: clipping, rounding and quantized weights. The main cause is
the one with the largest error. If it is rounding, and calibration chose a quantization range that is too wide, the
reported cause is "outliers" or "range" instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from arm_backend_core.quantization.diagnostics.error_metrics import IsolatedErrorSums, TensorQParams, decibels

#: A range is too wide if it is more than this many times as wide as the range of 99.9 % of the values.
_MAX_RANGE_RATIO = 4.0
#: If values exceed the calibrated range by more than this share of its width, the samples differ from the calibration
#: data.
_CALIBRATION_MARGIN = 0.1
#: SQNR in dB that int8 weights without outliers exceed. Normally distributed weights reach about 42 dB.
_GOOD_INT8_SQNR_DB = 38.0
#: Number of steps of a type: largest minus smallest integer.
_INT8_STEPS, _INT16_STEPS = 2**8 - 1, 2**16 - 1
#: Precisions with a smaller rounding error than int8: ``{precision: name of its arithmetic in messages}``.
PRECISION_TITLES = {"A16W8": "int16", "FP": "floating point"}
#: ``{precision: ratio}``: noise power of int8 rounding divided by the noise power of the precision. An int16 LSB is
#: 2**-8 int8 LSBs, so the ratio is 2**16.
_NOISE_RATIOS = {"A16W8": 2.0**16, "FP": math.inf}
#: Maximum number of modules that one advice names.
_MAX_NAMED_MODULES = 4
_BOUND_VALUES = "bound them in the model (clamp, ReLU6)"


@dataclass(frozen=True)
class QuantizedConstant:
    """A quantized constant.

    Attributes:
        name: parameter name in the program.
        levels: number of quantization levels.
        per_channel: whether each channel has its own scale.
        sqnr: SQNR of the constant itself, in dB.
    """

    name: str
    levels: int
    per_channel: bool
    sqnr: float


@dataclass(frozen=True)
class LayerAdvice:
    """The main cause of a layer's quantization error, and the remedy.

    Attributes:
        cause: "clipping", "outliers", "range", "rounding" or "weights". "range" means that calibration chose a wider
            range than these samples need.
        share: error of the cause, as a share of the sum of the errors by clipping, rounding and weights.
        text: measured figures and the remedy.
        sqnr: expected SQNR of the isolated layer in dB, computed from the measured noise powers. For "rounding" and
            "outliers", it assumes ``higher_precision``; for "range", the range of the samples; for "clipping" and
            "weights", that this error is 0.
        precision: precision that the remedy recommends for modules, a value of the recipe option ``precisions``; "" if
            the remedy recommends none.
    """

    cause: str
    share: float
    text: str
    sqnr: float
    precision: str = ""


@dataclass(frozen=True)
class LayerDiagnosis:
    """Measurements of a quantized layer, from which its advice follows.

    Attributes:
        errors: error of the isolated layer, summed over the samples.
        qparams: quantization parameters of the result.
        has_fixed_qparams: whether the operator determines ``qparams``, regardless of calibration.
        calibrated_range: smallest and largest value in calibration; None if unknown.
        weights: quantized constants that the layer reads.
        consumers: submodules that consume the result. Their precision decides the precision of the result.
        higher_precision: precision above int8 that the advice suggests, see ``recipe.precisions.higher_precision``.
    """

    errors: IsolatedErrorSums
    qparams: TensorQParams
    has_fixed_qparams: bool
    calibrated_range: tuple[float, float] | None
    weights: tuple[QuantizedConstant, ...]
    consumers: tuple[str, ...]
    higher_precision: str

    @property
    def advice(self) -> LayerAdvice:
        """The main cause of the error, and the remedy."""
        errors = self.errors
        parts = {"clipping": errors.clipping, "rounding": errors.rounding, "weights": errors.weights}
        total = sum(parts.values()) or 1.0
        cause = max(parts, key=lambda name: parts[name])
        share = parts[cause] / total
        rest = errors.noise * (1 - share)
        if cause == "clipping":
            return self._create_advice(cause, share, self._clipping_advice(), rest)
        if cause == "weights":
            return self._create_advice(cause, share, self._weights_advice(), rest)
        kind, text = self._rounding_advice()
        ratio = (self._range_width / self._used_width) ** 2 if kind == "range" else _NOISE_RATIOS[self.higher_precision]
        return self._create_advice(kind, share, text, rest + errors.rounding / ratio)

    def _create_advice(self, cause: str, share: float, text: str, noise: float) -> LayerAdvice:
        """Create the advice, with the expected SQNR and the precision that the text recommends.

        Args:
            cause: the main cause of the error.
            share: error of the cause, as in ``LayerAdvice.share``.
            text: figures and remedy.
            noise: noise power after the remedy.
        """
        precision = self.higher_precision if text.endswith(self._precision_advice()) else ""
        return LayerAdvice(cause, share, text, decibels(self.errors.signal, noise), precision)

    @property
    def _range_width(self) -> float:
        low, high = self.qparams.bounds
        return high - low

    @property
    def _used_width(self) -> float:
        """Width of the interval that contains the samples' values and zero, clipped to the range; at least one LSB."""
        low, high = self.qparams.bounds
        used = min(max(self.errors.high, 0.0), high) - max(min(self.errors.low, 0.0), low)
        return max(used, self.qparams.scale)

    def _clipping_advice(self) -> str:
        errors, (low, high) = self.errors, self.qparams.bounds
        text = (
            f"{100 * errors.clipped / max(errors.count, 1):.2g} % of the values are clipped: they reach from "
            f"{errors.low:.4g} to {errors.high:.4g}, and the quantized range is {low:.4g} to {high:.4g}"
        )
        expected = self.calibrated_range or (low, high)
        margin = _CALIBRATION_MARGIN * (expected[1] - expected[0])
        if errors.low < expected[0] - margin or errors.high > expected[1] + margin:
            note = "" if self.calibrated_range is None else f" (calibration saw {expected[0]:.4g} to {expected[1]:.4g})"
            return f"{text}{note}: calibrate with samples like these, get_recipe(..., calibration_samples=samples)"
        return (
            f"{text}; 99.9 % are within {errors.p999:.4g}, and calibration clips such outliers to minimize the total "
            f"error: {_BOUND_VALUES}, or {self._precision_advice()}"
        )

    def _rounding_advice(self) -> tuple[str, str]:
        """Return the cause and the advice."""
        errors, qparams, (low, high) = self.errors, self.qparams, self.qparams.bounds
        if qparams.steps > _INT8_STEPS:
            return "rounding", f"an LSB of {qparams.scale:.3g} is too coarse, and the tensor is int16 already"
        p999_width = min(high, errors.p999) + min(-low, errors.p999)
        if not errors.p999 or self._range_width / max(p999_width, qparams.scale) <= _MAX_RANGE_RATIO:
            return (
                "rounding",
                f"the values fill the range, but {qparams.steps + 1} levels are too few: {self._precision_advice()}",
            )
        levels = f"so that they use about {max(round(p999_width / qparams.scale), 1)} of {qparams.steps + 1} levels"
        bulk = f"99.9 % of the values are within {errors.p999:.4g}"
        if self.has_fixed_qparams:
            return (
                "rounding",
                f"{bulk}, and the operator's range is {low:.4g} to {high:.4g}, {levels}: {self._precision_advice()}",
            )
        if self._range_width / self._used_width > _MAX_RANGE_RATIO:
            return "range", (
                f"{bulk}, and calibration set the range {low:.4g} to {high:.4g}, {levels}: calibrate with samples like "
                "these, get_recipe(..., calibration_samples=samples)"
            )
        return "outliers", (
            f"outliers widen the range: {bulk}, and the range is {low:.4g} to {high:.4g}, {levels}: {_BOUND_VALUES}, "
            f"or {self._precision_advice()}"
        )

    def _weights_advice(self) -> str:
        weights = [weight for weight in self.weights if weight.levels - 1 <= _INT16_STEPS]  # biases are int32
        if not weights:
            return "the rounding of its constants dominates"
        worst = min(weights, key=lambda weight: weight.sqnr)
        text = f"'{worst.name}' has an SQNR of {worst.sqnr:.1f} dB"
        if worst.levels < _INT8_STEPS:
            return f"{text} with {worst.levels} levels: use a recipe with int8 weights in place of A8W4"
        if not worst.per_channel:
            return f"{text} with one scale for all channels: use get_recipe(..., per_channel=True)"
        if worst.sqnr > _GOOD_INT8_SQNR_DB:
            return f"{text}, typical of int8 weights that fill the range; if that is too little, use prepare_qat"
        return f"{text} with one scale per channel, widened by a few large weights: bound them in training"

    def _precision_advice(self) -> str:
        named = " and ".join(f"'{module}'" for module in self.consumers)
        is_named = 0 < len(self.consumers) <= _MAX_NAMED_MODULES
        if self.higher_precision == "FP":
            consumers = f"the consumers of this result, {named}," if is_named else "the modules that read it"
            return f"keep {consumers} in floating point"
        where = f" for the consumers of this result, {named}, or" if is_named else ""
        title, precision = PRECISION_TITLES[self.higher_precision], self.higher_precision
        return f"use {title}{where} for the whole model by an {precision} recipe"
