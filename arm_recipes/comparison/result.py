"""Result of ``compare``: error metrics of outputs and layers and task accuracy, as data, text and HTML."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from arm_backend_core.format_count import format_count
from arm_backend_core.quantization.diagnostics.error_metrics import ErrorMetrics
from arm_recipes._internal.rendering import Renderable, Section, to_jsonable
from arm_recipes.comparison.accuracy import Accuracy
from arm_recipes.comparison.diagnosis import PRECISION_TITLES, LayerAdvice, QuantizedConstant

#: SQNR in dB. No measured classifier with at least this SQNR lost more than 0.2 percentage points of accuracy
#: (``docs/users/accuracy.md``).
_HARMLESS_SQNR_DB = 30.0
#: Maximum number of layers with advice in the printed comparison.
WORST_COUNT = 5
#: Maximum number of layers in the table of the printed comparison.
_MAX_LAYERS = 16
#: SQNR in dB at the level of float32 rounding. A layer that reaches it needs no improvement.
_EXACT_SQNR_DB = 120.0


@dataclass(frozen=True)
class OutputComparison:
    """Error of one output of the program against the reference.

    Attributes:
        name: name of the output.
        gap: error metrics; None if the output is not a tensor. Also None for the new value of a mutated input if no
            interpreter plan can represent the captured program: the reference value is then unknown.
    """

    name: str
    gap: ErrorMetrics | None


@dataclass(frozen=True)
class IsolatedError:
    """Quantization error of an isolated layer: floating-point inputs, quantized weights, quantized result.

    Attributes:
        sqnr: SQNR in dB.
        max_error: largest absolute error.
        clipped: share of the values outside the quantized range.
        range: smallest and largest value that the quantized tensor of the program can represent.
        values: smallest and largest value of the layer's floating-point result over the samples.
        calibrated: smallest and largest value in calibration; None if unknown.
        p999: 99.9th percentile of the absolute values of this result in one sample, maximum over the samples.
        output: SQNR in dB of the first floating-point output with only this layer quantized, measured with the first 4
            samples; None if the layer is not one of the five with the lowest isolated SQNR, if the model has state, or
            if it has no floating-point output.
        advice: main cause of the error and the remedy.
    """

    sqnr: float
    max_error: float
    clipped: float
    range: tuple[float, float]
    values: tuple[float, float]
    calibrated: tuple[float, float] | None
    p999: float
    output: float | None
    advice: LayerAdvice


@dataclass(frozen=True)
class LayerComparison:
    """Error of one intermediate tensor of the program against the reference.

    Attributes:
        name: node of the captured program that computes the tensor. A tensor that is quantized twice appears twice.
        operator, module, source: ATen operator, path of its submodule, and source line in the model. For a fused layer
            (an operator with weights and its activation), ``operator`` names both operators, and ``module`` and
            ``source`` are those of the operator with weights.
        dtype: dtype in the program.
        scale, zero_point: quantization parameters; None if not quantized.
        moves: whether the operator only moves or selects values, which adds no error.
        value_source: "program" if the delegate computed the value; "PyTorch" if PyTorch computed it from other values
            of the program. PyTorch computes the results of operators on the CPU, and of layers whose delegate does not
            provide intermediate results.
        gap: error in the whole program, including the errors of preceding layers.
        isolated: error of the isolated layer; None if the layer is not quantized or only moves values, and in
            comparisons of two programs.
        weights: quantized constants that the layer reads.
    """

    name: str
    operator: str
    module: str
    source: str
    dtype: str
    scale: float | None
    zero_point: int | None
    moves: bool
    value_source: str
    gap: ErrorMetrics
    isolated: IsolatedError | None = None
    weights: tuple[QuantizedConstant, ...] = ()


@dataclass(frozen=True)
class Comparison(Renderable):
    """Comparison of a program with the floating-point model or with another program.

    ``to_dict()`` represents infinity as "Infinity".

    Attributes:
        program, reference: names of the program and of its reference.
        method: method that was run.
        samples: number of samples.
        layer_samples: number of samples for which layers were compared.
        outputs: outputs in program order.
        layers: layers in program order. If layers are compared for all samples, the layer that computes an output has
            the same error metrics as the output.
        accuracy: task accuracy; None without labels and metric.
        seconds: duration of the comparison.
        notes: notes for the user, one sentence each.
    """

    program: str
    reference: str
    method: str
    samples: int
    layer_samples: int
    outputs: tuple[OutputComparison, ...]
    layers: tuple[LayerComparison, ...]
    accuracy: Accuracy | None
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def sqnr(self) -> float:
        """SQNR in dB of the first output with error metrics; NaN without one."""
        return next((output.gap.sqnr for output in self.outputs if output.gap is not None), math.nan)

    @property
    def worst(self) -> tuple[LayerComparison, ...]:
        """Up to five layers with the lowest SQNR below 120 dB, the worst first.

        Layers are ranked by their isolated SQNR. If no isolated SQNR is below 120 dB, they are ranked by their SQNR in
        the whole program.
        """
        return self._rank_worst()[0]

    def _rank_worst(self) -> tuple[tuple[LayerComparison, ...], bool]:
        """Return the worst layers, and whether they are ranked by isolated SQNR."""
        isolated = [(layer.isolated.sqnr, layer) for layer in self.layers if layer.isolated is not None]
        in_program = [(layer.gap.sqnr, layer) for layer in self.layers]
        for ranked in (isolated, in_program):
            improvable = [pair for pair in ranked if not pair[0] >= _EXACT_SQNR_DB]
            if improvable:
                improvable.sort(key=lambda pair: _sort_key(pair[0]))
                return tuple(layer for _, layer in improvable[:WORST_COUNT]), ranked is isolated
        return (), False

    def frame(self) -> Any:
        """Return a ``pandas.DataFrame`` with a row per layer; a list of dicts if pandas is not installed."""
        rows = [_frame_row(layer) for layer in self.layers]
        try:
            import pandas
        except ImportError:
            return rows
        return pandas.DataFrame(rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as dicts, lists, str and numbers, ready for JSON."""
        return super().to_dict() | {"sqnr": to_jsonable(self.sqnr), "worst": [layer.name for layer in self.worst]}

    def sections(self) -> Iterator[Section]:
        """Yield headings with their rows, for text and HTML."""
        rows: list[tuple[str, ...]] = [("", "SQNR", "cosine", "max error")]
        rows += [(output.name, *_gap_cells(output.gap)) for output in self.outputs if output.gap is not None]
        duration = f"{format_count(self.samples, 'sample')} in {self.seconds:.1f} s"
        yield f"{self.program} against {self.reference}: '{self.method}', {duration}", rows
        if self.accuracy is not None:
            yield "Accuracy", self.accuracy.rows(self.reference)
        if self.layers:
            yield from self._layer_sections()
        if notes := [*self.notes, *self._precision_notes()]:
            yield "Notes", [(note,) for note in notes]

    def _precision_notes(self) -> Iterator[str]:
        """Yield notes on how to select the precisions that the advice names, and on whether they are needed."""
        named = [layer.isolated.advice.precision for layer in self.worst if layer.isolated is not None]
        precisions = dict.fromkeys(filter(None, named))
        for precision in precisions:
            option = f"get_recipe(..., precisions={{'module': '{precision}'}})"
            yield f"{PRECISION_TITLES[precision]} for one module: {option}; tune() chooses modules within a budget"
        lowest = min((output.gap.sqnr for output in self.outputs if output.gap is not None), default=0.0)
        if precisions and self.accuracy is None and lowest >= _HARMLESS_SQNR_DB:
            yield (
                f"an SQNR of {lowest:.1f} dB rarely changes the result of a task: measure it with labels= or metric= "
                "before you choose a higher precision"
            )

    def _layer_sections(self) -> Iterator[Section]:
        has_isolated = any(layer.isolated is not None for layer in self.layers)
        worst, is_isolated = self._rank_worst()
        criterion = "the lowest isolated SQNR" if is_isolated else "the lowest SQNR"
        rows: list[tuple[str, ...]] = [("isolated", "output", "", "", "") if is_isolated else ("", "", "", "")]
        for layer in worst:
            cells = (
                (_format_decibels(layer.isolated.sqnr), _format_output(layer.isolated))
                if is_isolated and layer.isolated
                else (_format_decibels(layer.gap.sqnr),)
            )
            rows.append((*cells, *_layer_cells(layer), _format_advice(layer) if is_isolated else layer.source))
        if worst:
            columns = "isolated = SQNR of its result, output = SQNR of the model's output"
            yield f"Layers with {criterion}{f' (only this layer quantized: {columns})' * is_isolated}", rows
        selected = _select_layers(self.layers)
        isolated_head = ("isolated",) if has_isolated else ()
        table = [("", "operator", "type", *isolated_head, "SQNR", "cosine", "max error", "value source")]
        for layer in selected:
            isolated_cells = (_format_decibels(layer.isolated.sqnr) if layer.isolated else "",) if has_isolated else ()
            table.append(
                (*_layer_cells(layer), layer.dtype, *isolated_cells, *_gap_cells(layer.gap), layer.value_source)
            )
        listed = "" if len(selected) == len(self.layers) else f", {len(selected)} listed; frame() has all"
        sample_count = "" if self.layer_samples == self.samples else f", {self.layer_samples} samples"
        yield f"Layers in the whole program: {len(self.layers)}{sample_count}{listed}", table


