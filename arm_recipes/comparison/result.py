"""What ``compare`` returns: figures for outputs, layers and the task, as data, as text and as HTML."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from arm_backend_core.quantization.diagnostics.error_metrics import Gap
from arm_recipes._internal.rendering import Renderable, Section, to_jsonable
from arm_recipes.comparison.accuracy import Accuracy
from arm_recipes.comparison.advice import LayerAdvice, QuantizedConstant

#: Layers that the printed comparison has advice for, and those that it lists.
WORST_COUNT, _LISTED = 5, 16
#: SQNR from which on there is nothing to better: that of float32 itself.
_EXACT = 120.0
#: How to have int16 where the advice says so.
_INT16 = "int16 for a module: get_recipe(..., precisions={'module': 'A16W8'}); tune() finds the best for a budget"


@dataclass(frozen=True)
class OutputGap:
    """An output of the program beside that of the model.

    Attributes:
        gap: None for what is no tensor.
    """

    name: str
    gap: Gap | None


@dataclass(frozen=True)
class OwnLoss:
    """What a layer loses by itself: with inputs in floating point, by integers as weights and by its result's steps.

    Attributes:
        sqnr: in dB; ``max_error``: the largest error.
        clipped: share of the values that lie beyond the range of the program.
        range: of the program; ``values``: of the samples; ``calibrated``: of calibration, where that is known.
        p999: what 99.9 % of the values do not exceed.
        output: SQNR of the first output if this layer alone is quantized, measured with the first samples; for the five
            layers of ``Comparison.worst``, where the model has no state.
        advice: the main cause, and what could be done.
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
class LayerGap:
    """A tensor inside the program beside that of the model.

    Attributes:
        name: of the node that computes it in the captured program; quantized twice, it is there twice.
        operator, module, source: ATen operator, path of the submodule, line of the model. An operator with weights and
            what is fused to it are one layer: both operators, and module and line of the first.
        dtype: as the program has it.
        scale, zero_point: None where it is not quantized.
        moves: it only brings numbers to other places.
        value_source: "program": the number that the delegate computes; "PyTorch": what PyTorch computes of these, of
            operators on the CPU and delegates that tell nothing.
        gap: as the program runs, errors of the layers before included.
        own: what it loses by itself; None where it is not quantized, or ``moves``, and between two programs.
        weights: quantized constants that it reads.
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
    gap: Gap
    own: OwnLoss | None = None
    weights: tuple[QuantizedConstant, ...] = ()


@dataclass(frozen=True)
class Comparison(Renderable):
    """A program beside the model in floating point, or beside another program.

    In ``to_dict()`` infinity is "Infinity".

    Attributes:
        program, reference: what is compared with what.
        method: of the program.
        samples: how many; ``layer_samples``: of these, how many layers were compared with.
        outputs: in the program's order.
        layers: in the program's order; the last one before an output has the figures of this.
        accuracy: of the task, where labels or a metric were given.
        seconds: that it took.
        notes: what else the user should know, one sentence each.
    """

    program: str
    reference: str
    method: str
    samples: int
    layer_samples: int
    outputs: tuple[OutputGap, ...]
    layers: tuple[LayerGap, ...]
    accuracy: Accuracy | None
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def sqnr(self) -> float:
        """Of the first output that is a tensor, in dB."""
        return next((output.gap.sqnr for output in self.outputs if output.gap is not None), math.nan)

    @property
    def worst(self) -> tuple[LayerGap, ...]:
        """The five layers that lose most by themselves, the worst first; between programs, those farthest apart."""
        own = [layer for layer in self.layers if layer.own is not None and not layer.own.sqnr >= _EXACT]
        if own:
            return tuple(sorted(own, key=lambda layer: _rank(layer.own.sqnr) if layer.own else 0.0)[:WORST_COUNT])
        found = [layer for layer in self.layers if not layer.gap.sqnr >= _EXACT]
        return tuple(sorted(found, key=lambda layer: _rank(layer.gap.sqnr))[:WORST_COUNT])

    def frame(self) -> Any:
        """A ``pandas.DataFrame`` with a line for each layer; a list of dicts where there is no pandas."""
        lines = [_line(layer) for layer in self.layers]
        try:
            import pandas
        except ImportError:
            return lines
        return pandas.DataFrame(lines)

    def to_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists, str and numbers, ready for JSON."""
        return super().to_dict() | {"sqnr": to_jsonable(self.sqnr), "worst": [layer.name for layer in self.worst]}

    def sections(self) -> Iterator[Section]:
        """Headings with their lines, for text and HTML."""
        rows: list[tuple[str, ...]] = [("", "SQNR", "cosine", "largest error")]
        rows += [(output.name, *_cells(output.gap)) for output in self.outputs if output.gap is not None]
        of = f"{self.samples} sample{'s' * (self.samples != 1)} in {self.seconds:.1f} s"
        yield f"{self.program} beside {self.reference}: '{self.method}', {of}", rows
        if self.accuracy is not None:
            yield "Accuracy", _accuracy_rows(self.accuracy, self.reference)
        if self.layers:
            yield from self._layer_sections()
        notes = [*self.notes, *([_INT16] if any("int16" in _advice(layer) for layer in self.worst) else [])]
        if notes:
            yield "Notes", [(note,) for note in notes]

    def _layer_sections(self) -> Iterator[Section]:
        own = any(layer.own is not None for layer in self.layers)
        worst = self.worst
        what = "lose most by themselves" if own else "are farthest apart"
        rows: list[tuple[str, ...]] = [("own", "output", "", "", "") if own else ("", "", "", "")]
        for layer in worst:
            cells = (_decibels(layer.own.sqnr), _output(layer.own)) if layer.own else (_decibels(layer.gap.sqnr),)
            rows.append((*cells, *_place(layer), _advice(layer)))
        if worst:
            yield f"Layers that {what}{', and the output with only this one quantized' * own}", rows
        chosen = _chosen(self.layers)
        heads = ("", "operator", "type", *(("own",) if own else ()), "SQNR", "cosine", "largest error", "told by")
        table = [heads]
        for layer in chosen:
            mine = (_decibels(layer.own.sqnr) if layer.own else "",) if own else ()
            table.append((*_place(layer), layer.dtype, *mine, *_cells(layer.gap), layer.value_source))
        listed = "" if len(chosen) == len(self.layers) else f", {len(chosen)} of them here; all are in frame()"
        of = "" if self.layer_samples == self.samples else f", {self.layer_samples} samples"
        yield f"Layers, as the program runs: {len(self.layers)}{of}{listed}", table


