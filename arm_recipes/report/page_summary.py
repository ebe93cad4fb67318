"""First screen of the HTML report: is the program fast, does it fit, is it accurate?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arm_backend_core.format_count import format_count
from arm_recipes._internal.rendering import format_bytes
from arm_recipes.report.record import FLOAT_MODEL

if TYPE_CHECKING:
    from arm_recipes.report.comparisons import ComparisonRecord, TaskAccuracy
    from arm_recipes.report.context import ExportContext
    from arm_recipes.report.record import ExportRecord, MethodReport

_NO_ESTIMATE = "Cycles and RAM are estimated for Ethos-U and Cortex-M programs only."
_NO_LIMIT = "No limit is set: pass sram_budget= and flash_budget=, or board= to an Ethos-U recipe."
_FIRMWARE_CODE = "the firmware's code and constants need flash in addition"
_NO_COMPARISON = "labels= or metric= of export() show the accuracy of the task."


@dataclass(frozen=True)
class Answer:
    """An answer on the first screen.

    Attributes:
        question: the question, such as "Fits?". With several comparisons, "Accurate?" is followed by the method's name.
        value: the answer: a number with its unit, or a word such as "yes".
        details: phrases and numbers that explain the answer.
    """

    question: str
    value: str
    details: tuple[str, ...]


def answer_questions(
    report: ExportRecord,
    context: ExportContext,
    comparisons: Sequence[ComparisonRecord],
    measured_npu_cycles: Mapping[str, float],
) -> Iterator[Answer]:
    """Yield the answers to "Fast?", "Fits?" and "Accurate?".

    Args:
        report: the export.
        context: model, board and limits of the export.
        comparisons: comparisons with the model.
        measured_npu_cycles: cycles of the NPU that a device counted, by method; empty without measurements.
    """
    yield _answer_fast(report, context, measured_npu_cycles)
    yield _answer_fits(report, context)
    yield from [_answer_accurate(comparison, len(comparisons) > 1) for comparison in comparisons] or [
        _answer_accurate_by_calibration(report)
    ]


def _answer_fast(report: ExportRecord, context: ExportContext, measured_npu_cycles: Mapping[str, float]) -> Answer:
    estimated = [method for method in report.methods if any(delegate.vela for delegate in method.delegates)]
    if not estimated:
        return _answer_fast_on_cpu(report, context)
    method = max(estimated, key=lambda each: _milliseconds(each, measured_npu_cycles))
    estimates = [delegate.vela for delegate in method.delegates if delegate.vela is not None]
    first = estimates[0]
    cycles = sum(vela.total_cycles for vela in estimates)
    clock = f"{first.core_clock / 1e6:.0f} MHz on {first.accelerator}"
    details = [f"{cycles:,} cycles at {clock}, estimated by Vela"]
    measured = measured_npu_cycles.get(method.name)
    if measured is not None:
        details = [
            f"{measured:,.0f} cycles of the NPU, measured; the time assumes {clock}",
            f"{cycles:,} cycles estimated by Vela",
        ]
    if len(estimated) > 1:
        details.append(f"method '{method.name}', the slowest of {len(estimated)}")
    on_cpu = sum(operator.count for operator in method.cpu_operators)
    if any(cost.kind == "layer" for cost in method.cpu_layers):
        details.append(f"and {method.cpu_cycles:,} cycles of the CPU (estimate), not included in the time")
    elif on_cpu:
        details.append(f"without the time of {format_count(on_cpu, 'operator')} on the CPU")
    return Answer("Fast?", f"{_milliseconds(method, measured_npu_cycles):.3f} ms", tuple(details))


def _answer_fast_on_cpu(report: ExportRecord, context: ExportContext) -> Answer:
    """Answer for a program without an NPU: cycles instead of a time, because the clock is not known."""
    methods = [method for method in report.methods if method.cpu_cycles is not None]
    if not methods:
        return Answer("Fast?", "no estimate", (_NO_ESTIMATE,))
    method = max(methods, key=lambda method: method.cpu_cycles or 0)
    macs = sum(cost.macs for cost in method.cpu_layers)
    details = [f"estimate for {context.processor or 'the CPU'}, {macs:,} MACs"]
    if len(methods) > 1:
        details.append(f"method '{method.name}', the slowest of {len(methods)}")
    return Answer("Fast?", f"{method.cpu_cycles:,} cycles", tuple(details))


def _milliseconds(method: MethodReport, measured_npu_cycles: Mapping[str, float]) -> float:
    """Time of the NPU: from the measured cycles if there are some, else Vela's estimate."""
    estimates = [delegate.vela for delegate in method.delegates if delegate.vela is not None]
    if method.name in measured_npu_cycles:
        return 1e3 * measured_npu_cycles[method.name] / estimates[0].core_clock
    return 1e3 * sum(vela.inference_seconds for vela in estimates)