def _select_layers(layers: tuple[LayerComparison, ...]) -> list[LayerComparison]:
    """Select at most 16 layers to list.

    Of more than 16 layers, those that only move data are skipped, except for the last layer. If still more than 16
    remain, evenly spaced layers are selected.
    """
    computing = [layer for layer in layers[:-1] if not layer.moves or len(layers) <= _MAX_LAYERS] + list(layers[-1:])
    if len(computing) <= _MAX_LAYERS:
        return computing
    return [computing[round(index * (len(computing) - 1) / (_MAX_LAYERS - 1))] for index in range(_MAX_LAYERS)]


def _frame_row(layer: LayerComparison) -> dict[str, Any]:
    names = ("name", "operator", "module", "source", "dtype", "scale", "zero_point", "value_source")
    line = {name: getattr(layer, name) for name in names}
    line |= {"sqnr": layer.gap.sqnr, "cosine": layer.gap.cosine, "max_error": layer.gap.max_error}
    isolated = layer.isolated
    line["isolated_sqnr"] = isolated and isolated.sqnr
    line |= {"clipped": isolated and isolated.clipped, "cause": isolated and isolated.advice.cause}
    return line


def _format_output(isolated: IsolatedError) -> str:
    return "" if isolated.output is None else _format_decibels(isolated.output)


def _layer_cells(layer: LayerComparison) -> tuple[str, str]:
    return layer.module or layer.name, layer.operator


def _format_advice(layer: LayerComparison) -> str:
    if layer.isolated is None:
        return layer.source
    advice = layer.isolated.advice
    return f"{advice.text} (isolated SQNR without this cause: {_format_decibels(advice.sqnr)})"


def _gap_cells(gap: ErrorMetrics | None) -> tuple[str, str, str]:
    if gap is None:
        return "", "", ""
    return _format_decibels(gap.sqnr), "" if gap.cosine is None else f"{gap.cosine:.6f}", f"{gap.max_error:.4g}"


def _sort_key(sqnr: float) -> float:
    """Sort NaN as the worst value."""
    return -math.inf if math.isnan(sqnr) else sqnr


def _format_decibels(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return f"{value:.1f} dB" if math.isfinite(value) else "exact" if value > 0 else "no signal"