def _chosen(layers: tuple[LayerGap, ...]) -> list[LayerGap]:
    """Some layers from the first to the last one; of many, those that compute."""
    found = [layer for layer in layers[:-1] if not layer.moves or len(layers) <= _LISTED] + list(layers[-1:])
    if len(found) <= _LISTED:
        return found
    return [found[round(index * (len(found) - 1) / (_LISTED - 1))] for index in range(_LISTED)]


def _accuracy_rows(accuracy: Accuracy, reference: str) -> list[tuple[str, ...]]:
    is_share = accuracy.agreeing is not None
    numbers = [f"{100 * x:.2f} %" if is_share else f"{x:.6g}" for x in (accuracy.reference, accuracy.program)]
    of = f"{accuracy.metric}, {accuracy.items} {'items' if is_share else 'samples'}"
    rows: list[tuple[str, ...]] = [(of, f"{numbers[0]} of {reference}", f"{numbers[1]} of the program")]
    if accuracy.agreeing is not None:
        rows.append(("predictions that agree", f"{accuracy.agreeing} of {accuracy.items}", ""))
    return rows


def _line(layer: LayerGap) -> dict[str, Any]:
    names = ("name", "operator", "module", "source", "dtype", "scale", "zero_point", "value_source")
    line = {name: getattr(layer, name) for name in names}
    line |= {"sqnr": layer.gap.sqnr, "cosine": layer.gap.cosine, "max_error": layer.gap.max_error}
    own = layer.own
    line |= {"own_sqnr": own and own.sqnr, "clipped": own and own.clipped, "cause": own and own.advice.cause}
    return line


def _output(own: OwnLoss) -> str:
    return "" if own.output is None else _decibels(own.output)


def _place(layer: LayerGap) -> tuple[str, str]:
    return layer.module or layer.name, layer.operator


def _advice(layer: LayerGap) -> str:
    if layer.own is None:
        return layer.source
    return f"{layer.own.advice.text} ({_decibels(layer.own.advice.sqnr)} without it)"


def _cells(gap: Gap | None) -> tuple[str, str, str]:
    if gap is None:
        return "", "", ""
    return _decibels(gap.sqnr), "" if gap.cosine is None else f"{gap.cosine:.6f}", f"{gap.max_error:.4g}"


def _rank(sqnr: float) -> float:
    """NaN is worse than anything: it can be compared with nothing."""
    return -math.inf if math.isnan(sqnr) else sqnr


def _decibels(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return f"{value:.1f} dB" if math.isfinite(value) else "exact" if value > 0 else "no signal"