def _answer_fits(report: ExportRecord, context: ExportContext) -> Answer:
    files = "program and data file" if report.data_file_bytes else "program"
    program = (files, report.stored_bytes, context.flash_budget)
    ram = [] if report.ram is None else [("SRAM", report.ram.sram_bytes, context.sram_budget)]
    dram = 0 if report.ram is None else report.ram.dram_bytes
    sizes = [*ram, program]
    details = [
        f"{name} {format_bytes(size)}{'' if limit is None else f' of {format_bytes(limit)}'}"
        for name, size, limit in sizes
    ]
    details += [_FIRMWARE_CODE] if context.flash_budget is not None else []
    details += [f"DRAM {format_bytes(dram)}"] if dram else []
    details += [f"board {context.board}"] if context.board else []
    details += [report.ram.ram_reduction] if report.ram is not None and report.ram.ram_reduction else []
    exceeded = [vela for delegate in report.delegates if (vela := delegate.vela) is not None and vela.sram_exceeded]
    for vela in exceeded[:1]:
        details.append(f"NPU: {format_bytes(vela.sram_bytes)} of {format_bytes(vela.sram_limit or 0)} SRAM")
        details.append(f"exceeds the limit of memory mode {vela.memory_mode}")
    if exceeded or any(limit is not None and size > limit for _, size, limit in sizes):
        return Answer("Fits?", "no", tuple(details))
    if any(limit is not None for _, _, limit in sizes):
        return Answer("Fits?", "yes", tuple(details))
    if report.ram is None:
        return Answer("Fits?", f"{format_bytes(report.stored_bytes)} {files}", (_NO_ESTIMATE,))
    return Answer("Fits?", f"{format_bytes(report.ram.total_bytes)} RAM", (*details, _NO_LIMIT))


def _answer_accurate(comparison: ComparisonRecord, names_method: bool) -> Answer:
    sqnr, accuracy = f"SQNR {_format_sqnr(comparison.sqnr)}", comparison.accuracy
    origin = f"{format_count(comparison.samples, 'sample')}, against {comparison.reference}"
    question = f"Accurate? '{comparison.method}'" if names_method else "Accurate?"
    if accuracy is None:
        return Answer(question, sqnr, (origin, "labels= or metric= of compare() add the accuracy of the task."))
    reference, program = accuracy.figures
    return Answer(question, program, (f"{accuracy.metric}; {reference} of {comparison.reference}", sqnr, origin))


def _answer_accurate_by_calibration(report: ExportRecord) -> Answer:
    """Answer without a comparison: the task accuracy that the export measured, or the lowest SQNR of an output.

    The export computes the SQNR on the last calibration sample.
    """
    if report.accuracy is not None:
        return _answer_measured_accuracy(report.accuracy)
    quantized = [method.quantization for method in report.methods if method.quantization is not None]
    if not quantized:
        return Answer("Accurate?", "not quantized", (_NO_COMPARISON,))
    sqnrs = [sqnr for quantization in quantized for sqnr in quantization.sqnr.values()]
    if not sqnrs:
        return Answer("Accurate?", "not measured", (_NO_COMPARISON,))
    return Answer("Accurate?", f"SQNR {_format_sqnr(min(sqnrs))}", ("last calibration sample", _NO_COMPARISON))


def _answer_measured_accuracy(accuracy: TaskAccuracy) -> Answer:
    """Answer with the task accuracy that the export measured."""
    reference, program = accuracy.figures
    origin = f"{accuracy.items} items, run in PyTorch; result.compare() runs the program itself"
    details = f"{accuracy.metric}; {reference} of {FLOAT_MODEL}, drop {accuracy.drop_figure}", origin
    return Answer("Accurate?", program, details)


def _format_sqnr(sqnr: float) -> str:
    return "exact" if sqnr == math.inf else f"{sqnr:.1f} dB"
